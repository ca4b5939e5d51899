"""A controller with real workers of any kind, and the trainer's side of their protocol, one step at a time.

A rig stands still between two steps, so several of them can be measured in turn. A `Rig` has no trainer: the same
weights are published again and again, under a rising version. A `TrainingRig` is the loop of train_async.py.
"""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.placement import available_cores, place
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.config import Config
from asyncrl.job.node import Rank, start_leader
from asyncrl.job.step_log import StepLog
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.trainer import batch
from asyncrl.trainer.policy import load_policy
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec
from scripts.bench.work import NO_LEARNING, run_work_worker
from scripts.lines import read

IDLE_TIMEOUT_S, SETTLE_S = 60.0, 0.1
TRANSPORTS = {"ipc": IpcTransport, "shm": ShmTransport}
"""Those that one GPU, or none, can have."""

Weights = list[tuple[str, Tensor]]
"""Hugging Face name and value of each parameter."""


class Rig:
    """A node with workers and no trainer, on the CPU or on one GPU. To be used `with running(rig)`."""

    def __init__(self, config: Config, worker_main: Callable, folder: Path, device: str = "cpu"):
        """`folder` is made, for records and logs."""
        endless = {"lr": NO_LEARNING, "steps": 10**9, "eval_every": 0}
        self.config = replace(config, **endless, runs_dir=str(folder.parent), run_name=folder.name)
        self.version = 0
        """Of the weights that are published next."""
        self.published_at: dict[int, float] = {}
        """Unix time by version."""
        self.worker_main, self.device = worker_main, torch.device(device)

    def start(self, on_end: ExitStack) -> None:
        """Start the workers; returns at once. What is left of the rig goes with `on_end`."""
        cluster = Cluster()
        placement = place(self.config, int(self.device.type == "cuda"), available_cores(), 1)
        watch = NodeWatch(cluster, dump_stacks)
        rank = Rank(
            self.config, cluster, placement, self.device, TrainerClock(), on_end, watch, None
        )
        with quiet():
            self.node = start_leader(rank, self.worker_main)
        self.controller = self.node.controller

    def connect(self) -> None:
        """Wait until the engines are up, and join them to the weights."""
        torch.set_num_threads(self.node.placement.trainer_threads)
        dtype = getattr(torch, self.config.dtype_on(self.device.type))
        loaded = load_weights(self.node.model_path)
        self.weights = [(name, weight.to(self.device, dtype)) for name, weight in loaded]
        self.controller.connect(TRANSPORTS[self.node.placement.transport](specs_of(self.weights)))

    def publish(self) -> None:
        """Publish the weights under the next version."""
        staged = self.controller.stage(self.version, self.weights)
        self.published_at[self.version] = time.time()
        self.controller.publish(Announcement(self.version, self.version, staged, (), False))
        self.version += 1

    def step(self) -> list[Group]:
        """Publish the weights and take a batch."""
        self.publish()
        return self.controller.take_batch()

    def update_seconds(self, since: int) -> list[float]:
        """From each publish to when a worker sampled under it, of the versions from `since` on."""
        events = read(self.node.run.path / "events.jsonl")
        updates = [
            event for event in events if event["event"] == "update" and event["version"] >= since
        ]
        return [event["time"] - self.published_at[event["version"]] for event in updates]

    def wait_until_idle(self) -> None:
        """Wait until no worker does anything; with over-sampling, until what is left is suspended.

        Raises RuntimeError if one still does after IDLE_TIMEOUT_S.
        """
        suspended, deadline = self.config.over_sampling > 1, time.monotonic() + IDLE_TIMEOUT_S
        while any(
            worker.loading or (worker.running and not suspended)
            for worker in self.controller.workers
        ):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"not idle after {IDLE_TIMEOUT_S:g} s: {self.controller.dispatcher.describe()}"
                )
            time.sleep(0.01)
        time.sleep(SETTLE_S)


class TrainingRig(Rig):
    """A run of train_async.py's loop. It can leave the training out, or train on batches that it has already.

    In an initialised process group of one rank.
    """

    def __init__(self, config: Config, folder: Path, worker_main: Callable = run_work_worker):
        super().__init__(config, worker_main, folder)
        self.batches: list[list[Group]] = []
        """The newest ones."""

    def connect(self) -> None:
        """Load the policy, wait for the engines and publish the first weights."""
        torch.set_num_threads(self.node.placement.trainer_threads)
        self.policy = load_policy(
            self.config, self.node.model_path, self.node.device, self.node.clock
        )
        with quiet():
            self.publisher = self.node.make_publisher(self.policy)
            self.publisher.publish(0)
            self.log = StepLog(self.node).__enter__()

    def step(self, train: bool = True) -> list[Group]:
        """One turn of the loop; without training, the same weights are published under the next version."""
        self.version += 1
        groups = self.node.take_batch(self.version, self.publisher)
        stats = self.train(groups) if train else {}
        self.publisher.publish(self.version, groups)
        with quiet():
            self.log.write(self.version, groups, stats)
        self.batches = [*self.batches[-9:], groups]
        return groups

    def train(self, groups: list[Group]) -> dict[str, float]:
        """The training part of a step."""
        updates = batch.deal(groups, self.version, self.policy, self.node.cluster)
        return self.policy.train_step(updates, policy_version=self.version - 1)


@contextmanager
def running(rig: Rig) -> Iterator[Rig]:
    """A rig whose engines are up; nothing of it is left afterwards."""
    with ExitStack() as on_end:
        rig.start(on_end)
        rig.connect()
        yield rig


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress that a run prints."""
    with redirect_stdout(io.StringIO()):
        yield


def load_weights(model_path: str) -> Weights:
    """Every parameter of a checkpoint, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, trust_remote_code=False
    )
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def specs_of(weights: Weights) -> list[ParameterSpec]:
    """What a transport must know of some weights."""
    return [ParameterSpec(name, weight.dtype, tuple(weight.shape)) for name, weight in weights]
