"""Whole steps for bench_parts.py: the loop of train_async.py in this process, and the queue between its two halves.

A job can be stopped between any two steps, so several of them can be measured in turn; one stands still while another
is measured. It can also leave the training out, or train on batches that it has already.
"""

import contextlib
import functools
import io
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from cluster.cluster import Cluster
from cluster.placement import available_cores, place
from cluster.processes import freeze_garbage
from config import Config
from controller.controller import Controller
from controller.tickets import PromptSource, TicketSource
from controller.workers import Workers
from data.models import load_tokenizer, resolve_model
from data.records import Group
from data.tasks import load_task
from job.node import Node
from job.probe import Probe
from job.publisher import Publisher
from job.step_log import StepLog
from records.run_directory import RunDirectory
from records.time_ledger import TrainerClock
from scripts.bench_parts_echo import run_echo_worker
from scripts.bench_work import NO_LEARNING, run_work_worker
from trainer import batch
from trainer.policy import load_policy
from weights.shm import ShmTransport
from weights.transport import Announcement, ParameterSpec


def make_node(config: Config, worker_main) -> Node:
    """What surrounds the loop, on the CPU; its workers run `worker_main`."""
    placement = place(config, 0, available_cores(), 1)
    task = load_task(config.task, config.seed)
    model_path = resolve_model(config.model, config.task)
    tokenizer = load_tokenizer(model_path)
    prompts = PromptSource(task.train_problem, [], lambda problem: task.encode_prompt(problem, tokenizer))
    run = RunDirectory(config)
    workers, clock = Workers(config, placement, model_path, run.path, worker_main), TrainerClock()
    controller = Controller(config, workers, TicketSource(config, prompts), run.record, clock)
    fields = config, Cluster(), placement, torch.device("cpu"), model_path, clock, Probe(config)
    return Node(*fields, run, tokenizer, controller)


