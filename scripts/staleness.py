"""The tables and the figure of results/study, from its records: `python scripts/staleness.py`.

docs/staleness.md shows the figure and one of the tables. A seed counts if it has every run that another seed of the
part has. A part is shown from three such seeds on.
"""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats
from statsmodels.stats.multitest import multipletests

from algos import LOSSES
from scripts import grids
from scripts.lines import markdown

RESULTS = Path(__file__).resolve().parent.parent / "results" / "study"
PARTS = {
    "lag": "12 losses at exact lags, tiny model",
    "others": "8 more losses at exact lags, tiny model",
    "smollm2": "5 losses at exact lags, SmolLM2-135M",
    "rates": "6 losses: another learning rate, 4 updates a step",
    "time": "6 losses at four async ratios",
}
MODELS = {"lag": "tiny", "others": "tiny", "smollm2": "SmolLM2"}
"""The model of each part with exact lags."""
LATE = 16
"""The greatest lag, in steps: where losses are compared with each other."""
COLOURS = {f"lag {LATE}": "C3", "lag 4": "C0", "lag 1": "C2"}
"""How the figure shows a lag."""


def records_of(part: str) -> list[dict]:
    """Return all records of a part."""
    return grids.read_records(RESULTS / part / "cells.jsonl")


def whole(part: str, **cell: object) -> list[dict]:
    """Return the records of a part's complete seeds with these options; none if the seeds are too few."""
    records = records_of(part)
    counts = pd.Series([record["cell"]["seed"] for record in records]).value_counts()
    seeds = set(counts.index[counts == counts.max()])
    if len(seeds) < grids.MIN_SEEDS:
        return []
    return [
        record
        for record in records
        if record["cell"]["seed"] in seeds and cell.items() <= record["cell"].items()
    ]


def what_was_run() -> list[str]:
    """Return how many runs each part has, and at which commits they were made."""
    lines, machines = [], set()
    for part, what in PARTS.items():
        runs = pd.json_normalize(records_of(part)).reindex(
            columns=["cell.seed", "error", "git_commit", "hardware.cpu"]
        )
        commits = runs["git_commit"].str[:7].value_counts(sort=False)
        made = ", ".join(f"{commit}: {count}" for commit, count in commits.items())
        lines.append(
            [f"`{part}`", what, len(runs), runs["cell.seed"].nunique(), runs["error"].count(), made]
        )
        machines |= set(runs["hardware.cpu"])
    return [
        *markdown(["`--study`", "what", "runs", "seeds", "failed", "commits: runs"], lines),
        "",
        f"A run is `torchrun train_async.py` with the `options` of its record, on 2 cores of {', '.join(machines)}.",
    ]


# Exact lags


def lags(part: str) -> pd.DataFrame:
    """Return a row per run on stale data less its fresh one, as grids.differences; `setting` is the lag."""
    rows = grids.differences(whole(part))
    rows["setting"] = "lag " + rows["setting"].str.extract(r"delay` (\d+)", expand=False)
    return rows


def rounding() -> str:
    """Return what rounding alone does: `reinforce` less `grpo`, both fresh, where they have one gradient."""
    runs = grids.measures_of(whole("lag")).query("publish_delay == 0")
    runs = runs.pivot(index="seed", columns="loss", values=[*grids.MEASURES])
    texts = []
    for name in grids.MEASURES:
        change = runs[name, "reinforce"] - runs[name, "grpo"]
        texts.append(f"{name} {grids.shown(change, '{:+.4f}')}")
    return f"Rounding, `reinforce` − `grpo`, both fresh: {', '.join(texts)}."


def summary() -> list[str]:
    """Return the table of docs/staleness.md: level, lagged − fresh, of every loss at every lag on both models."""
    tables = {}
    for part, model in MODELS.items():
        texts = grids.by_loss(grids.compare(lags(part))).add_prefix(f"{model}, ")
        tables[model] = pd.concat([tables.get(model), texts])
    table = pd.concat(tables.values(), axis="columns").fillna(grids.MISSING)
    table = table.reindex(f"`{loss}`" for loss in LOSSES).rename_axis("loss").reset_index()
    n = [len({record["cell"]["seed"] for record in whole(part)}) for part in MODELS]
    caption = (
        f"Mean (95 % t-interval); n = {n[0]} seeds where there is a lag of 1, else {n[1]}. Bold leaves zero out after "
        "Holm's correction over the records of one part: `lag`, `others` or `smollm2`."
    )
    return [*markdown(table, table.to_numpy()), "", caption]


