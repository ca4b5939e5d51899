"""Every rollout mechanism against its baseline, on the real engine: `python scripts/bench_rollout.py`.

A real Controller, two worker processes with a vLLM engine each, weights through shared memory; no trainer: the tiny
model's weights are published again and again, under a rising version. A comparison is a list of arms, and an arm a
Config with engines of its own. All arms of a comparison are started first and then measured in turn, one after the
other and again from the first; an arm stands still while another is measured. The first round warms up and is dropped.

One measurement is a few rollout steps: publish, take a batch, publish, …, take a batch, timed from the first publish to
the last batch. Where async_ratio is above 0, batches that wait already are taken before the clock starts.

All arms do the same work. Lengths are forced (no end of sequence, max_tokens = length) and drawn from a long-tailed law
by the ticket's seed; with one request for a whole group, its members get the lengths of the tickets that they would
have been. Rewards of single turns are simulated too: REWARD_S seconds each, one at a time in each worker.
"""

import argparse
import functools
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from cluster.placement import Placement, WorkerPlacement
from config import Config
from controller.controller import Controller
from controller.tickets import PromptSource, TicketSource
from controller.workers import Workers
from data.messages import SampledTokens
from data.models import load_tokenizer, resolve_model
from data.records import Group, Trajectory
from data.tasks import Problem, load_task
from rollout import run_worker
from scripts import bench_rollout_report as report
from scripts.bench_rollout_worker import start_bench_worker
from scripts.latency import LatencyLaw
from weights.transport import Announcement

ROOT = Path(__file__).resolve().parent.parent

NUM_WORKERS = 2
VARYING_SHARE = 0.5
"""Share of the problems whose responses differ in reward; the groups of the others are filtered where that is on."""
IDLE_TIMEOUT_S, SETTLE_S = 60.0, 0.1
ENGINE_BYTES = 1_600_000_000
"""Memory of a rollout worker and its engine."""


# What is compared


@dataclass(frozen=True)
class Comparison:
    """Arms that differ in a few options, the first one the baseline."""

    name: str
    """The mechanism, then what distinguishes this comparison from others of it."""
    steps: int
    """Rollout steps in one measurement."""
    common: dict
    """Options that all arms share; see Config."""
    arms: dict[str, dict]
    """Name of each arm -> the options in which it differs."""
    latency: str = "constant:0"
    """Law of the environment's latency, see latency.py."""
    num_workers: int = NUM_WORKERS
    """Rollout workers of each arm."""
    counts_sampled: bool = False
    """Whether all tokens that the engines sample are counted. It takes a step more, after the clock has stopped, which
    is in the ledger too."""

    @property
    def mechanism(self) -> str:
        return self.name.split()[0]

    def config(self, arm: str) -> Config:
        """The options of one arm."""
        return Config(**{**COMMON, **self.common, **self.arms[arm]}).checked()


COMMON = {
    "groups_per_step": 8, "group_size": 8, "async_ratio": 0.0, "max_response_tokens": 192,
    # 64 slots on two workers: as many as a batch of 8 groups of 8 has responses.
    "max_running_requests": 32,
}  # fmt: skip
_GUESSING = {"task": "guess_number", "max_response_tokens": 64, "max_running_requests": 128}
_LONG_TAIL = "lognormal:2,0.8 scale:0.01"
_REDUNDANT = {
    "none": {}, "+1 member": {"extra_members": 1}, "+2 members": {"extra_members": 2},
    "+2 groups": {"extra_groups": 2}, "+4 groups": {"extra_groups": 4},
}  # fmt: skip
_REPLICATION = {"one request": {"replicate_prompts": False}, "replicated": {"replicate_prompts": True}}
_BARRIER = {"barrier": {"scheduling": "lockstep"}, "asynchronous": {"scheduling": "queue"}}

