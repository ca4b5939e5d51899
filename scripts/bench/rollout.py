"""Every rollout mechanism against its baseline, on the real engine: `python scripts/bench/rollout.py`.

A real Controller, two worker processes with a vLLM engine each, weights through shared memory; no trainer: the tiny
model's weights are published again and again, under a rising version. What is compared is in rollout.toml; each arm
has engines of its own. One measurement is a few rollout steps: publish, take a batch, publish, …, take a batch, timed
from the first publish to the last batch. Where async_ratio is above 0, batches that wait already are taken before.

All arms do the same work. Lengths are forced and drawn from a long-tailed law by the ticket's seed; with one request
for a whole group, its members get the lengths of the tickets that they would have been. Rewards of single turns are
simulated too: a fixed time each, one at a time in each worker (workloads.py).
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from asyncrl.config import Config
from asyncrl.records import Group, Trajectory
from asyncrl.runlog.metrics import merge
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arguments, Bench, Case, Column, Measure
from scripts.bench.rig import Rig, running, wait_until_idle
from scripts.bench.workloads import run_simulated_worker

TABLES = harness.tables_beside(__file__)
ENGINE_BYTES = 1.6e9
"""Memory of a rollout worker and its engine."""


@dataclass(frozen=True)
class Comparison:
    """Arms that differ in a few options; rollout.toml says what is what."""

    name: str
    steps: int
    common: dict
    arms: dict[str, dict]
    paper: str
    why: str
    latency: str = "constant:0"
    counts_sampled: bool = False
    mechanisms: dict[str, list[str]] = field(default_factory=dict)

    @property
    def columns(self) -> list[Column]:
        """What is shown of it."""
        columns = TABLES["columns"]
        return [Column(**column) for column in columns.get(self.name, columns["others"])]

    def config(self, arm: str, size: str = "full") -> Config:
        """Return the options of one arm; a tiny one only shows whether it runs."""
        options = TABLES["common"] | self.common | self.arms[arm]
        return Config(**(options | TABLES["tiny"] if size == "tiny" else options)).checked()


COMPARISONS = tuple(Comparison(name, **fields) for name, fields in TABLES["comparisons"].items())


# Measuring


@contextmanager
def start(comparison: Comparison, arm: str, size: str, logs: Path) -> Iterator[Measure]:
    """An arm of a comparison, with its engines up."""
    steps = 1 if size == "tiny" else comparison.steps
    what = {"comparison": comparison.name, "steps": steps, "options": comparison.arms[arm]}
    worker = run_simulated_worker(comparison.latency)
    with running(comparison.config(arm, size), worker, logs / arm) as node:
        rig = Rig(node)
        yield lambda: what | measure(rig, steps, comparison.counts_sampled)


def measure(rig: Rig, steps: int, counts_sampled: bool = False) -> dict:
    """Time `steps` rollout steps, and return what was done in them."""
    controller = rig.controller
    for _ in range(math.ceil(rig.config.async_ratio)):
        rig.step()  # it waits already
    first_version, ledger_before = rig.version, controller.buffer.balance()
    controller.take_metrics()
    start = time.monotonic()
    batches = [rig.step()]
    first = controller.take_metrics()
    batches += [rig.step() for _ in range(steps - 1)]
    seconds = time.monotonic() - start
    if counts_sampled:
        rig.step()  # workers say at an update what they have sampled since the one before
    wait_until_idle(rig.node)
    rest = controller.take_metrics()
    measured = merge([first, rest])
    ledger = controller.buffer.balance() - ledger_before
    rebuilds = rig.config.on_update in ("recompute", "resume")
    recomputed = sum(map(recomputed_tokens, trajectories_of(batches))) if rebuilds else 0
    numbers = {
        "seconds": seconds,
        "seconds_per_step": seconds / steps,
        **trained(batches, first_version, seconds),
        "pause_s": measured["rollout/pause_s"].value,
        "update_s": statistics.fmean(rig.update_seconds(first_version)),
        "discarded_per_step": measured["rollout/discarded_tokens"].value / steps,
        "recomputed_per_step": recomputed / steps,
        "ledger": {name: n for name, n in ledger.items() if not name.endswith("resident")},
    }
    # what APRIL (arXiv 2509.18521) measures: new tokens, and how many of them continue a response
    if counts_sampled:
        share = rest["rollout/resumed_share"]
        numbers["new_tokens"] = share.count
        numbers["new_tokens_per_s"] = share.count / seconds
        numbers["resumed_share"] = share.value
    return numbers


def trained(batches: list[list[Group]], first_version: int, seconds: float) -> dict:
    """Return what the batches hold, the first taken at `first_version`; inherited tokens are of older versions."""
    tokens = inherited = 0
    for version, groups in enumerate(batches, start=first_version):
        for trajectory in trajectories_of([groups]):
            tokens += trajectory.num_generated
            inherited += int((trajectory.policy_versions[trajectory.loss_mask] < version).sum())
    return {
        "groups": sum(map(len, batches)),
        "tokens": tokens,
        "trained_tokens_per_s": tokens / seconds,
        "inherited_share": inherited / tokens,
    }


def trajectories_of(batches: list[list[Group]]) -> list[Trajectory]:
    """Return all trajectories of some batches."""
    return [t for groups in batches for group in groups for t in group.trajectories]


def recomputed_tokens(trajectory: Trajectory) -> int:
    """Return the tokens before each change of version, with the prompt: what an engine without KV computes anew."""
    versions = trajectory.policy_versions
    return sum(i for i in range(1, len(versions)) if -1 < versions[i - 1] < versions[i])


# Tables


def table(records: list[dict], comparison: Comparison) -> list[str]:
    """Return the lines of a comparison: a row per arm."""
    arms = harness.rounds(records, "arm", comparison=comparison.name)
    return harness.table(comparison.name, arms, comparison.columns)


def report(records: list[dict]) -> Iterator[str]:
    """Yield the paragraphs of the page."""
    yield (
        "Options of every arm are in `scripts/bench/rollout.toml`. How many times more an arm has than the first "
        "is the median of the ratios of its rounds [least–most]. Tokens count, as some options choose by length."
    )
    measured = harness.rounds(records, "comparison")
    for comparison in COMPARISONS:
        if comparison.name in measured:
            yield "\n".join(table(records, comparison))
            yield f"Papers: {comparison.paper}. Ours: {comparison.why}."


def cases(given: Arguments) -> Iterator[Case]:
    """Yield all comparisons, in the size that is asked for."""
    for comparison in COMPARISONS:
        arms = {arm: partial(start, comparison, arm, given.size) for arm in comparison.arms}
        engines = len(arms) * TABLES["common"]["num_rollout_workers"]
        yield Case(comparison.name, arms, memory=engines * ENGINE_BYTES)


BENCH = Bench(
    "rollout",
    "Rollout mechanisms against their baselines",
    cases,
    report,
    ("comparison", "arm"),
    Arguments(out=ROOT / "results/rollout"),
)

if __name__ == "__main__":
    harness.main(BENCH)