def levels(part: str) -> pd.DataFrame:
    """Return the mean reward of the last part at the greatest lag: a row per seed, a column per loss, best first."""
    runs = grids.measures_of(whole(part, publish_delay=LATE))
    table = runs.pivot(index="seed", columns="loss", values="level")
    return table[table.mean().sort_values(ascending=False).index]


def order(part: str) -> list[str]:
    """Return the losses by level at the greatest lag, and which pairs can be told apart by their seeds."""
    level = levels(part)
    pairs = list(itertools.combinations(level, 2))
    p = [stats.ttest_rel(level[better], level[worse]).pvalue for better, worse in pairs]
    stays = multipletests(p, alpha=0.05, method="holm")[0]
    above = list(itertools.compress(pairs, stays))
    lines = []
    for loss, values in level.items():
        below = ", ".join(f"`{worse}`" for better, worse in above if better == loss) or "none"
        lines.append([f"`{loss}`", grids.shown(values, "{:.3f}"), f"{values.min():.3f}", below])
    heading = ["loss", "level, mean (95 % t-interval)", "worst seed", "above in pairs, after Holm"]
    caption = f"{len(pairs)} pairs of losses, by seed; {len(above)} after Holm's correction."
    return [*markdown(heading, lines), "", caption]


def same_order() -> str:
    """Return how far the order of losses is the same on both models."""
    both = pd.concat([levels(part).mean() for part in ("lag", "smollm2")], axis=1, join="inner")
    tau = stats.kendalltau(both[0], both[1])
    return (
        f"Kendall's τ of the levels of the {len(both)} losses on both models: {tau.statistic:+.2f}, two-sided p "
        f"{tau.pvalue:.2f}."
    )


# Rates


def rates(usual: pd.DataFrame) -> list[str]:
    """Return what the greatest lag costs at other rates, less what it costs with the defaults; and the cost itself."""
    usual = usual.query(f"setting == 'lag {LATE}'")
    both = grids.differences(whole("rates")).merge(
        usual, on=["loss", "seed"], suffixes=("", "_usual")
    )
    both["setting"] = both["setting"].str.replace(r"^.*?delay` \d+, ", "", regex=True)
    less = both.assign(level=both["level"] - both["level_usual"])
    grpo = both[both["loss"] == "grpo"]
    bases = grpo.groupby("setting", sort=False)["base"].agg(grids.shown, "{:.3f}")
    usual = grids.shown(grpo.groupby("seed")["base_usual"].first(), "{:.3f}")
    return [
        *grids.compact(grids.compare(less)),
        "",
        "The cost itself:",
        "",
        *grids.compact(grids.compare(both)),
        "",
        *markdown(["rate", "level of fresh `grpo`"], bases.items()),
        f"| `lr` 0.001 with one update a step | {usual} |",
    ]


# Time


def over_time(record: dict, start_s: float, end_s: float) -> float:
    """Return the mean training reward of the newest weights between two times in seconds of steps.

    A version counts from the end of its step to that of the next, however late its samples are trained on.
    """
    by_version = grids.reward_by_version(record)
    times = np.clip(ends_of(record), start_s, end_s)
    return np.average(by_version, weights=np.diff(times)[by_version.index])


def ends_of(record: dict) -> np.ndarray:
    """Return when each version was made, the first at 0, in seconds of steps."""
    return np.cumsum([0.0, *record["series"]["step_s"]])


