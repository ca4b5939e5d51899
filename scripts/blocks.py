"""Blocks of README.md and docs/ that are made and not written: `.venv/bin/cog -r README.md docs/*.md` puts them in.

Each function returns the Markdown of one block, from the records in results/ or from the code. So a page cannot say
another number than the records: tests/test_docs.py makes all blocks again and compares.
"""

import inspect
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from algos import LOSSES
from asyncrl.config import OPTIONS, Config, allowed_values
from asyncrl.job.command_line import option_texts
from asyncrl.trainer.loss import keywords_of
from extras.simulation import report as simulation_report
from extras.simulation.workload import LONGEST_TO_MEDIAN
from scripts import grids
from scripts import staleness as staleness_page
from scripts import table as run_table
from scripts.bench import parts as parts_bench
from scripts.bench import peers as peers_bench
from scripts.bench import rollout as rollout_bench
from scripts.bench import trees as trees_bench
from scripts.bench.harness import rounds, spread
from scripts.lines import markdown, read
from scripts.runs import Run, load

RESULTS = Path(__file__).resolve().parent.parent / "results"


def records_of(name: str) -> list[dict]:
    """The records of results/NAME/NAME.jsonl."""
    return read(RESULTS / name / f"{name}.jsonl")


def lines(of: Iterable[str]) -> str:
    """Lines as a block."""
    return "".join(f"{line}\n" for line in of)


# From the code


def options() -> str:
    """All options in their groups, and the keyword arguments of the losses."""
    blocks, rows = [], []
    for title, name, text in option_texts(Config):
        if title:
            rows = []
            blocks.append((title, rows))
            continue
        option = OPTIONS[name]
        meaning = " ".join(text.split()).replace("|", "\\|")
        allowed = allowed_values(option.kind)
        rows.append([f"`{option.flag}`", f"`{option.shown_default}`", allowed, meaning])
    words = {algo: keywords_of(loss) for algo, loss in LOSSES.items()}
    own = (
        [f"`{a}`", ", ".join(f"`{w.name}={w.default}`" for w in of) or "none"]
        for a, of in words.items()
    )
    heading, keywords = (
        ["option", "default", "allowed", "meaning"],
        ["`--algo`", "keyword arguments and their defaults"],
    )
    text = "".join(f"**{title}**\n\n{lines(markdown(heading, rows))}\n" for title, rows in blocks)
    return f"{text}**`--algo-args`**\n\n{lines(markdown(keywords, own))}"


# Losses


def losses() -> str:
    """What each loss does, and where its formula is from."""
    rows = []
    for algo, loss in LOSSES.items():
        text = inspect.getmodule(loss).__doc__
        paper = re.search(r"arXiv (\d{4}\.\d{5})", text)
        linked = f"[{paper[1]}](https://arxiv.org/abs/{paper[1]})" if paper else "Williams 1992"
        rows.append([f"`{algo}`", linked, text.partition("\n")[0].partition(": ")[2].rstrip(".")])
    return lines(markdown(["`--algo`", "formula as in", "what it does"], rows))


def study() -> str:
    """The table of docs/staleness.md."""
    return lines(staleness_page.summary())


def replay() -> str:
    """Losses on the same recorded batches."""
    return lines(grids.replay_table(grids.read_records(RESULTS / "replay" / "replays.jsonl")))


def environments() -> str:
    """Held-out success of the environments' tiny models."""
    rows = []
    for name in ("frozen_lake", "guess_number"):
        (record,) = grids.read_records(RESULTS / "environments" / name / "cells.jsonl")
        first, *_, last = (accuracy for _, accuracy in record["evaluations"])
        rows.append([f"`{name}`", f"{first:.2f}", f"{last:.2f}"])
    return lines(markdown(["task", "before", "after"], rows))


def smollm2() -> str:
    """When the small language model could do sums, by level and seed."""
    rows = []
    for run in map(load, sorted((RESULTS / "smollm2").glob("*-s*"))):
        level, wanted = run.info["config"]["task"], 0.9 if "one_digit" in run.name else 0.7
        reward, evaluated = run.metrics["reward/mean"], run.events["evaluation"]
        able = evaluated[evaluated["accuracy"] >= wanted].iloc[0]
        after_s = able["time"] - run.events["worker_ready"]["time"].iloc[0]
        last = (
            f"{reward[:5].mean():.2f}",
            f"{reward[-5:].mean():.2f}",
            f"{evaluated['accuracy'].iloc[-1]:.2f}",
        )
        rows.append(
            [
                f"`{level}`",
                run.info["config"]["seed"],
                wanted,
                f"{after_s:.0f} s",
                able["version"],
                *last,
            ]
        )
    heading = [
        "task",
        "seed",
        "held out",
        "first after",
        "steps",
        "reward, first five",
        "last five",
        "held out, last",
    ]
    return lines(markdown(heading, rows))


