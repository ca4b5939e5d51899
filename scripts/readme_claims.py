"""What the README takes from results/: its TABLES and, of its running text, its CLAIMS. check_readme.py compares them.

A new table or number of the README has its line here: a table by the function of the script that makes it from the
committed records, a number by a pattern and an expression over the records.
"""

import functools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts import ablation_report, bench_bandit, compare_replays
from scripts import bench_parts_report as parts_report
from scripts import bench_peers_report as peers_report
from scripts import bench_rollout_report as rollout_report
from scripts import plot as run_plot
from scripts import table as run_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"

README = "README.md"
BENCH_ROLLOUT = "python scripts/bench_rollout.py"
COMPARE_STALENESS = "python scripts/table.py results/staleness/a*-s* --by async_ratio"
ABLATE = "--out results/losses"
DEFAULT_GRID = "python scripts/ablate.py    #"
BENCH_PARTS = "python scripts/bench_parts.py"
BENCH_PEERS = "python scripts/bench_peers.py"
"""Commands, or what tells them from others, as they stand beside what they make."""


# What the records say


@functools.cache
def rollout_records() -> list[dict]:
    """The records of results/rollout."""
    return rollout_report.load(RESULTS / "rollout" / "rollout.jsonl")


@functools.cache
def loss_records() -> list[dict]:
    """The cells of results/losses."""
    return ablation_report.read_records(RESULTS / "losses")


@functools.cache
def grid_records() -> list[dict]:
    """The cells of results/ablation."""
    return ablation_report.read_records(RESULTS / "ablation")


@functools.cache
def staleness_runs() -> list[dict]:
    """Summaries of the runs of results/staleness."""
    return [run_table.summarise_run(run.parent) for run in sorted((RESULTS / "staleness").glob("*/run.json"))]


@functools.cache
def bandit_records() -> list[dict]:
    """The records of results/bandit, without their header."""
    return [json.loads(line) for line in (RESULTS / "bandit" / "bandit.jsonl").read_text().splitlines()[1:]]


@functools.cache
def parts_records() -> list[dict]:
    """The records of results/parts."""
    return rollout_report.load(RESULTS / "parts" / "parts.jsonl")


@functools.cache
def peers_records() -> list[dict]:
    """The records of results/peers."""
    return rollout_report.load(RESULTS / "peers" / "peers.jsonl")


def cpu_ms(work: str, prefix: str) -> float:
    """CPU time per sample of the fastest arm whose name begins so, median, ms."""
    arms = peers_report.by_arm(peers_records(), work)
    found = arms[peers_report.best(arms, prefix)]
    return statistics.median(r["cpu_ms_per_sample"] for r in found if r.get("cpu_ms_per_sample"))


def cpu_of_step(part: str) -> list[float]:
    """CPU time per step of trainer, worker and engine, medians, ms."""
    found = [r for r in parts_records() if r["part"] == part]
    return [1e3 * statistics.median(r["cpu_s"][who] for r in found) for who in ("trainer", "worker", "engine")]


def cpu_and_step(part: str) -> tuple[float, float]:
    """CPU time of all processes per step, the sum of their medians, and the time of the step, median; ms."""
    found = [r for r in parts_records() if r["part"] == part]
    cpu = sum(statistics.median(r["cpu_s"][who] for r in found) for who in found[0]["cpu_s"])
    return 1e3 * cpu, 1e3 * statistics.median(r["ours"] for r in found)


def ms_of_phase(phase: str) -> float:
    """Time of a phase of a weight update on an idle engine, median, ms."""
    return 1e3 * statistics.median(r["ours"] for r in parts_records() if r["part"] == f"update: {phase}")


def soonest_after_start(prefix: str) -> tuple[float, float]:
    """Seconds to the end of the first step, and from there to the accuracy that is wanted: medians, of the arm on
    `natural`, whose name begins so, that takes least for the second."""
    arms = peers_report.by_arm(peers_records(), "natural")
    medians = [
        (
            statistics.median(r["to_accuracy_s"] - r["start_s"] for r in found),
            statistics.median(r["start_s"] for r in found),
        )
        for name, found in arms.items()
        if name.startswith(prefix) and all(r.get("to_accuracy_s") for r in found)
    ]
    after, start = min(medians)
    return start, after


def _arm(comparison: str, arm: str, key: str) -> tuple[list[float], rollout_report.Measure]:
    measures = {measure.key: measure for measure in rollout_report.measures_of(comparison)}
    of_arm = rollout_report.by_arm(rollout_records(), comparison)[arm]
    return rollout_report.values(of_arm, measures[key]), measures[key]