COMPARISONS = (
    Comparison(
        "scheduling",
        2,
        {"drop_zero_variance": True},
        {
            "batch": {"scheduling": "batch"},
            "queue": {"scheduling": "queue"},
            "queue +16 groups": {"scheduling": "queue", "extra_groups": 16},
        },
    ),
    # Slots for two groups on each worker, so that not everything runs at once.
    Comparison("replication 8x8", 3, {"max_running_requests": 16}, _REPLICATION),
    Comparison("replication 16x16", 1, {"groups_per_step": 16, "group_size": 16}, _REPLICATION),
    *(
        Comparison(
            f"environments normal(10,{sigma})",
            2,
            _GUESSING,
            _BARRIER,
            latency=f"normal:10,{sigma} scale:0.01",
        )
        for sigma in (1, 5, 10)
    ),
    Comparison("redundancy", 2, _GUESSING, _REDUNDANT, latency=_LONG_TAIL),
    Comparison(
        "redundancy failing", 2, {**_GUESSING, "env_timeout_s": 2.0}, _REDUNDANT, latency=_LONG_TAIL + " fail:0.01"
    ),
    Comparison(
        "over-sampling",
        3,
        {"on_update": "resume"},
        {f"R = {ratio:g}": {"over_sampling": ratio} for ratio in (1.0, 1.5, 2.0, 3.0)},
        counts_sampled=True,
    ),
    # Half as many slots, so that the next batch is in the middle of its generation when one is complete.
    Comparison(
        "updates",
        3,
        {"async_ratio": 1.0, "max_running_requests": 16},
        {mode: {"on_update": mode} for mode in ("keep", "recompute", "resume", "restart", "wait")},
    ),
)
MECHANISMS = tuple(dict.fromkeys(comparison.mechanism for comparison in COMPARISONS))


def tiny(comparison: Comparison) -> Comparison:
    """The same comparison so small that it only shows whether it runs."""
    size = {"groups_per_step": 2, "group_size": 2, "max_running_requests": 8}
    return replace(comparison, steps=1, num_workers=1, common={**comparison.common, **size})


# One arm