def machines(part: str) -> str:
    """What was measured of machines that join: a part of results/swarm, medians alone."""
    page = (RESULTS / "swarm" / "table.md").read_text(encoding="utf-8")
    (table,) = (block for block in page.split("\n\n") if block.startswith(f"| {part} |"))
    return lines(re.sub(r" \[[^]]*\]", "", table).splitlines())


def old_keys() -> str:
    """How far old keys and values move a token's log-prob, nats."""
    rows = [
        [
            f"`{r['on_update']}`",
            r["updates"],
            r["tokens"],
            f"{r['gap_abs_mean']:.1e}",
            f"{r['step_abs_mean']:.1e}",
        ]
        for r in records_of("stale_kv")
    ]
    heading = [
        "`--on-update`",
        "updates before the token",
        "tokens",
        "moves it by, nats, mean",
        "a step moves it by",
    ]
    return lines(markdown(heading, rows))


# Runs


def staleness_runs() -> list[Run]:
    """The default job at three async ratios, with each seed."""
    return [load(run.parent) for run in sorted((RESULTS / "staleness").glob("*/run.json"))]


def staleness() -> str:
    """The default job at three async ratios."""
    return lines(run_table.table(staleness_runs(), ["async_ratio"]))


# Benches


def mechanisms() -> str:
    """How many times better than its baseline each mechanism of rollout is, by medians: steps, or trained tokens."""
    records, rows = records_of("rollout"), []
    for comparison in rollout_bench.COMPARISONS:
        arms = rounds(records, "arm", comparison=comparison.name)
        # With over-sampling steps are not alike.
        column = comparison.columns[comparison.name == "over-sampling"]
        for arm, (option, baseline, paper, against) in comparison.mechanisms.items():
            gain = column.gain(column.values(arms[arm]), column.values(arms[against]))
            rows.append([option, baseline, paper, f"{gain:.2f}×"])
    return lines(markdown(["option", "baseline", "paper", "gain"], rows))


def mechanisms_in_full() -> str:
    """Every comparison of mechanisms: a table of its arms, medians with minimum and maximum."""
    records = records_of("rollout")
    tables = (
        "\n".join(rollout_bench.table(records, comparison))
        for comparison in rollout_bench.COMPARISONS
    )
    return "\n\n".join(tables) + "\n"


def peers() -> str:
    """Our best arm and TRL's on each work."""
    return lines(peers_bench.summary(records_of("peers")))


WHY_NOT = {
    "overlap α=2": "trainer and worker share the core that is not the engine's",
    "trainer natural": "FSDP's hooks, packing and statistics by lag, beside so small a model",
}
"""Why a row of `speed` may not reach its aim."""


def speed() -> str:
    """What the system's speed is to reach: against TRL, against the machine, and against its own parts."""
    rows, peers = [], peers_bench.ours(records_of("peers"))
    for work, found in peers.items():
        key, aim = peers_bench.AIMS[work]
        against = {"over_peer": "TRL's fastest", "over_limit": "the machine's limit"}[key]
        share = statistics.median(r["over_limit"] for r in found if r["over_limit"])
        most = statistics.median(r["over_peer"] / r["over_limit"] for r in found if r["over_limit"])
        why = f"cores are busy {share:.1%} of the time; always busy it would be {most:.2f}× TRL's fastest"
        own = found[0]["arm"].removeprefix("ours ")
        rows.append(
            (
                f"samples/s, `{work}`: {own}",
                against,
                peers_bench.RATIOS[key].values(found),
                aim,
                1,
                why,
            )
        )
    for name, what, against in (
        ("overlap α=2", "seconds a step, α = 2", "its slower half alone"),
        ("trainer natural", "tokens/s, trainer", "a plain step"),
    ):
        part = parts_bench.PARTS[name]
        ratios = [r["ratio"] for r in records_of("parts") if r["part"] == name]
        rows.append((what, against, ratios, part["target"], part.get("better", 1), WHY_NOT[name]))
    lines_of = []
    for what, against, ratios, aim, better, why in rows:
        is_met = better * statistics.median(ratios) >= better * aim
        shown = (
            f"{statistics.median(ratios):.3g}×",
            len(ratios),
            f"{'≥' if better > 0 else '≤'} {aim:g}×",
        )
        lines_of.append([what, against, *shown, "reached" if is_met else why])
    return lines(markdown(["what", "against", "ours", "n", "aim", "if not, why"], lines_of))


def parts() -> str:
    """Each part against its limit, and the CPU time of a step."""
    records = records_of("parts")
    return lines([*parts_bench.summary(records), "", *parts_bench.cpu_table(records)])