class Job:
    """A run of train_async.py's loop, one step at a time."""

    def __init__(self, config: Config, worker_main: Callable):
        self.config = replace(config, lr=NO_LEARNING, steps=10**9, eval_every=0)
        self.node = make_node(self.config, worker_main)
        self.step = 0
        self.batches: list[list[Group]] = []
        """The newest ones."""

    def connect(self) -> None:
        """Load the policy, wait for the engines and publish the first weights."""
        torch.set_num_threads(self.node.placement.trainer_threads)
        self.policy = load_policy(self.config, self.node.model_path, self.node.device, self.node.clock)
        with quiet():
            self.publisher = Publisher(self.node, self.policy)
            self.log = StepLog(self.node).__enter__()
        self.publisher.publish(0)
        self.log.begin()

    def run_step(self, train: bool = True) -> None:
        """One turn of the loop; without training, the same weights are published under the next version."""
        self.step += 1
        groups, stats = self.node.take_batch(self.step), {}
        if train:
            stats = self.train(groups)
        self.publisher.publish(self.step, groups)
        self.log.write(self.step, groups, stats)
        self.batches = [*self.batches[-9:], groups]

    def train(self, groups: list[Group]) -> dict[str, float]:
        """The training part of a step."""
        updates = batch.deal(groups, self.step, self.policy, self.node.cluster)
        return self.policy.train_step(updates, policy_version=self.step - 1)

    def measure(self, steps: int, train: bool = True) -> dict[str, float]:
        """Steady state over `steps` steps, after as many as wait already; then the workers come to rest."""
        with quiet():
            for _ in range(math.ceil(self.config.async_ratio) + 1):
                self.run_step(train)
            start, cpu_s = time.monotonic(), self.cpu_seconds()
            for _ in range(steps):
                self.run_step(train)
            seconds = time.monotonic() - start
            used = {name: (now - cpu_s[name]) / steps for name, now in self.cpu_seconds().items()}
        lines = (self.node.run.path / "metrics.jsonl").read_text().splitlines()[-steps:]
        metrics = [json.loads(line) for line in lines]
        self.wait_until_idle()
        return {
            "step_s": seconds / steps,
            "tokens_per_step": float(np.mean([group_tokens(groups) for groups in self.batches])),
            "pause_s": float(np.mean([m["rollout/pause_s"] for m in metrics if "rollout/pause_s" in m])),
            "cpu_s": used,
            **{f"{name}_s": float(np.median([m[f"time/{name}_s"] for m in metrics])) for name in _PHASES},
        }

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of this process, of the workers, of their engines, and of what scores for them."""
        used = {"trainer": time.process_time(), "worker": 0.0, "engine": 0.0, "rewards": 0.0}
        for worker in self.node.controller.workers:
            process = psutil.Process(worker.process.process.pid)
            used["worker"] += _cpu_s(process)
            for child in process.children(recursive=True):
                is_engine = "".join(child.cmdline()[:1]).startswith("engine ")
                used["engine" if is_engine else "rewards"] += _cpu_s(child)
        return used

    def measure_training(self, steps: int) -> float:
        """Seconds per step of training alone, on the newest batches in turn."""
        start = time.monotonic()
        for index in range(steps):
            self.train(self.batches[index % len(self.batches)])
        return (time.monotonic() - start) / steps

    def wait_until_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until no worker does anything. Raises RuntimeError if one still does after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while any(worker.loading or worker.running for worker in self.node.controller.workers):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not idle after {timeout_s:g} s: {self.node.controller.describe()}")
            time.sleep(0.01)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def group_tokens(groups: list[Group]) -> int:
    """Tokens that the policy wrote in some groups."""
    return sum(group.num_generated for group in groups)


_PHASES = ("wait", "train", "publish")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the progress that a run prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def started(
    configs: dict[str, Config],
    folder: Path,
    worker_main: Callable = run_work_worker,
) -> Iterator[dict[str, Job]]:
    """A job of each config, with its engines up and idle; none is left afterwards."""
    jobs = {}
    try:
        for name, config in configs.items():
            jobs[name] = Job(replace(config, runs_dir=str(folder), run_name=name), worker_main)
        for job in jobs.values():
            job.node.controller.launch()
        for job in jobs.values():
            job.connect()
        for job in jobs.values():
            job.measure(2)
        freeze_garbage()
        yield jobs
    finally:
        stop_all([job.node for job in jobs.values()])


def stop_all(nodes: list[Node]) -> None:
    """End workers and files. All at once: a controller that stops ends every child of this process."""
    if nodes:
        with ThreadPoolExecutor(len(nodes)) as threads:
            list(threads.map(lambda node: node.controller.stop(), nodes))
    for node in nodes:
        node.run.close()


# The queue alone


@contextlib.contextmanager
def echoing(config: Config, per_message: int) -> Iterator["EchoLoop"]:
    """The controller's side of a run whose worker answers at once."""
    node = make_node(config, functools.partial(run_echo_worker, per_message=per_message))
    try:
        node.controller.launch()
        yield EchoLoop(node)
    finally:
        stop_all([node])


class EchoLoop:
    """Takes batches and publishes weights of 256 bytes, and does nothing between."""

    def __init__(self, node: Node):
        self.node, self.version = node, 0
        self.transport = ShmTransport([ParameterSpec("weight", torch.float32, (64,))])
        self.weights = [("weight", torch.zeros(64))]
        node.controller.connect(self.transport)
        self._publish()

    def _publish(self) -> None:
        staged = self.node.controller.stage(self.version, self.weights)
        self.node.controller.publish(Announcement(self.version, self.version, staged, (), False))

    def measure(self, steps: int) -> dict[str, float]:
        """Microseconds per trajectory: of CPU time in this process, and of time."""
        cpu, start = time.process_time(), time.monotonic()
        for _ in range(steps):
            self.node.controller.take_batch()
            self.version += 1
            self._publish()
        trajectories = steps * self.node.config.groups_per_step * self.node.config.group_size
        return {
            "cpu_us": (time.process_time() - cpu) / trajectories * 1e6,
            "wall_us": (time.monotonic() - start) / trajectories * 1e6,
        }
