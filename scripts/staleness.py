"""The tables and the figure of results/study, from its records: `python scripts/staleness.py`.

docs/staleness.md shows the figure and one of the tables. A seed counts if it has every run that another seed of the
part has. A part is shown from three such seeds on.
"""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import stats

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
EXACT = ("lag", "others", "smollm2")
"""Parts with exact lags."""
LATE = 16
"""The greatest lag, in steps: where losses are compared with each other."""


def records_of(part: str) -> list[dict]:
    """All records of a part."""
    return grids.read_records(RESULTS / part / "cells.jsonl")


def whole(part: str) -> list[dict]:
    """The records of a part's complete seeds; none of too few such seeds."""
    records = records_of(part)
    counts = Counter(record["cell"]["seed"] for record in records)
    seeds = {seed for seed, count in counts.items() if count == max(counts.values())}
    if len(seeds) < grids.MIN_SEEDS:
        return []
    return [record for record in records if record["cell"]["seed"] in seeds]


def what_was_run() -> list[str]:
    """How many runs each part has, and at which commits they were made."""
    rows, rewards, machines = [], {}, set()
    for part, what in PARTS.items():
        records = records_of(part)
        seeds = {record["cell"]["seed"] for record in records}
        failed = sum("error" in record for record in records)
        counts = Counter(record["git_commit"][:7] for record in records)
        commits = ", ".join(f"{commit}: {number}" for commit, number in counts.items())
        rows.append([f"`{part}`", what, len(records), len(seeds), failed, commits])
        for record in records:
            run = (grids.key(record["cell"]), *record["options"])
            rewards.setdefault(run, []).append(str(record["series"]["reward"]))
            machines.add("{cpu_cores} cores of {cpu}".format(**record["hardware"]))
    repeated = [series for series in rewards.values() if len(series) > 1]
    equal = sum(len(set(series)) == 1 for series in repeated)
    return [
        *markdown(["`--study`", "what", "runs", "seeds", "failed", "commits: runs"], rows),
        "",
        f"A run is `torchrun train_async.py` with the `options` of its record, on {', '.join(sorted(machines))}. "
        f"{len(repeated)} runs are in several parts; {equal} of these have the same rewards to the bit each time.",
    ]


COLOURS = {"lag 1": ("C2", 0.2), "lag 4": ("C0", 0.0), f"lag {LATE}": ("C3", -0.2)}
"""How the figure shows a lag: its colour, and how far above the middle of a row."""


# Exact lags


def lags(part: str) -> pd.DataFrame:
    """A row per run on stale data less its fresh one, as grids.differences; `setting` is the lag."""
    found = grids.differences(whole(part))
    if not found.empty:
        found["setting"] = "lag " + found["setting"].str.extract(r"delay` (\d+)", expand=False)
    return found


def rounding(end: int) -> str:
    """What rounding alone does: `reinforce` less `grpo`, both fresh, where they have one gradient."""
    fresh = [record for record in whole("lag") if not record["cell"]["publish_delay"]]
    plain, clipped = (
        sorted(
            (record for record in fresh if record["cell"]["algo"] == algo),
            key=lambda record: record["cell"]["seed"],
        )
        for algo in ("reinforce", "grpo")
    )
    pairs = zip(plain, clipped, strict=True)
    found = pd.DataFrame([grids.difference(run, base, end) for run, base in pairs])
    differences = (f"{name} {grids.shown(found[name], '{:+.4f}')}" for name in grids.MEASURES)
    return f"Rounding, `reinforce` − `grpo`, both fresh: {', '.join(differences)}."


def summary() -> list[str]:
    """The table of docs/staleness.md: level, lagged − fresh, of every loss at every lag on both models."""
    columns, n = {}, {}
    for part, model in (("lag", "tiny"), ("others", "tiny"), ("smollm2", "SmolLM2")):
        cells = grids.cells_of(grids.compare(lags(part)))
        n[part] = len({record["cell"]["seed"] for record in whole(part)})
        for lag in cells:
            columns.setdefault(f"{model}, {lag}", []).append(cells[lag])
    table = pd.DataFrame({name: pd.concat(parts) for name, parts in columns.items()})
    table = table.fillna(grids.MISSING).sort_index(key=lambda index: index.map(_place))
    caption = (
        f"Mean (95 % t-interval); n = {n['lag']} seeds where there is a lag of 1, else {n['others']}. Bold leaves zero "
        "out after Holm's correction over the records of one part: `lag`, `others` or `smollm2`."
    )
    return [*markdown(["loss", *table], table.reset_index().to_numpy()), "", caption]


def _place(name: str) -> int:
    return list(grids.LOSSES).index(name.strip("`"))


def levels(part: str) -> pd.DataFrame:
    """Mean reward of the last part at the greatest lag, a row per seed and a column per loss, the best first."""
    rows = []
    for record in whole(part):
        if record["cell"]["publish_delay"] == LATE and "error" not in record:
            start = len(record["series"]["reward"]) // 2
            level = grids.measure(grids.reward_by_version(record), start)["level"]
            rows.append({**record["cell"], "level": level})
    frame = pd.DataFrame(rows).pivot(index="seed", columns="algo", values="level")
    return frame[frame.mean().sort_values(ascending=False).index]


