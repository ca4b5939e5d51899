"""The tables and the figure of docs/staleness.md: `python scripts/study.py [--results results/study]`.

They are made from the records of `scripts/ablate.py --study`, by the statistics of grids.py. short.md and findings.md
are blocks of docs/staleness.md and README.md, tables.md has all tables, and cost.png is the figure. A seed counts if
it has every run that another seed of the part has.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

from algos import LOSSES
from scripts import grids
from scripts.lines import markdown, run_command

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
MADE = "<!-- Made by scripts/study.py from the records beside it. -->"


class Study:
    """The records of a folder, by part, and their measures."""

    def __init__(self, folder: Path):
        self.records, self.runs, self.lags, self.latest = {}, {}, {}, {}
        for part in PARTS:
            records = whole_seeds(grids.read_records(folder / part / "cells.jsonl"))
            self.records[part] = records
            if part == "time":
                continue
            self.runs[part] = grids.measures_of(records)
            rows = grids.differences(self.runs[part])
            self.lags[part] = lag_named(rows) if part in MODELS else rows
            latest = [record for record in records if record["cell"]["publish_delay"] == LATE]
            self.latest[part] = grids.measures_of(latest)


def lag_named(rows: pd.DataFrame) -> pd.DataFrame:
    """Return differences with their lag as setting."""
    lags = rows["setting"].str.extract(r"delay` (\d+)", expand=False)
    return rows.assign(setting="lag " + lags)


def whole_seeds(records: list[dict]) -> list[dict]:
    """Return the records of the seeds that have as many runs as any seed has."""
    counts = pd.Series([record["cell"]["seed"] for record in records]).value_counts()
    seeds = set(counts.index[counts == counts.max()])
    return [record for record in records if record["cell"]["seed"] in seeds]


def what_was_run(study: Study) -> list[str]:
    """Return how many runs each part has, and at which commits they were made."""
    rows, machines = [], set()
    for part, what in PARTS.items():
        runs = pd.json_normalize(study.records[part]).reindex(
            columns=["cell.seed", "error", "git_commit", "hardware.cpu"]
        )
        commits = runs["git_commit"].str[:7].value_counts(sort=False)
        made = ", ".join(f"{commit}: {count}" for commit, count in commits.items())
        num_seeds = runs["cell.seed"].nunique()
        rows.append([f"`{part}`", what, len(runs), num_seeds, runs["error"].count(), made])
        machines |= set(runs["hardware.cpu"])
    made_by = "`torchrun train_async.py` with the `options` of its record"
    return [
        *markdown(["`--study`", "what", "runs", "seeds", "failed", "commits: runs"], rows),
        "",
        f"A run is {made_by}, on 2 cores of {', '.join(machines)}.",
    ]


# Exact lags


def summary(study: Study) -> list[str]:
    """Return the table of docs/staleness.md: level, lagged − fresh, of every loss at every lag on both models."""
    compared = [
        grids.compare(study.lags[part]).assign(model=model) for part, model in MODELS.items()
    ]
    rows = pd.concat(compared)
    rows["setting"] = rows["model"] + ", " + rows["setting"]
    texts = rows.pivot(index="loss", columns="setting", values="text").fillna(grids.MISSING)
    texts = texts.loc[[loss for loss in LOSSES if loss in texts.index], rows["setting"].unique()]
    texts = texts.rename("`{}`".format).reset_index()
    caption = (
        f"Mean (95 % t-interval); n = {rows['count'].max()} seeds where there is a lag of 1, else "
        f"{rows['count'].min()}. Bold leaves zero out after Holm's correction over the records of one part: "
        f"{', '.join(f'`{part}`' for part in MODELS)}."
    )
    return [*markdown(texts, texts.to_numpy()), "", caption]


def findings(study: Study) -> list[str]:
    """Return the points of README.md: what the greatest lag costs on SmolLM2, and the time of a step by async ratio."""
    compared = grids.compare(study.lags["smollm2"])
    costs = compared[compared["setting"] == f"lag {LATE}"].set_index("loss")
    shown = []
    for loss in ("tis", "grpo", "dppo"):
        mean, interval = costs["text"][loss].strip("*)").split(" (")
        shown.append(f"`{loss}` {mean}, 95 % interval {interval}")
    runs = grids.runs_of(study.records["time"])
    runs["step_s"] = [np.mean(record["series"]["step_s"]) for record in runs["record"]]
    seconds = runs.groupby("async_ratio")["step_s"].mean()
    times = [f"{seconds[ratio] / seconds[0]:.2f} at α = {ratio:g}" for ratio in seconds.index[1:]]
    return [
        f"- SmolLM2-135M with weights {LATE} steps late, reward lost or gained against fresh weights, n = "
        f"{costs['count'].min()} seeds: {', '.join(shown)}.",
        "- Time of a step against α = 0, on two cores, engine and trainer with one each, means of "
        f"{sum(runs['async_ratio'] == 0)} runs: {', '.join(times)}.",
    ]


def rounding(study: Study) -> str:
    """Return what rounding alone does: `reinforce` less `grpo`, both fresh, where they have one gradient."""
    rows = grids.against(study.runs["lag"], "grpo")
    fresh = rows[rows["setting"].str.endswith("delay` 0")]
    texts = [f"{name} {grids.compare(fresh, name)['text'].item()}" for name in grids.MEASURES]
    return f"Rounding, `reinforce` − `grpo`, both fresh: {', '.join(texts)}."


def levels(study: Study, part: str) -> pd.DataFrame:
    """Return the level at the greatest lag: a row per seed, a column per loss, best first."""
    runs = study.latest[part]
    table = runs.pivot(index="seed", columns="loss", values="level")
    return table[table.mean().sort_values(ascending=False).index]


def order(study: Study, part: str) -> list[str]:
    """Return the losses by level at the greatest lag, and which pairs can be told apart by their seeds."""
    level = levels(study, part)
    place = {loss: number for number, loss in enumerate(level)}
    pairs = []
    for worse in level:
        rows = grids.against(study.latest[part], worse).assign(setting=worse)
        pairs.append(rows[rows["loss"].map(place) < place[worse]])
    compared = grids.compare(pd.concat(pairs))
    above = compared[compared["stays"]]
    rows = []
    for loss, values in level.items():
        below = [f"`{worse}`" for worse in above.loc[above["loss"] == loss, "setting"]]
        seeds = f"{values.min():.3f} to {values.max():.3f}"
        names = ", ".join(sorted(below, key=lambda name: -place[name.strip("`")])) or "none"
        rows.append([f"`{loss}`", f"{values.mean():.3f}", seeds, names])
    caption = f"{len(compared)} pairs of losses, by seed; {len(above)} after Holm's correction."
    heading = ["loss", "level, mean", "seeds", "above in pairs, after Holm"]
    return [*markdown(heading, rows), "", caption]


def same_order(study: Study) -> list[str]:
    """Return how far the order of losses is the same on both models, by level and by final accuracy."""
    texts = []
    for measure in ("level", "final"):
        means = []
        for part in ("lag", "smollm2"):
            means.append(study.latest[part].groupby("loss")[measure].mean())
        both = pd.concat(means, axis="columns", join="inner", keys=("tiny", "smollm2"))
        tau = stats.kendalltau(both["tiny"], both["smollm2"])
        texts.append(f"{measure} {tau.statistic:+.2f} (two-sided p {tau.pvalue:.2f})")
    losses = f"Kendall's τ of the {len(both)} losses on both models at lag {LATE}"
    return [f"{losses}: {', '.join(texts)}.", "", *tis_and_grpo(study)]


def tis_and_grpo(study: Study) -> list[str]:
    """Return the one pair of losses whose order differs between the models."""
    rows = []
    for part in ("lag", "smollm2"):
        pair = grids.against(study.latest[part], "grpo").query("loss == 'tis'")
        row = grids.compare(pair).iloc[0]
        rows.append([MODELS[part], row["text"].strip("*"), f"{row['p']:.3f}", row["count"]])
    return markdown(["model", f"`tis` − `grpo`, level at lag {LATE}", "p, one test", "n"], rows)


# Rates


def rates(study: Study) -> list[str]:
    """Return what the greatest lag costs at other rates, less what it costs with the defaults; and the cost itself."""
    usual = study.lags["lag"].query(f"setting == 'lag {LATE}'")
    rows = study.lags["rates"]
    usual = usual.join(study.runs["lag"]["seed"])
    rows = rows.join(study.runs["rates"]["seed"])
    both = rows.merge(usual, on=["loss", "seed"], suffixes=("", "_usual"))
    both["setting"] = both["setting"].str.replace(r"^.*?delay` \d+, ", "", regex=True)
    change = both.assign(
        level=both["level"] - both["level_usual"],
        level_noise=np.hypot(both["level_noise"], both["level_noise_usual"]),
    )
    fresh = study.runs["rates"]
    fresh = fresh[(fresh["publish_delay"] == 0) & (fresh["loss"] == "grpo")]
    fresh_rows = []
    for setting, values in fresh.groupby("setting", sort=False)["level"]:
        rate = setting.partition("delay` 0, ")[2]
        fresh_rows.append(
            [rate, f"{values.mean():.3f}", f"{values.min():.3f} to {values.max():.3f}"]
        )
    return [
        *grids.compact(grids.compare(change)),
        "",
        "The cost itself:",
        "",
        *grids.compact(grids.compare(both)),
        "",
        *markdown(["rate", "level of fresh `grpo`", "seeds"], fresh_rows),
    ]


# Time


def over_time(record: dict, start_s: float, end_s: float) -> tuple[float, float]:
    """Return the mean training reward of the newest weights between two times in seconds of steps, and its noise.

    A version counts from the end of its step to that of the next, however late its samples are trained on. The noise
    is the standard error that grids.error_of_mean finds in the versions of that time.
    """
    by_version = grids.reward_by_version(record)
    times = np.clip(ends_of(record), start_s, end_s)
    seconds = np.diff(times)[by_version.index]
    noise = grids.error_of_mean(by_version[seconds > 0])
    return np.average(by_version, weights=seconds), noise


def ends_of(record: dict) -> np.ndarray:
    """Return when each version was made, the first at 0, in seconds of steps."""
    return np.cumsum([0.0, *record["series"]["step_s"]])


def by_time(records: list[dict]) -> pd.DataFrame:
    """Return a row per run: loss, seed, α, and seconds, steps and reward up to a time that all of loss and seed reach.

    It is the first time at which one of these runs has no newer version that sampled. `staleness` is that of the second
    half of the run's steps.
    """
    runs = grids.runs_of(records)
    last = []
    for record in runs["record"]:
        newest = grids.reward_by_version(record).index[-1]
        last.append(ends_of(record)[newest + 1])
    runs["seconds"] = runs.assign(last=last).groupby(["loss", "seed"])["last"].transform("min")
    timed = list(zip(runs["record"], runs["seconds"], strict=True))
    for name, share in (("mean", 0.0), ("late", 0.8)):
        both = [over_time(record, share * end, end) for record, end in timed]
        runs[name], runs[f"{name}_noise"] = np.transpose(both)
    runs["steps"] = [(ends_of(record)[1:] <= end).sum() for record, end in timed]
    staleness = [record["series"]["staleness_mean"] for record in runs["record"]]
    runs["staleness"] = [np.mean(column[len(column) // 2 :]) for column in staleness]
    return runs


def equal_time(study: Study) -> list[str]:
    """Return what async ratios gain in equal time: on the whole and late; by how many steps, and how stale."""
    runs = by_time(study.records["time"])
    fresh = runs[runs["async_ratio"] == 0].set_index(["loss", "seed"])
    stale = runs[runs["async_ratio"] > 0].join(fresh.add_suffix("_fresh"), on=["loss", "seed"])
    stale["setting"] = stale["async_ratio"].map("α = {:g}".format)
    # by loss, and then by α
    stale = stale.sort_values(["loss", "async_ratio"], key=place_of, kind="stable")
    lines = []
    titles = {"mean": "Mean reward up to that time", "late": "Mean reward in the last fifth of it"}
    for name, title in titles.items():
        rows = stale.assign(
            level=stale[name] - stale[f"{name}_fresh"],
            level_noise=np.hypot(stale[f"{name}_noise"], stale[f"{name}_noise_fresh"]),
        )
        lines += [f"**{title}, α > 0 − α = 0.**", "", *grids.compact(grids.compare(rows)), ""]
    columns = runs.groupby("async_ratio")[["steps", "staleness"]].mean()
    rows = [
        [f"{ratio:g}", f"{steps:.1f}", f"{lag:.2f}"] for ratio, steps, lag in columns.itertuples()
    ]
    noise = fresh.groupby("seed")["mean"].std().mean()
    heading = ["α", "steps in that time", "staleness in the second half of a run, steps"]
    return [
        *lines,
        f"That time is {runs['seconds'].min():.0f} to {runs['seconds'].max():.0f} s. At α = 0 all losses train alike; "
        f"their means up to that time have a standard deviation of {noise:.4f}, which is of the clock alone.",
        "",
        *markdown(heading, rows),
    ]


def place_of(column: pd.Series) -> pd.Series:
    """Return a column of losses as their places in LOSSES, and any other as it is."""
    return column.map([*LOSSES].index) if column.name == "loss" else column


# Output


def tables(study: Study) -> list[str]:
    """Return all tables, under headings."""
    late = f"lag {LATE}"
    sections = {"What was run": what_was_run(study)}
    for part in MODELS:
        sections[f"{PARTS[part]}: lagged − fresh"] = grids.paired_page(study.lags[part])
    sections[f"{PARTS['lag']}: lagged − fresh"] += ["", rounding(study)]
    for part in ("lag", "smollm2"):
        sections[f"{PARTS[part]}: the order at {late}"] = order(study, part)
    sections[f"{PARTS['smollm2']}: the order at {late}"] += ["", *same_order(study)]
    title = f"{PARTS['rates']}: the cost of {late} in level, less that with the defaults"
    sections[title] = rates(study)
    sections[f"{PARTS['time']}: equal time"] = equal_time(study)
    lines = ["# The study of staleness: all tables", ""]
    lines.append("Made by `scripts/study.py`. [What it says](../../docs/staleness.md).")
    for title, section in sections.items():
        lines += ["", f"## {title}", "", *section]
    return lines


def draw(study: Study, path: Path) -> None:
    """Draw what lag costs: a panel per model, a row per loss and a bar per lag, mean and interval.

    The least cost at the greatest lag is on top.
    """
    compared = [
        grids.compare(study.lags[part]).assign(model=model) for part, model in MODELS.items()
    ]
    rows = pd.concat(compared)
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


def pages(study: Study) -> dict[str, str]:
    """Return the text of each page by its name."""
    pages_lines = {
        "short.md": [MADE, *summary(study)],
        "findings.md": [MADE, *findings(study)],
        "tables.md": tables(study),
    }
    return {name: "\n".join(lines) + "\n" for name, lines in pages_lines.items()}


def main(results: Path = RESULTS) -> None:
    """Write the pages and the figure of a study.

    Args:
        results: Directory with the records of each part, PART/cells.jsonl.
    """
    study = Study(results)
    for name, text in pages(study).items():
        (results / name).write_text(text, encoding="utf-8")
    draw(study, results / "cost.png")


if __name__ == "__main__":
    run_command(main)