class Session:
    """One arm that has been started, and the trainer's part of its protocol."""

    def __init__(self, config: Config, latency: LatencyLaw, num_workers: int, run_path: Path):
        run_path.mkdir()
        self.config = config
        self.version = 0
        """Version to publish next: batches taken so far."""
        self.update_s: list[float] = []
        """From each publish to when a worker sampled under it, seconds."""
        self._published_at: dict[int, float] = {}
        model_path = resolve_model(config.model, config.task)
        self._weights = _weights(model_path)
        workers = tuple(WorkerPlacement(i, None, None, 1, 0.0) for i in range(num_workers))
        placement = Placement((None,), 1, workers, "shm")
        run = functools.partial(run_worker, start=functools.partial(start_bench_worker, law=latency))
        self.controller = Controller(
            config,
            Workers(config, placement, model_path, run_path, run),
            TicketSource(config, _prompts(config, load_tokenizer(model_path))),
            self._record,
        )

    def start(self) -> None:
        """Start the workers; returns at once."""
        self.controller.launch()

    def connect(self) -> None:
        """Wait until the engines are up, and give them the transport."""
        from weights.shm import ShmTransport
        from weights.transport import ParameterSpec

        specs = [ParameterSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._weights]
        self.controller.connect(ShmTransport(specs))

    def _record(self, event: str, **fields) -> None:
        if event == "update":
            self.update_s.append(time.monotonic() - self._published_at[fields["version"]])

    def step(self) -> list[Group]:
        """Publish the weights and take a batch."""
        staged = self.controller.stage(self.version, self._weights)
        self._published_at[self.version] = time.monotonic()
        self.controller.publish(Announcement(self.version, self.version, staged, (), False))
        self.version += 1
        return self.controller.take_batch()

    def wait_until_idle(self) -> None:
        """Wait until no worker does anything; with over-sampling, until what is left is suspended."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while self._is_busy():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"an arm is not idle {IDLE_TIMEOUT_S:g} s after its last batch: {self.controller.describe()}"
                )
            time.sleep(0.01)
        time.sleep(SETTLE_S)

    def _is_busy(self) -> bool:
        suspended = self.config.over_sampling > 1
        return any(worker.loading or (worker.running and not suspended) for worker in self.controller.workers)

    def measure(self, steps: int, counts_sampled: bool = False) -> dict:
        """Time `steps` rollout steps and say what was done in them."""
        for _ in range(math.ceil(self.config.async_ratio)):
            self.step()  # it waits already
        start, first_version, earlier = time.monotonic(), self.version, self.controller.take_report()
        self.update_s.clear()
        batches = [self.step()]
        first = self.controller.take_report()
        batches += [self.step() for _ in range(steps - 1)]
        seconds = time.monotonic() - start
        if counts_sampled:
            self.step()  # workers say at an update what they have sampled since the one before
        self.wait_until_idle()
        rest = self.controller.take_report()
        return {
            "seconds": seconds,
            "seconds_per_step": seconds / steps,
            **trained(batches, first_version, seconds),
            "pause_s": statistics.fmean(first.pauses_s + rest.pauses_s),
            "update_s": statistics.fmean(self.update_s),
            "discarded_per_step": (first.sampled.discarded + rest.sampled.discarded) / steps,
            "recomputed_per_step": self._recomputed(batches) / steps,
            "ledger": _increase(earlier.ledger, rest.ledger),
            **(_sampled(rest.sampled, seconds) if counts_sampled else {}),
        }

    def _recomputed(self, batches: list[list[Group]]) -> int:
        if self.config.on_update not in ("recompute", "resume"):
            return 0
        return sum(recomputed_tokens(t) for groups in batches for group in groups for t in group.trajectories)


def trained(batches: list[list[Group]], first_version: int, seconds: float) -> dict:
    """What the batches hold, the first of them taken at `first_version`; inherited tokens are of older versions."""
    tokens = inherited = 0
    for version, groups in enumerate(batches, start=first_version):
        for trajectory in (t for group in groups for t in group.trajectories):
            tokens += trajectory.num_generated
            inherited += int((trajectory.policy_versions[trajectory.loss_mask] < version).sum())
    return {
        "groups": sum(map(len, batches)),
        "tokens": tokens,
        "trained_tokens_per_s": tokens / seconds,
        "inherited_share": inherited / tokens,
    }


def recomputed_tokens(trajectory: Trajectory) -> int:
    """Tokens before each change of version, prompt included: what an engine computes anew if it keeps no KV."""
    versions = trajectory.policy_versions
    return sum(i for i in range(1, len(versions)) if -1 < versions[i - 1] < versions[i])


def _sampled(sampled: SampledTokens, seconds: float) -> dict:
    """What APRIL (arXiv 2509.18521) measures: all new tokens by time, and how many of them continue a response."""
    return {
        "new_tokens": sampled.new,
        "new_tokens_per_s": sampled.new / seconds,
        "resumed_share": sampled.resumed / sampled.new,
    }


def _increase(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    changes = {name: after[name] - before[name] for name in after if not name.endswith("resident")}
    return {name: change for name, change in changes.items() if change}


def _prompts(config: Config, tokenizer) -> PromptSource:
    """The task's own prompts; answers of single turns say what the simulated reward is to do."""
    task = load_task(config.task, config.seed)

    def train_problem(index: int) -> Problem:
        varies = random.Random(index).random() < VARYING_SHARE
        return replace(task.train_problem(index), answer="varies" if varies else "same")

    return PromptSource(train_problem, [], lambda problem: task.encode_prompt(problem, tokenizer))