def compare_pairs(level: pd.DataFrame) -> pd.DataFrame:
    """What grids.compare says of each loss (`setting`) less each one in a later column, by seed."""
    pairs = [
        {"setting": better, "loss": worse, "level": value}
        for better, worse in itertools.combinations(level, 2)
        for value in (level[better] - level[worse]).dropna()
    ]
    return grids.compare(pd.DataFrame(pairs))


def order(part: str) -> list[str]:
    """The losses by level at the greatest lag, and which pairs can be told apart."""
    level = levels(part)
    pairs = compare_pairs(level)
    outside = ((pairs["low"] > 0) | (pairs["high"] < 0)).sum()
    lines = []
    for loss, values in level.items():
        below = pairs.loc[pairs["stays"] & (pairs["setting"] == loss), "loss"]
        names = ", ".join(f"`{name}`" for name in below) or "none"
        worst = f"{values.min():.3f}"
        lines.append([f"`{loss}`", grids.shown(values.dropna(), "{:.3f}"), worst, names])
    heading = ["loss", "level, mean (95 % t-interval)", "worst seed", "above in pairs, after Holm"]
    return [
        *markdown(heading, lines),
        "",
        f"{len(pairs)} pairs of losses, by seed: {outside} of the 95 % t-intervals leave zero out, by chance alone "
        f"{0.05 * len(pairs):.1f} would; {pairs['stays'].sum()} after Holm's correction.",
    ]


def same_order() -> str:
    """How far the order of losses is the same on both models."""
    tiny, text = levels("lag").mean(), levels("smollm2").mean()
    common = tiny.index.intersection(text.index)
    tau = stats.kendalltau(tiny[common], text[common])
    return (
        f"Kendall's τ of the levels of the {len(common)} losses on both models: {tau.statistic:+.2f}, two-sided p "
        f"{tau.pvalue:.2f}."
    )


# Rates


def rates(usual: pd.DataFrame) -> list[str]:
    """What the greatest lag costs at other rates, less what it costs with the defaults; and the cost itself."""
    found = grids.differences(whole("rates"))
    usual = usual[usual["setting"] == f"lag {LATE}"]
    both = found.merge(usual, on=["loss", "seed"], suffixes=("", "_usual"))
    both["setting"] = both["setting"].str.replace(r"^.*?delay` \d+, ", "", regex=True)
    less = both.assign(level=both["level"] - both["level_usual"])
    grpo = both[both["loss"] == "grpo"]
    bases = dict(list(grpo.groupby("setting", sort=False)["base"]))
    bases["`lr` 0.001 with one update a step"] = grpo.groupby("seed")["base_usual"].first()
    fresh = [[name, grids.shown(values, "{:.3f}")] for name, values in bases.items()]
    return [
        *grids.compact(grids.compare(less)),
        "",
        "The cost itself:",
        "",
        *grids.compact(grids.compare(both)),
        "",
        *markdown(["rate", "level of fresh `grpo`"], fresh),
    ]


# Time


def over_time(record: dict, start_s: float, end_s: float) -> float:
    """Mean training reward of the newest weights between two times in seconds of steps.

    A version counts from the end of its step to that of the next, however late its samples are trained on.
    """
    by_version, ends = grids.reward_by_version(record), ends_of(record)
    since, until = ends[by_version.index], ends[by_version.index + 1]
    inside = np.clip(until, start_s, end_s) - np.clip(since, start_s, end_s)
    return float(np.average(by_version, weights=inside))


def ends_of(record: dict) -> np.ndarray:
    """When each version was made, the first at 0, in seconds of steps."""
    return np.cumsum([0.0, *record["series"]["step_s"]])