def trees() -> str:
    """What sharing prefixes saves in the trainer."""
    return lines(trees_bench.table(records_of("trees")))


def simulation() -> str:
    """The papers' numbers beside the simulated ones, hits and misses."""
    return lines(simulation_report.short(records_of("simulation")))


def reliability() -> str:
    """What came of campaigns, and of a job that is killed beside the unbroken one; what checkpoints cost."""
    found = records_of("reliability")
    rows, shares = [], [pair["share"] for r in found for pair in r.get("cost", {}).get("pairs", ())]
    for r in found:
        said = ", ".join(
            f"{n} {o}"
            for o, n in sorted(Counter(one["outcome"] for one in r.get("rounds", ())).items())
        )
        what = re.split(" --(?:keep|out) ", r["command"].partition("chaos ")[2])[0]
        for name, of in ((f"`{what}`: {said}", "accounts"), ("the same, unbroken", "unbroken")):
            if runs := r.get(of):
                sums = (sum(a[key] for a in runs) for key in ("starts", "consumed", "dropped"))
                rows.append([name, len(runs), *sums, f"{min(a['accuracy'] for a in runs):.3f}"])
    heading = [
        "broken",
        "runs",
        "starts",
        "prompts trained on",
        "dropped",
        "held-out accuracy, at least",
    ]
    cost = (
        f"Of the trainer's time checkpoints take {spread(shares, '.1%')}, n = {len(shares)}."
        if shares
        else ""
    )
    return lines([*markdown(heading, rows), *["", cost] * bool(cost)])


def findings() -> str:
    """What came out, hits and misses, a point for each study."""
    steps = [
        (run.info["config"]["async_ratio"], run.metrics["time/step_s"].mean())
        for run in staleness_runs()
    ]
    seconds = {a: statistics.mean(s for ratio, s in steps if ratio == a) for a in (0, 1, 2)}
    ratios = ", ".join(f"{seconds[a] / seconds[0]:.2f} at α = {a}" for a in (1, 2))
    text = f"Time of a step against α = 0, on two cores, means of three seeds: {ratios}."
    points = [f"{text} [More](docs/results.md#three-async-ratios)"]
    claims = simulation_report.claims(records_of("simulation"))
    found = claims[
        (claims["tail"] == LONGEST_TO_MEDIAN) & ~claims["scenario"].str.startswith("own bench")
    ]
    hit, missed = (found["verdict"] == "hit").sum(), (found["verdict"] == "MISS").sum()
    scaling = found[found["short"].str.contains("128 GPUs over 16")].iloc[0]
    points += [
        f"The papers' comparisons, simulated with the real controller: {hit} of {hit + missed} numbers are hit. A miss:"
        f" 128 GPUs make {scaling['mean']:.2f} times the throughput of 16, reported are {scaling['paper'][0]:g}. "
        "[More](docs/results.md#the-papers-comparisons-at-their-scale)"
    ]
    return lines(
        line
        for point in points
        for line in textwrap.wrap(f"- {point}", 160, subsequent_indent="  ")
    )


# The planner


def planner() -> str:
    """How near the planner comes to what AReaL-Hex, the simulated cluster and machines here have measured."""
    found, rows = records_of("planner"), []
    for what in ("table 3, searched over uniform", "fig. 3, 8 H800 + 48 H20 over 24 H800"):
        of = [r for r in found if r["arm"] == what]
        numbers = (
            ", ".join(f"{r[name]:.2f}" for r in of) for name in ("rates of table 1", "paper")
        )
        rows.append([f"AReaL-Hex, {what}; 1.5B, 7B, 14B", *numbers])
    (time,) = rounds(found, "arm", case="time", arm="56 GPUs").values()
    seconds = statistics.median(r["planning_s"] for r in time)
    rows.append(["planning, 56 GPUs, s (table 5)", f"{seconds:.2f}", f"{time[0]['paper_s']:g}"])
    cases = [("simulated", "simulated_s", "step, 30 random clusters under the real controller")]
    cases += [("running", "step_s", "step, two machines of unequal speed that joined a run")]
    for case, measured, what in cases:
        of = [r["predicted_s"] / r[measured] for r in found if r["case"] == case]
        spread = f"{statistics.median(of):.2f} × ({min(of):.2f}–{max(of):.2f}, n = {len(of)})"
        rows.append([f"{what}, predicted / measured", spread, "1 ×"])
    shares = [(r["predicted_share"], r["share"]) for r in found if r["case"] == "running"]
    means = (f"{statistics.fmean(of):.3f}" for of in zip(*shares, strict=True))
    rows.append(["share of the slow machine, mean", *means])
    return lines(markdown(["what", "planner", "measured"], rows))