def median(comparison: str, arm: str, key: str = "seconds_per_step") -> float:
    """Median of a rollout measurement, in the unit of its table."""
    return statistics.median(_arm(comparison, arm, key)[0])


def gain(comparison: str, arm: str, key: str = "seconds_per_step") -> float:
    """Times that a rollout arm is better than the first one of its comparison."""
    first = next(iter(rollout_report.by_arm(rollout_records(), comparison)))
    return rollout_report.gain(_arm(comparison, first, key)[0], *_arm(comparison, arm, key))


def gain_and_medians(comparison: str, arm: str) -> tuple[float, float, float]:
    """Times that a rollout arm is faster than the first one of its comparison, and the seconds of both."""
    first = next(iter(rollout_report.by_arm(rollout_records(), comparison)))
    return gain(comparison, arm), median(comparison, first), median(comparison, arm)


def accuracy(algo: str, publish_delay: int) -> float:
    """Final held-out accuracy of a loss of results/losses, mean over its seeds."""
    rows = [ablation_report.summarise(record) for record in loss_records()]
    chosen = [row for row in rows if (row["algo"], row["publish_delay"]) == (algo, publish_delay)]
    return statistics.fmean(ablation_report.final_accuracies(chosen))


def staleness_of_grid(async_ratio: float) -> tuple[float, float]:
    """Staleness in results/ablation at that async ratio: mean over steps and runs, and the most of any sample."""
    series = [r["series"] for r in grid_records() if r["cell"]["async_ratio"] == async_ratio]
    mean = statistics.fmean(statistics.fmean(one["staleness_mean"]) for one in series)
    return mean, max(max(one["staleness_max"]) for one in series)


def clipped_percent(algo: str) -> tuple[float, float]:
    """Tokens whose gradient a clip cuts at a delay of 4, percent: mean of the first ten and of the last forty steps."""
    metrics = run_plot.read_metrics(RESULTS / "losses" / "clipped" / f"{algo}-k4-s0")
    clipped = run_plot.column(metrics, "loss/clipped")
    return 100 * statistics.fmean(clipped[:10]), 100 * statistics.fmean(clipped[40:])


def seconds_per_step(async_ratio: float) -> float:
    """Of results/staleness, mean over the seeds."""
    return statistics.fmean(
        s["seconds_per_step"] for s in staleness_runs() if s["config"]["async_ratio"] == async_ratio
    )


def only(values: Iterator) -> float:
    """The value that all share. Raises ValueError if they are several: then the README must not give one."""
    found = set(values)
    if len(found) != 1:
        raise ValueError(f"the records have {sorted(found)}, and the README gives one number")
    return found.pop()


def num_seeds(cells: Iterator) -> float:
    """Runs per setting."""
    found = list(cells)
    return only(found.count(cell) for cell in found)


# What is compared


@dataclass(frozen=True)
class Table:
    """A table of a document."""

    document: str
    make: Callable[[], list[str]]
    """Its Markdown lines, heading first."""
    command: str = ""
    """What makes it, as its section must say."""


@dataclass(frozen=True)
class Claim:
    """Numbers in the README's running text."""

    pattern: str
    """Regular expression with a group for each number; a space matches any white space."""
    expected: Callable[[], tuple[float | str, ...]]
    """What the records say, for each group."""


def losses_by_delay() -> list[str]:
    """The table of losses with the README's headings: its runs are all synchronous."""
    lines = ablation_report.table(loss_records()).splitlines()
    delays = [delay for _, delay in ablation_report.settings([record["cell"] for record in loss_records()])]
    return [f"| `--algo` | {' | '.join(f'K = {delay}' for delay in delays)} |", *lines[1:]]


