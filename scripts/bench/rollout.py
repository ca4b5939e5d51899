"""Every rollout mechanism against its baseline, on the real engine: `python scripts/bench/rollout.py`.

A real Controller, two worker processes with a vLLM engine each, weights through shared memory; no trainer: the tiny
model's weights are published again and again, under a rising version. What is compared is in rollout.toml; each arm
has engines of its own. One measurement is a few rollout steps: publish, take a batch, publish, …, take a batch, timed
from the first publish to the last batch. Where async_ratio is above 0, batches that wait already are taken before.

All arms do the same work. Lengths are forced and drawn from a long-tailed law by the ticket's seed; with one request
for a whole group, its members get the lengths of the tickets that they would have been. Rewards of single turns are
simulated too: a fixed time each, one at a time in each worker (work.py).
"""

import argparse
import math
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from asyncrl.config import Config
from asyncrl.records import Group, Trajectory
from asyncrl.runlog.metrics import together
from scripts.bench import harness
from scripts.bench.harness import Arm, Bench, Case, Column
from scripts.bench.rig import Rig, running
from scripts.bench.work import run_simulated_worker

COMMON = {
    "groups_per_step": 8, "group_size": 8, "async_ratio": 0.0, "max_response_tokens": 192,
    # 64 slots on two workers: as many as a batch of 8 groups of 8 has responses.
    "num_rollout_workers": 2, "max_running_requests": 32,
}  # fmt: skip
"""Options of every arm, unless its comparison or itself has others."""
TINY = {"groups_per_step": 2, "group_size": 2, "num_rollout_workers": 1, "max_running_requests": 8}
ENGINE_BYTES = 1.6e9
"""Memory of a rollout worker and its engine."""

_SECONDS = Column("seconds_per_step", "s per step", better=-1, against="times faster")
COLUMNS = {
    "over-sampling": (
        Column("new_tokens_per_s", "new tokens/s", ".0f", better=1, against="times more"),
        Column("trained_tokens_per_s", "trained tokens/s", ".0f", better=1, against="times more"),
        Column("resumed_share", "resumed share of new tokens"),
        Column("inherited_share", "inherited share of trained tokens"),
    ),
    "updates": (
        _SECONDS,
        Column("pause_s", "pause of generation, ms", ".1f", 1000),
        Column("update_s", "publish to first sampling, ms", ".0f", 1000),
        Column("discarded_per_step", "tokens thrown away per step", ".0f"),
        Column("recomputed_per_step", "tokens with new KV per step", ".0f"),
    ),
}
"""What is shown of a comparison; of the others, the seconds."""


@dataclass(frozen=True)
class Comparison:
    """A table of rollout.toml, where it says what is what: arms that differ in a few options."""

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
    def columns(self) -> tuple[Column, ...]:
        """What is shown of it."""
        return COLUMNS.get(self.name, (_SECONDS,))

    def config(self, arm: str) -> Config:
        """The options of one arm."""
        return Config(**{**COMMON, **self.common, **self.arms[arm]}).checked()

    def tiny(self) -> "Comparison":
        """The same comparison so small that it only shows whether it runs."""
        return replace(self, steps=1, common={**self.common, **TINY})

    def case(self) -> Case:
        """The comparison as the harness runs it."""
        arms = [Arm(arm, partial(start, self, arm), options) for arm, options in self.arms.items()]
        return Case(
            self.name, arms, memory=len(arms) * COMMON["num_rollout_workers"] * ENGINE_BYTES
        )


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COMPARISONS = tuple(Comparison(name, **fields) for name, fields in _TABLES.items())


# Measuring


@contextmanager
def start(comparison: Comparison, arm: str, logs: Path) -> Iterator[Callable[[], dict]]:
    """An arm of a comparison, with its engines up."""
    of = {"comparison": comparison.name, "steps": comparison.steps}
    with running(
        Rig(comparison.config(arm), run_simulated_worker(comparison.latency), logs / arm)
    ) as rig:
        yield lambda: of | measure(rig, comparison.steps, comparison.counts_sampled)