def by_time(records: list[dict]) -> pd.DataFrame:
    """Return a row per run: loss, seed, α, and seconds, steps and reward up to a time that all of loss and seed reach.

    It is the first time at which one of these runs has no newer version that sampled. `staleness` is that of the second
    half of the run's steps.
    """
    runs = grids.runs_of(records)
    last = [
        ends_of(record)[grids.reward_by_version(record).index[-1] + 1] for record in runs["record"]
    ]
    runs["seconds"] = runs.assign(last=last).groupby(["loss", "seed"])["last"].transform("min")
    timed = list(zip(runs["record"], runs["seconds"], strict=True))
    runs["mean"] = [over_time(record, 0, end) for record, end in timed]
    runs["late"] = [over_time(record, 0.8 * end, end) for record, end in timed]
    runs["steps"] = [(ends_of(record)[1:] <= end).sum() for record, end in timed]
    staleness = [record["series"]["staleness_mean"] for record in runs["record"]]
    runs["staleness"] = [np.mean(of_run[len(of_run) // 2 :]) for of_run in staleness]
    return runs


def equal_time() -> list[str]:
    """Return what async ratios gain in equal time: on the whole and late; by how many steps, and how stale."""
    runs = by_time(whole("time"))
    lines = []
    titles = {"mean": "Mean reward up to that time", "late": "Mean reward in the last fifth of it"}
    for measure, title in titles.items():
        table = runs.pivot(index=["loss", "seed"], columns="async_ratio", values=measure)
        gains = (
            table.sub(table[0.0], axis="index").drop(columns=0.0).rename(columns="α = {:g}".format)
        )
        rows = gains.melt(var_name="setting", value_name="level", ignore_index=False).reset_index()
        rows = rows.sort_values("loss", key=lambda names: names.map([*LOSSES].index), kind="stable")
        lines += [f"**{title}, α > 0 − α = 0.**", "", *grids.compact(grids.compare(rows)), ""]
    by_seed = runs.groupby(["async_ratio", "seed"])[["steps", "staleness"]].mean()
    by_alpha = by_seed.groupby("async_ratio").agg(grids.shown, "{:.2f}")
    by_alpha.index = by_alpha.index.map("{:g}".format)
    noise = runs[runs["async_ratio"] == 0].groupby("seed")["mean"].std().mean()
    heading = ["α", "steps in that time", "staleness in the second half of a run, steps"]
    return [
        *lines,
        f"That time is {runs['seconds'].min():.0f} to {runs['seconds'].max():.0f} s. At α = 0 all losses train alike; "
        f"their means up to that time have a standard deviation of {noise:.4f}, which is of the clock alone.",
        "",
        *markdown(heading, by_alpha.reset_index().to_numpy()),
    ]


# Output


def page(exact: dict[str, pd.DataFrame]) -> list[str]:
    """Return all tables, under headings; `exact` has the lags of the parts with exact ones."""
    late = f"lag {LATE}"
    sections = {"What was run": what_was_run()}
    for part, rows in exact.items():
        sections[f"{PARTS[part]}: lagged − fresh"] = grids.paired_page(rows)
    sections[f"{PARTS['smollm2']}: lagged − fresh"] += ["", rounding()]
    for part in ("lag", "smollm2"):
        sections[f"{PARTS[part]}: the order at {late}"] = order(part)
    sections[f"{PARTS['smollm2']}: the order at {late}"] += ["", same_order()]
    sections[f"{PARTS['rates']}: the cost of {late} in level, less that with the defaults"] = rates(
        exact["lag"]
    )
    sections[f"{PARTS['time']}: equal time"] = equal_time()
    lines = ["# The study of staleness: all tables", ""]
    lines.append("Made by `scripts/staleness.py`. [What it says](../../docs/staleness.md).")
    for title, section in sections.items():
        lines += ["", f"## {title}", "", *section]
    return lines


def draw(exact: dict[str, pd.DataFrame], path: Path) -> None:
    """Draw what lag costs: a panel per model, a row per loss and a bar per lag, mean and interval.

    The least cost at the greatest lag is on top.
    """
    tables = [grids.compare(rows).assign(model=MODELS[part]) for part, rows in exact.items()]
    rows = pd.concat(tables)
    rows["half"] = (rows["high"] - rows["low"]) / 2
    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(1, 2)
    label = "level, lagged − fresh: mean and 95 % t-interval"
    for panel, (model, table) in zip(panels, rows.groupby("model", sort=False), strict=True):
        table = table.pivot(index="loss", columns="setting", values=["mean", "half"])
        table = table.sort_values(("mean", f"lag {LATE}")).reindex(columns=COLOURS, level=1)
        style = {"color": COLOURS, "ecolor": "0.3", "width": 0.8, "title": model}
        table["mean"].plot.barh(xerr=table["half"], ax=panel, xlabel=label, **style)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Write tables.md and cost.png."""
    exact = {part: lags(part) for part in MODELS}
    (RESULTS / "tables.md").write_text("\n".join(page(exact)) + "\n", encoding="utf-8")
    draw(exact, RESULTS / "cost.png")


if __name__ == "__main__":
    main()