TABLES = (
    Table(
        README,
        lambda: run_table.table(staleness_runs(), "async_ratio"),
        COMPARE_STALENESS,
    ),
    Table(README, losses_by_delay, ABLATE),
    Table(README, lambda: ablation_report.table(grid_records()).splitlines(), DEFAULT_GRID),
    Table(README, lambda: peers_report.summary(peers_records()), BENCH_PEERS),
    Table(README, lambda: parts_report.summary(parts_records()), BENCH_PARTS),
    Table("results/parts/table.md", lambda: parts_report.table(parts_records())),
    *(
        Table(
            "results/peers/table.md",
            lambda work=work: peers_report.table(peers_report.by_arm(peers_records(), work), work),
        )
        for work in peers_report.TARGETS
    ),
    Table("results/staleness/table.md", lambda: run_table.table(staleness_runs(), "async_ratio")),
    Table("results/ablation/table.md", lambda: ablation_report.table(grid_records()).splitlines()),
    Table("results/losses/table.md", lambda: ablation_report.table(loss_records()).splitlines()),
    Table("results/replay/table.md", lambda: compare_replays.table(compare_replays.read_records(RESULTS / "replay"))),
    Table("results/rollout/table.md", lambda: rollout_report.table(rollout_records())),
    Table("results/bandit/README.md", lambda: bench_bandit.table(bandit_records(), 1)),
    Table("results/bandit/README.md", lambda: bench_bandit.table(bandit_records(), 4)),
)

