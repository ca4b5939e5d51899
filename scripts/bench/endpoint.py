"""What it costs to be an agent, on SmolLM2-135M on the CPU: `python scripts/bench/endpoint.py`.

One conversation as a gymnasium environment, and as an agent that calls the endpoint through OpenAI's client. A real
controller and a worker with a real engine sample a batch; there is no trainer, and the same weights are published
again before each batch. A trajectory ends when its 256 tokens are used up, in both arms, so both sample as many.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from asyncrl.config import Config
from rollout import run_worker
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arguments, Bench, Case, Column, Measure
from scripts.bench.rig import Rig, running, wait_until_idle

TASKS = {
    "environment": "environment:scripts/bench/chat.py:Chat",
    "agent": "agent:scripts/bench/chat.py:run",
}
OPTIONS = {
    "model": "smollm2", "dtype": "bfloat16", "groups_per_step": 4, "group_size": 4, "async_ratio": 0.0,
    "max_prompt_tokens": 128, "max_response_tokens": 256, "num_rollout_workers": 1,
}  # fmt: skip
COLUMNS = [
    Column("samples_per_s", "samples/s", ".3f", 1.0, 1, "against the environment"),
    Column("tokens_per_s", "sampled tokens/s", ".0f"),
    Column("tokens", "sampled tokens of a sample", ".0f"),
    Column("turns", "calls of a sample", ".2f"),
    Column("worker_ms", "ms of the worker's CPU a call", ".1f"),
]


@contextmanager
def start(arm: str, logs: Path) -> Iterator[Measure]:
    """An arm, with its engine up."""
    config = Config(task=TASKS[arm], **OPTIONS).checked()
    with running(config, run_worker, logs / arm) as node:
        rig = Rig(node)
        yield lambda: measure(rig)


def measure(rig: Rig) -> dict:
    """Time a batch, from the publish to its last sample."""
    start, cpu_before = time.monotonic(), workers_cpu_s()
    trajectories = [t for group in rig.step() for t in group.trajectories]
    seconds = time.monotonic() - start
    cpu_s = workers_cpu_s() - cpu_before
    wait_until_idle(rig.node)
    tokens = sum(t.num_generated for t in trajectories)
    turns = sum(t.num_turns for t in trajectories)
    return {
        "seconds": seconds,
        "samples_per_s": len(trajectories) / seconds,
        "tokens_per_s": tokens / seconds,
        "tokens": tokens / len(trajectories),
        "turns": turns / len(trajectories),
        "worker_ms": 1000 * cpu_s / turns,
    }


def workers_cpu_s() -> float:
    """Return the CPU time of all workers so far, without their engines, seconds."""
    times = [worker.cpu_times() for worker in psutil.Process().children()]
    return sum(each.user + each.system for each in times)


def cases(given: Arguments) -> Iterator[Case]:
    """Yield the comparison."""
    yield Case("chat", {arm: functools.partial(start, arm) for arm in TASKS}, memory=8e9)


def tables(records: list[dict]) -> Iterator[str]:
    """Yield the table."""
    yield "\n".join(harness.table("SmolLM2", harness.rounds(records, "arm"), COLUMNS))


DEFAULTS = Arguments(out=ROOT / "results/endpoint")
BENCH = Bench(
    "endpoint", "An agent against an environment", cases, tables, ("case", "arm"), DEFAULTS
)

if __name__ == "__main__":
    harness.main(BENCH)