def measure(rig: Rig, steps: int, counts_sampled: bool = False) -> dict:
    """Time `steps` rollout steps and say what was done in them."""
    for _ in range(math.ceil(rig.config.async_ratio)):
        rig.step()  # it waits already
    start, first_version, before = (
        time.monotonic(),
        rig.version,
        rig.controller.buffer.balance(),
    )
    rig.controller.take_metrics()
    batches = [rig.step()]
    first = rig.controller.take_metrics()
    batches += [rig.step() for _ in range(steps - 1)]
    seconds = time.monotonic() - start
    if counts_sampled:
        rig.step()  # workers say at an update what they have sampled since the one before
    rig.wait_until_idle()
    rest = rig.controller.take_metrics()
    measured = together([first, rest])
    rebuilds = rig.config.on_update in ("recompute", "resume")
    rebuilt = [t for groups in batches for group in groups for t in group.trajectories if rebuilds]
    found = {
        "seconds": seconds,
        "seconds_per_step": seconds / steps,
        **trained(batches, first_version, seconds),
        "pause_s": measured["rollout/pause_s"].value,
        "update_s": statistics.fmean(rig.update_seconds(first_version)),
        "discarded_per_step": measured["rollout/discarded_tokens"].value / steps,
        "recomputed_per_step": sum(map(recomputed_tokens, rebuilt)) / steps,
        "ledger": {
            k: n - before.get(k, 0)
            for k, n in rig.controller.buffer.balance().items()
            if n > before.get(k, 0) and not k.endswith("resident")
        },
    }
    # what APRIL (arXiv 2509.18521) measures: new tokens, and how many of them continue a response
    if counts_sampled:
        share = rest["rollout/resumed_share"]
        found |= {
            "new_tokens": share.count,
            "new_tokens_per_s": share.count / seconds,
            "resumed_share": share.value,
        }
    return found


def trained(batches: list[list[Group]], first_version: int, seconds: float) -> dict:
    """What the batches hold, the first of them taken at `first_version`; inherited tokens are of older versions."""
    tokens = inherited = 0
    for version, groups in enumerate(batches, start=first_version):
        for trajectory in (t for group in groups for t in group.trajectories):
            tokens += trajectory.num_generated
            inherited += int((trajectory.policy_versions[trajectory.loss_mask] < version).sum())
    shares = {"trained_tokens_per_s": tokens / seconds, "inherited_share": inherited / tokens}
    return {"groups": sum(map(len, batches)), "tokens": tokens, **shares}


def recomputed_tokens(trajectory: Trajectory) -> int:
    """Tokens before each change of version, prompt included: what an engine computes anew if it keeps no KV."""
    versions = trajectory.policy_versions
    return sum(i for i in range(1, len(versions)) if -1 < versions[i - 1] < versions[i])


# Tables


def table(records: list[dict], comparison: Comparison) -> list[str]:
    """Markdown lines of a comparison: a row per arm."""
    arms = harness.rounds(records, "arm", comparison=comparison.name)
    return harness.table(comparison.name, arms, comparison.columns)


def report(records: list[dict]) -> Iterator[str]:
    """Paragraphs of the page."""
    yield (
        "Options of every arm are in `scripts/bench/rollout.toml`. How many times better an arm is than the first is a "
        "ratio of medians, in brackets the least and the most of a round."
    )
    measured = harness.rounds(records, "comparison")
    for comparison in (c for c in COMPARISONS if c.name in measured):
        yield "\n".join(table(records, comparison))
        yield f"Papers: {comparison.paper}. Ours: {comparison.why}."


def cases(given: argparse.Namespace) -> list[Case]:
    """All comparisons, in the size that is asked for."""
    return [
        (comparison.tiny() if given.size == "tiny" else comparison).case()
        for comparison in COMPARISONS
    ]


BENCH = Bench(
    "rollout",
    "Rollout mechanisms against their baselines",
    cases,
    report,
    key=("comparison", "arm"),
)

if __name__ == "__main__":
    harness.main(BENCH)