UPDATES = ("keep", "recompute", "resume", "restart", "wait")
STEADY = ("aipo", "topr", "decoupled_ppo", "icepop", "tis", "kimi")
"""Losses that the README says hold at a delay of 16 steps."""
CLAIMS = {
    BENCH_ROLLOUT: (
        Claim(
            r"medians of n = (\d+) alternating measurements",
            lambda: (num_seeds((r["comparison"], r["arm"]) for r in rollout_records()),),
        ),
        Claim(
            r"\| (\S+)× faster than `batch` \((\S+) → (\S+) s per batch\)",
            lambda: (gain("scheduling", "queue"), median("scheduling", "batch"), median("scheduling", "queue")),
        ),
        Claim(
            r"\| (\S+)× \((\S+) → (\S+) s\), spreads overlap",
            lambda: (
                gain("replication 8x8", "replicated"),
                median("replication 8x8", "one request"),
                median("replication 8x8", "replicated"),
            ),
        ),
        Claim(
            r"(\d+) groups of (\d+): (\S+)× \((\S+) → (\S+) s\)",
            lambda: (16, 16, *gain_and_medians("replication 16x16", "replicated")),
        ),
        Claim(
            r"K = (\d+) with filtering: (\S+)× over `batch` \((\S+) s\)",
            lambda: (16, gain("scheduling", "queue +16 groups"), median("scheduling", "queue +16 groups")),
        ),
        Claim(
            r"K = (\d+) with long-tailed latency: (\S+)×, where (\d+) % of steps fail (\S+)×",
            lambda: (4, gain("redundancy", "+4 groups"), 1, gain("redundancy failing", "+4 groups")),
        ),
        Claim(
            r"r = (\d+) with long-tailed latency: (\S+)× \((\S+) → (\S+) s\), where (\d+) % of steps fail (\S+)× "
            r"\((\S+) → (\S+) s\)",
            lambda: (
                2,
                *gain_and_medians("redundancy", "+2 members"),
                1,
                *gain_and_medians("redundancy failing", "+2 members"),
            ),
        ),
        Claim(
            r"R = (\d+): (\S+)× new tokens/s, (\S+)× trained; (\d+) % of trained tokens inherited",
            lambda: (
                2,
                gain("over-sampling", "R = 2", "new_tokens_per_s"),
                gain("over-sampling", "R = 2", "trained_tokens_per_s"),
                100 * median("over-sampling", "R = 2", "inherited_share"),
            ),
        ),
        Claim(
            r"pause (\d+) \(`keep`\), (\d+), (\d+), (\d+), (\d+) ms \(`wait`, under whose updates (\d+) ms pass from "
            r"publishing to sampling, (\d+) under `keep`\); "
            r"`recompute` and `resume` rebuild (\d+) and (\d+) tokens per step, `restart` throws (\d+) away",
            lambda: (
                *(median("updates", arm, "pause_s") for arm in UPDATES),
                median("updates", "wait", "update_s"),
                median("updates", "keep", "update_s"),
                *(median("updates", arm, "recomputed_per_step") for arm in ("recompute", "resume")),
                median("updates", "restart", "discarded_per_step"),
            ),
        ),
        Claim(
            r"without it (\S+)× at (normal\(10,\d+\)) \((\S+) → (\S+) s\), (\S+)× at (normal\(10,\d+\)), "
            r"(\S+)× at (normal\(10,\d+\))",
            lambda: (
                gain("environments normal(10,10)", "asynchronous"),
                "normal(10,10)",
                median("environments normal(10,10)", "barrier"),
                median("environments normal(10,10)", "asynchronous"),
                gain("environments normal(10,5)", "asynchronous"),
                "normal(10,5)",
                gain("environments normal(10,1)", "asynchronous"),
                "normal(10,1)",
            ),
        ),
    ),
    BENCH_PEERS: (
        Claim(
            r"A sample of `natural` costs our fastest arm (\S+) ms of CPU time and TRL's (\S+); "
            r"of `long` (\S+) and (\S+), of `short` (\S+) and (\S+) ms",
            lambda: tuple(cpu_ms(work, who) for work in ("natural", "long", "short") for who in ("ours", "TRL")),
        ),
        Claim(
            r"vLLM and its processes take (\S+) s to the end of the first step and transformers (\S+); "
            r"from there ours takes (\S+) s to 0\.8 and TRL (\d+)",
            lambda: tuple(
                of[i] for i in (0, 1) for of in (soonest_after_start("ours"), soonest_after_start("TRL generate"))
            ),
        ),
    ),
    BENCH_PARTS: (
        Claim(
            r"Of a step at α = 2, (\d+) ms of CPU time are the trainer's, (\d+) the worker's and (\d+) the engine's",
            lambda: tuple(cpu_of_step("overlap α=2")),
        ),
        Claim(
            r"of (\d+) ms that the phases of an update take on an idle engine (\d+) are",
            lambda: (sum(ms_of_phase(phase) for phase in parts_report.PHASES), ms_of_phase("load")),
        ),
        Claim(
            r"(\d+) ms of CPU time in a step of (\d+) ms at α = 2, (\d+) in (\d+) at α = 1",
            lambda: (*cpu_and_step("overlap α=2"), *cpu_and_step("overlap α=1")),
        ),
    ),
    COMPARE_STALENESS: (
        Claim(
            r"`grpo`, (\d+) steps of (\d+) × (\d+) responses\) at three async ratios, on (\d+) CPU cores \([^)]*\), "
            r"(\d+) seeds each",
            lambda: (
                *(
                    only(s["config"][key] for s in staleness_runs())
                    for key in ("steps", "groups_per_step", "group_size")
                ),
                only(s["hardware"]["cpu_cores"] for s in staleness_runs()),
                num_seeds(s["config"]["async_ratio"] for s in staleness_runs()),
            ),
        ),
        Claim(
            r"α = 1 and 2 take (\S+) and (\S+) times as long a step",
            lambda: tuple(seconds_per_step(ratio) / seconds_per_step(0) for ratio in (1, 2)),
        ),
    ),
    DEFAULT_GRID: (
        Claim(
            r"# (\d+) runs in (\d+) minutes",
            lambda: (len(grid_records()), sum(record["seconds"] for record in grid_records()) / 60),
        ),
        Claim(
            r"Three losses at α = (\d+) and (\d+) on the default job, (\d+) seeds each",
            lambda: (
                *sorted({record["cell"]["async_ratio"] for record in grid_records()}),
                num_seeds((r["cell"]["algo"], r["cell"]["async_ratio"]) for r in grid_records()),
            ),
        ),
        Claim(r"is (\S+) steps old on average and (\d+) at most", lambda: staleness_of_grid(4)),
    ),
    ABLATE: (
        Claim(
            r"(\d+) steps, ([\d ]+) samples, (\d+) CPU cores, (\d+) seeds, held-out",
            lambda: (
                only(len(record["series"]["reward"]) for record in loss_records()),
                only(record["series"]["samples"][-1] for record in loss_records()),
                only(record["hardware"]["cpu_cores"] for record in loss_records()),
                num_seeds((r["cell"]["algo"], r["cell"]["publish_delay"]) for r in loss_records()),
            ),
        ),
        Claim(
            r"of (\d+) % of the tokens in the first ten steps and of (\d+) % in the last forty, where `grpo`'s cuts "
            r"(\d+) % and (\d+) %",
            lambda: (*clipped_percent("gspo"), *clipped_percent("grpo")),
        ),
        Claim(r"# (\d+) runs, two hours", lambda: (len(loss_records()),)),
        Claim(
            rf"\({', '.join(f'`{algo}`' for algo in STEADY)}: (\S+)–(\S+)\)",
            lambda: tuple(choose(accuracy(algo, 16) for algo in STEADY) for choose in (min, max)),
        ),
        Claim(r"learns more slowly \((\S+)\)", lambda: (accuracy("grpo", 16),)),
        Claim(
            r"after having learnt \((\S+) and (\S+)\)",
            lambda: (accuracy("reinforce", 16), accuracy("cispo", 16)),
        ),
    ),
}
