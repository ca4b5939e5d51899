"""A node with real workers of any kind and no trainer, one step at a time.

The same weights are published again and again, under a rising version. A rig stands still between two steps, so several
of them can be measured in turn.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.placement import available_cores, place
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.config import Config
from asyncrl.job.assemble import lead
from asyncrl.job.inputs import read_task
from asyncrl.job.node import Leader, Rank
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.models import resolve_model
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec

NO_LEARNING = 1e-12
"""Learning rate that costs what any other costs and leaves weights, and lengths of responses, as they are."""
TRANSPORTS = {"ipc": IpcTransport, "shm": ShmTransport}
"""Those that one GPU, or none, can have."""


class Rig:
    """Publishes the weights of a node's model again and again, and takes batches."""

    def __init__(self, node: Leader):
        """Wait until the engines are up, and join them to the weights."""
        from transformers import AutoModelForCausalLM

        self.node, self.controller, self.config = node, node.controller, node.config
        self.version = 0
        """Of the weights that are published next."""
        dtype = getattr(torch, self.config.dtype_on(node.device.type))
        model = AutoModelForCausalLM.from_pretrained(
            node.model_path, dtype=torch.float32, trust_remote_code=False
        )
        self.weights = [
            (name, parameter.detach().to(node.device, dtype))
            for name, parameter in model.named_parameters()
        ]
        specs = [ParameterSpec(name, w.dtype, tuple(w.shape)) for name, w in self.weights]
        self.controller.connect(TRANSPORTS[node.placement.transport](specs))

    def step(self) -> list[Group]:
        """Publish the weights under the next version, and take a batch."""
        staged = self.controller.stage(self.version, self.weights)
        self.controller.publish(Announcement(self.version, self.version, staged, (), False))
        self.version += 1
        return self.controller.consume_batch(self.controller.wait_for_batch())


@contextmanager
def running(
    config: Config, worker_main: Callable, folder: Path, device: str = "cpu"
) -> Iterator[Leader]:
    """Yield a node with workers, on the CPU or on one GPU; nothing of it is left afterwards.

    `folder` is made, for records and logs.
    """
    endless = {"lr": NO_LEARNING, "steps": 10**9, "eval_every": 0, "save_every": None}
    config = replace(config, **endless, runs_dir=str(folder.parent), run_name=folder.name)
    cluster, clock, here = Cluster(), TrainerClock(), torch.device(device)
    placement = place(config, int(here.type == "cuda"), available_cores(), 1)
    watch = NodeWatch(cluster, dump_stacks)
    with ExitStack() as on_end:
        rank = Rank(config, cluster, placement, here, clock, on_end, watch, None)
        with quiet():
            task = read_task(config, rank.cluster)
            model_path = resolve_model(config.model, config.task)
            node = lead(rank, model_path, task, worker_main)
        torch.set_num_threads(node.placement.trainer_threads)
        yield node


def quiet() -> redirect_stdout:
    """Hide the progress that a run prints."""
    return redirect_stdout(io.StringIO())