def _weights(model_path: str) -> list[tuple]:
    """(Hugging Face name, float32 tensor) of every parameter."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


# The whole bench


@contextmanager
def started(comparison: Comparison) -> Iterator[dict[str, Session]]:
    """All arms of a comparison, warmed up and idle; none is left afterwards, and their logs only after a failure."""
    logs = Path(tempfile.mkdtemp(prefix="bench-rollout-"))
    num_workers = comparison.num_workers
    print(f"{comparison.name}: starting {num_workers * len(comparison.arms)} engines, logs in {logs}", flush=True)
    sessions = {
        arm: Session(comparison.config(arm), LatencyLaw.parse(comparison.latency), num_workers, logs / arm)
        for arm in comparison.arms
    }
    try:
        for session in sessions.values():
            session.start()
        for session in sessions.values():
            session.connect()
        for session in sessions.values():
            session.measure(comparison.steps, comparison.counts_sampled)
        yield sessions
    finally:
        # All at once: a controller that stops ends every child of this process, and those of the others too.
        with ThreadPoolExecutor(len(sessions)) as threads:
            list(threads.map(lambda session: session.controller.stop(), sessions.values()))
    shutil.rmtree(logs)


def run(comparison: Comparison, repeats: int, made_by: dict, path: Path) -> None:
    """Measure all arms in turn, `repeats` times, and append a line for each to the file of records."""
    with started(comparison) as sessions:
        report.forget(comparison.name, path)
        for repeat in range(repeats):
            for arm, session in sessions.items():
                measured = session.measure(comparison.steps, comparison.counts_sampled)
                what = {"comparison": comparison.name, "arm": arm, "options": comparison.arms[arm], "repeat": repeat}
                report.append({**what, "steps": comparison.steps, **measured, **made_by}, path)
                print(f"{comparison.name}: {arm} {repeat + 1}/{repeats}  {measured['seconds']:.2f} s", flush=True)


def check_memory(comparisons: list[Comparison]) -> None:
    """Raise ValueError if the engines of the largest comparison do not fit: a machine that pages measures nothing."""
    needed = max((c.num_workers * len(c.arms) * ENGINE_BYTES for c in comparisons), default=0)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ValueError(
            f"{needed / ENGINE_BYTES:.0f} engines of {ENGINE_BYTES / 1e9:.1f} GB each need {needed / 1e9:.0f} GB of "
            f"memory, {available / 1e9:.0f} GB are available; free some, or leave comparisons out with --only"
        )


def chosen(only: list[str] | None, size: str) -> list[Comparison]:
    """The comparisons of the mechanisms, or with the names, in `only`; all if it is None. Raises ValueError."""
    names = {*MECHANISMS, *(comparison.name for comparison in COMPARISONS)}
    if unknown := set(only or ()) - names:
        raise ValueError(f"--only {sorted(unknown)[0]!r} is none of {', '.join(map(repr, sorted(names)))}")
    picked = [c for c in COMPARISONS if only is None or not {c.mechanism, c.name}.isdisjoint(only)]
    return [tiny(comparison) for comparison in picked] if size == "tiny" else picked


def main() -> None:
    """Read the command line, measure, and write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help=f"mechanisms ({', '.join(MECHANISMS)}) or names of comparisons")
    parser.add_argument("--repeats", type=int, default=5, help="measurements per arm (n)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "rollout", help="folder of the records")
    parser.add_argument("--size", choices=("full", "tiny"), default="full", help="tiny: only to see that it runs")
    parser.add_argument("--report", action="store_true", help="measure nothing, draw table and figure again")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {arguments.repeats}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        comparisons = [] if arguments.report else chosen(arguments.only, arguments.size)
        check_memory(comparisons)
        made_by = report.provenance(arguments.size)
        for comparison in comparisons:
            run(comparison, arguments.repeats, made_by, arguments.out / "rollout.jsonl")
        report.write(arguments.out)
    except ValueError as error:
        parser.error(str(error))
    print(f"records: {arguments.out}")


if __name__ == "__main__":
    main()