def by_time(records: list[dict]) -> pd.DataFrame:
    """A row per run: loss, seed, α, and seconds, steps and reward up to a time that all runs of loss and seed reach.

    It is the first time at which one of these runs has no newer version that sampled. `staleness` is that of the second
    half of the run's steps.
    """
    runs = [record for record in records if "error" not in record]
    frame = pd.DataFrame({"record": runs})
    frame["loss"] = [grids.loss(record["cell"]) for record in runs]
    frame["seed"] = [record["cell"]["seed"] for record in runs]
    frame["alpha"] = [record["cell"]["async_ratio"] for record in runs]
    last = [ends_of(record)[grids.reward_by_version(record).index[-1] + 1] for record in runs]
    frame["seconds"] = frame.assign(last=last).groupby(["loss", "seed"])["last"].transform("min")
    timed = list(zip(runs, frame["seconds"], strict=True))
    frame["mean"] = [over_time(record, 0, end) for record, end in timed]
    frame["late"] = [over_time(record, 0.8 * end, end) for record, end in timed]
    frame["steps"] = [int((ends_of(record)[1:] <= end).sum()) for record, end in timed]
    staleness = [record["series"]["staleness_mean"] for record in runs]
    frame["staleness"] = [np.mean(values[len(values) // 2 :]) for values in staleness]
    return frame


def bought(runs: pd.DataFrame) -> pd.DataFrame:
    """What each α > 0 of a loss and seed has more than α = 0 after the same time."""
    is_fresh = runs["alpha"] == 0
    both = runs[~is_fresh].merge(runs[is_fresh], on=["loss", "seed"], suffixes=("", "_fresh"))
    for name in ("mean", "late"):
        both[name] -= both[f"{name}_fresh"]
    both["setting"] = [f"α = {alpha:g}" for alpha in both["alpha"]]
    return both.sort_values("alpha", kind="stable")


def equal_time() -> list[str]:
    """What async ratios gain in equal time: on the whole and late; by how many steps, and how stale."""
    runs = by_time(whole("time"))
    lines, found = [], bought(runs)
    for measured, text in (
        ("mean", "Mean reward up to that time"),
        ("late", "Mean reward in the last fifth of it"),
    ):
        table = grids.compact(grids.compare(found, measured))
        lines += [f"**{text}, α > 0 − α = 0.**", "", *table, ""]
    by_alpha = [
        [f"{alpha:g}", *(grids.shown(of_seed[name], "{:.2f}") for name in ("steps", "staleness"))]
        for alpha, group in runs.groupby("alpha")
        for of_seed in [group.groupby("seed")[["steps", "staleness"]].mean()]
    ]
    noise = runs[runs["alpha"] == 0].groupby("seed")["mean"].std().mean()
    heading = ["α", "steps in that time", "staleness in the second half of a run, steps"]
    return [
        *lines,
        f"That time is {runs['seconds'].min():.0f} to {runs['seconds'].max():.0f} s. At α = 0 all losses train alike; "
        f"their means up to that time have a standard deviation of {noise:.4f}, which is of the clock alone.",
        "",
        *markdown(heading, by_alpha),
    ]


# Output


def page(found: dict[str, pd.DataFrame]) -> list[str]:
    """All tables, under headings; `found` are the lags of the parts with exact ones."""
    lines = ["# The study of staleness: all tables", ""]
    lines += ["Made by `scripts/staleness.py`. [What it says](../../docs/staleness.md).", ""]
    lines += ["## What was run", "", *what_was_run(), ""]
    for part, differences in found.items():
        lines += [f"## {PARTS[part]}: lagged − fresh", "", *grids.paired_page(differences), ""]
    lines += [rounding(found["lag"]["end"].iloc[0]), ""]
    for part in ("lag", "smollm2"):
        lines += [f"## {PARTS[part]}: the order at lag {LATE}", "", *order(part), ""]
    lines += [same_order(), ""]
    title = f"## {PARTS['rates']}: the cost of lag {LATE} in level, less that with the defaults"
    lines += [title, "", *rates(found["lag"]), ""]
    return [*lines, f"## {PARTS['time']}: equal time", "", *equal_time()]


def draw(models: dict[str, pd.DataFrame], path: Path) -> None:
    """Draw what lag costs: a panel per model, a row per loss and a colour per lag, mean and interval.

    The least cost at the greatest lag is on top. A mean is filled if it stays after Holm's correction.
    """
    figure = Figure(figsize=(10, 6), layout="constrained")
    panels, bars = figure.subplots(1, len(models), squeeze=False)[0], {}
    for panel, (title, rows) in zip(panels, models.items(), strict=True):
        late = rows[rows["setting"] == f"lag {LATE}"].sort_values("mean")
        places = {loss: place for place, loss in enumerate(late["loss"])}
        for (setting, stays), at_lag in rows.groupby(["setting", "stays"], sort=False):
            colour, offset = COLOURS[setting]
            heights = [places[loss] + offset for loss in at_lag["loss"]]
            halves = (at_lag["high"] - at_lag["low"]) / 2
            style = {"fmt": "o", "ms": 4, "color": colour, "mfc": colour if stays else "white"}
            bars[setting] = panel.errorbar(at_lag["mean"], heights, xerr=halves, **style)
        panel.set_yticks(list(places.values()), list(places))
        panel.set_title(title, fontsize="medium")
        panel.axvline(0, color="0.6", linewidth=0.8)
    figure.legend(bars.values(), bars.keys(), loc="outside upper center", ncols=len(bars))
    figure.supxlabel("level, lagged − fresh: mean and 95 % t-interval", fontsize="medium")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Write tables.md and cost.png."""
    found = {part: lags(part) for part in EXACT}
    (RESULTS / "tables.md").write_text("\n".join(page(found)) + "\n", encoding="utf-8")
    rows = {part: grids.compare(differences) for part, differences in found.items()}
    tiny = pd.concat([rows["lag"], rows["others"]])
    draw({"tiny model": tiny, "SmolLM2-135M": rows["smollm2"]}, RESULTS / "cost.png")


if __name__ == "__main__":
    main()
