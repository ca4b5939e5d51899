"""What a simulation needs from real machines: an engine's curve, and the controller's cost per trajectory."""

import asyncio
import json
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.placement import WorkerPlacement, WorkerSpec
from config import Config
from controller.workers import Worker
from data.messages import Finished
from data.models import resolve_model
from data.records import Group, Trajectory
from engine.proxy import LLMProxy
from engine.vllm_setup import worker_environment
from records.run_directory import RunDirectory
from scripts.bench_rollout_worker import ForcedLengths
from scripts.simulation.cluster import Case, Cluster, Simulation
from scripts.simulation.engine import EngineCurve
from scripts.simulation.scenarios import Setup, batch_of
from scripts.simulation.workload import PROMPT_TOKENS, Workload, lengths_up_to

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
DECODED_TOKENS, PROMPT_LENGTH, MAX_MODEL_TOKENS = 96, 32, 40 + 192
NUM_PICKLES = 200


# The engine


class ExactLengths(ForcedLengths):
    """An engine whose responses have the length that is asked for."""

    generate = LLMProxy.generate


def measure_engine(model: str, repeats: int, source: str) -> EngineCurve:
    """Time the real vLLM engine on the CPU with forced lengths; medians of `repeats`."""
    return asyncio.run(_measure_engine(model, repeats, source))


async def _measure_engine(model: str, repeats: int, source: str) -> EngineCurve:
    config = Config(max_response_tokens=MAX_MODEL_TOKENS - 40, max_running_requests=max(REQUESTS))
    placement = WorkerPlacement(0, None, None, 1, 0.0)
    os.environ.update(worker_environment(placement))
    spec = WorkerSpec(config, placement, resolve_model(model, config.task), "shm", "")
    proxy = await ExactLengths.start(spec, [])
    try:
        await proxy.engine.engine_core.set_weight_version_async("0")  # tokens are stamped with it
        await _time_requests(proxy, max(REQUESTS), DECODED_TOKENS)  # warms up
        whole, first = np.empty((2, repeats, len(REQUESTS)))
        for repeat in range(repeats):  # alternating, so that a busy moment of the machine falls on all alike
            for index, count in enumerate(REQUESTS):
                whole[repeat, index] = await _time_requests(proxy, count, DECODED_TOKENS)
                first[repeat, index] = await _time_requests(proxy, count, 1)
        whole_s, first_s = np.median(whole, axis=0), np.median(first, axis=0)
        points = zip(REQUESTS, ((DECODED_TOKENS - 1) / (whole_s - first_s)).tolist(), strict=True)
        prefill = PROMPT_LENGTH * (REQUESTS[-1] - REQUESTS[0]) / float(first_s[-1] - first_s[0])
        return EngineCurve(source, tuple(points), prefill, max(REQUESTS))
    finally:
        proxy.shutdown()


async def _time_requests(proxy, count: int, num_tokens: int) -> float:
    """Seconds that `count` requests of that many tokens take together; every prompt is new to the prefix cache."""
    start = time.monotonic()
    rng = np.random.default_rng(time.monotonic_ns())
    prompts = [tuple(rng.integers(3, 14, PROMPT_LENGTH).tolist()) for _ in range(count)]
    await asyncio.gather(*(proxy.generate(f"{start}.{i}", prompt, i, num_tokens) for i, prompt in enumerate(prompts)))
    return time.monotonic() - start


# The controller


class TimedSimulation(Simulation):
    """Counts the CPU time that the real controller takes, everything that it does with a result included."""

    def __init__(self, case: Case, run: RunDirectory):
        self.controller_s = 0.0
        super().__init__(case, run.record)
        self.workers.launch(self._timed_message, None)

    def _timed(self, function: Callable, *arguments):
        start = time.thread_time()
        result = function(*arguments)
        self.controller_s += time.thread_time() - start
        return result

    def _timed_message(self, worker: Worker, message) -> None:
        self._timed(self.controller.on_message, worker, message)

    def _take(self) -> list[Group] | None:
        return self._timed(super()._take)

    def _publish(self) -> None:
        self._timed(super()._publish)


def measure_controller(sizes: list[int], groups: int) -> list[dict]:
    """CPU seconds per trajectory by the number of workers, and their parts."""
    setup = Setup(lengths_up_to(32768))
    reading_s = time_reading(round(setup.lengths.mean) + PROMPT_TOKENS)
    points = []
    for num_workers in sizes:
        cluster = Cluster(setup.curve, num_workers, 0.0, num_replicas=8)
        case = Case("controller", batch_of(groups, 16, async_ratio=1.0), Workload(setup.lengths), cluster, 2, 1)
        with tempfile.TemporaryDirectory() as directory:
            run = RunDirectory(Config(runs_dir=directory, run_name="controller"))
            simulation = TimedSimulation(case, run)
            simulation.run()
            run.close()
        handling_s = simulation.controller_s / simulation.totals.trajectories
        points.append(
            {
                "workers": num_workers,
                "groups_outstanding": case.config.max_outstanding_groups,
                "trajectories": simulation.totals.trajectories,
                "reading_s": reading_s,
                "handling_s": handling_s,
                "seconds_per_trajectory": reading_s + handling_s,
            }
        )
    return points


def time_reading(num_tokens: int) -> float:
    """CPU seconds to turn a message with one real trajectory of that length back into an object."""
    mask = np.ones(num_tokens, bool)
    trajectory = Trajectory(
        0, 0, 0, np.zeros(num_tokens, np.int64), mask, np.zeros(num_tokens, np.float32),
        np.zeros(num_tokens, np.int32), 0.0, "stop", "", 1, started_at=0.0, ended_at=0.0, worker=0,
    )  # fmt: skip
    message = pickle.dumps(Finished([trajectory], None))
    start = time.thread_time()
    for _ in range(NUM_PICKLES):
        pickle.loads(message)
    return (time.thread_time() - start) / NUM_PICKLES


def save_controller(points: list[dict], made_by: dict, path: Path) -> None:
    """Write what measure_controller found."""
    path.write_text(json.dumps({**made_by, "points": points}, indent=1) + "\n", encoding="utf-8")
