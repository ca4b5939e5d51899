"""What docs/staleness.md says, made from results/study; `python scripts/staleness.py` draws its two figures there.

A seed counts when all of its cells in a part have run, and a part with enough seeds. The words of a sentence are chosen
by its interval.
"""

import functools
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from scripts import ablate, figures, grids
from scripts.lines import markdown

RESULTS = Path(__file__).resolve().parent.parent / "results" / "study"
WHAT = {
    "lag": "12 losses at exact lags, tiny model",
    "others": "8 more losses at exact lags, tiny model",
    "smollm2": "5 losses at exact lags, SmolLM2-135M",
    "rates": "6 losses: another learning rate, 4 updates a step",
    "time": "6 losses at four async ratios",
}
EXACT = ("lag", "others", "smollm2")  # parts with exact lags
NOISE = "Rounding, `reinforce` − `grpo`"
LATE = 16
"""The greatest lag, in steps: where losses are compared with each other."""


@functools.cache  # to read the options of hundreds of runs takes seconds
def cells_of(part: str) -> list[dict]:
    """All cells of a part."""
    return ablate.study([part])[part][0]


def whole(part: str, least: int = grids.MIN_SEEDS) -> list[dict]:
    """The records of a part's seeds of which no cell is missing; none of fewer than `least` such seeds."""
    found = {
        grids.key(record["cell"]): record
        for record in grids.read_records(RESULTS / part / "cells.jsonl")
    }
    missing = {cell["seed"] for cell in cells_of(part) if grids.key(cell) not in found}
    there = [found[grids.key(cell)] for cell in cells_of(part) if cell["seed"] not in missing]
    return there if len({record["cell"]["seed"] for record in there}) >= least else []


def not_run(part: str) -> list[str]:
    there, wanted = len(grids.read_records(RESULTS / part / "cells.jsonl")), len(cells_of(part))
    return [
        f"*Not run yet: `--study {part}` has {there} of {wanted} runs, too few complete seeds.*"
    ]


def was_run() -> list[str]:
    """How much of each part there is, and how it was made."""
    rows, records = [], []
    for part in WHAT:
        cells, kept = cells_of(part), grids.read_records(RESULTS / part / "cells.jsonl")
        seeds, wanted = (
            {record["cell"]["seed"] for record in whole(part, 1)},
            {cell["seed"] for cell in cells},
        )
        failed = sum("error" in record for record in kept)
        counts = f"{len(kept)} of {len(cells)}", f"{len(seeds)} of {len(wanted)}", failed
        rows.append([f"`{part}`", WHAT[part], *counts, _commits(kept)])
        records += kept
    total, machines = (
        sum(len(cells_of(part)) for part in WHAT),
        [record["hardware"] for record in records],
    )
    made = sorted({f"{machine['cpu_cores']} cores of {machine['cpu']}" for machine in machines})
    text = f"A run is `torchrun train_async.py` with the `options` of its record, on {', '.join(made)}."
    rewards: dict[tuple, list[str]] = {}
    for record in records:
        run = grids.key(record["cell"]), *record["options"]
        rewards.setdefault(run, []).append(str(record["series"]["reward"]))
    again = [of for of in rewards.values() if len(of) > 1]
    text += f" {len(again)} runs are in several parts; {sum(len(set(of)) == 1 for of in again)} of these have the same "
    text += "rewards to the bit each time."
    state = f"**Partial: {len(records)} of {total} runs are there.** What is missing is said where it would stand."
    return [
        *([state, ""] if len(records) < total else []),
        *markdown(["`--study`", "what", "runs", "complete seeds", "failed", "commits: runs"], rows),
        *(["", text] if records else []),
    ]


def _commits(records: list[dict]) -> str:
    """Which commits a part ran at, and how many runs each."""
    counts = Counter(record["git_commit"][:7] for record in records)
    return ", ".join(f"{commit}: {number}" for commit, number in counts.items()) or grids.MISSING


# Exact lags


def lags(part: str = "lag") -> pd.DataFrame:
    """A row per run on stale data less its fresh one, `setting` the lag; and what rounding alone does."""
    path = RESULTS / part / "cells.jsonl"
    return _lags(part, path, path.stat().st_mtime_ns) if path.exists() else pd.DataFrame()


@functools.lru_cache  # a page asks a dozen times
def _lags(part: str, path: Path, changed_ns: int) -> pd.DataFrame:
    records = whole(part)
    if not records or (found := grids.differences(records)).empty:
        return pd.DataFrame()
    found["setting"] = "lag " + found["setting"].str.extract(r"delay` (\d+)", expand=False)
    fresh = {
        (r["cell"]["algo"], r["cell"]["seed"]): r for r in records if not r["cell"]["publish_delay"]
    }
    both = [
        (run, fresh["grpo", seed]) for (algo, seed), run in fresh.items() if algo == "reinforce"
    ]
    rounding = [grids.difference(*pair, found["end"].iloc[0]) for pair in both]
    return pd.concat(
        [found, pd.DataFrame([{"loss": NOISE, "setting": NOISE, **one} for one in rounding])]
    )


def cost(part: str, measured: str) -> list[str]:
    """The table of a measure. What rounding does stands below it, in no family of comparisons."""
    if (found := lags(part)).empty:
        return not_run(part)
    rounding = found.loc[found["loss"] == NOISE, measured].tolist()
    below = [f"{NOISE}, both fresh: {grids.shown(rounding, '{:+.4f}')}."] if rounding else []
    *table, caption = grids.compact(compare(found, measured))
    start, end = (int(found[name].iloc[0]) for name in ("start", "end"))
    window = {"area": f"Versions 0 to {end}:"}.get(measured, f"Versions {start} to {end}:")
    return [*table, " ".join([*([] if measured == "final" else [window]), caption, *below])]


def compare(found: pd.DataFrame, measured: str = "level") -> pd.DataFrame:
    """What grids.py's compare says of runs on stale data, without the rows of rounding."""
    return grids.compare(found[found["loss"] != NOISE], measured)


def levels(part: str = "lag") -> pd.DataFrame:
    """Mean reward of the last part at the greatest lag, a row per seed and a column per loss, the best first."""
    found = {}
    for record in whole(part):
        if record["cell"]["publish_delay"] == LATE and "error" not in record:
            start = len(record["series"]["reward"]) // 2
            level = grids.measure(grids.reward_by_version(record), start)["level"]
            found.setdefault(record["cell"]["algo"], {})[record["cell"]["seed"]] = level
    frame = pd.DataFrame(found)
    return frame[frame.mean().sort_values(ascending=False).index]


def compare_pairs(level: pd.DataFrame) -> pd.DataFrame:
    """What grids.py's compare says of each loss (`setting`) less each one in a later column, by seed."""
    pairs = [
        {"setting": one, "loss": other, "level": value}
        for one, other in itertools.combinations(level, 2)
        for value in (level[one] - level[other]).dropna()
    ]
    return grids.compare(pd.DataFrame(pairs))


def order(part: str = "lag") -> list[str]:
    """The losses by level at the greatest lag, and which pairs can be told apart."""
    if (level := levels(part)).empty:
        return not_run(part)
    rows, lines = compare_pairs(level), []
    outside, stay = rows["says"].isin((grids.BELOW, grids.ABOVE)).sum(), rows[rows["stays"]]
    for loss in level:
        below = [f"`{row.loss}`" for row in stay[stay["setting"] == loss].itertuples()]
        seeds = level[loss].dropna().tolist()
        said = (
            grids.shown(seeds, "{:.3f}"),
            f"{min(seeds):.3f}",
            len(seeds),
            ", ".join(below) or "none",
        )
        lines.append([f"`{loss}`", *said])
    return [
        f"- At lag {LATE}, {len(rows) - outside} of {len(rows)} pairs of losses have a 95 % t-interval, of their "
        f"difference by seed, that includes zero. {outside} leave it out, chance alone would have "
        f"{0.05 * len(rows):.1f} do so; {len(stay)} after Holm's correction over all {len(rows)}.",
        "",
        *markdown(
            [
                "loss",
                "level, mean (95 % t-interval)",
                "worst seed",
                "n",
                "above in pairs, after Holm",
            ],
            lines,
        ),
    ]


def same_order() -> list[str]:
    """How far the order of losses is the same on both models: of means, and of pairs that can be told apart."""
    tiny, text = levels("lag"), levels("smollm2")
    if tiny.empty or text.empty:
        return not_run("lag" if tiny.empty else "smollm2")
    common = tiny.columns.intersection(text.columns)
    tau = stats.kendalltau(tiny[common].mean(), text[common].mean())
    each = (compare_pairs(level[common])["says"] for level in (tiny, text))
    says = [of.where(of.isin((grids.BELOW, grids.ABOVE))) for of in each]
    both = says[0].notna() & says[1].notna()
    found = f"{tau.statistic:+.2f}, two-sided p {tau.pvalue:.2f}".replace(
        "-", "−", int(tau.statistic < 0)
    )
    return [
        f"- Kendall's τ of the levels of {len(common)} losses at lag {LATE} is {found}, if any order were as likely.",
        f"- Of their {len(both)} pairs {says[0].notna().sum()} can be told apart on the tiny model and "
        f"{says[1].notna().sum()} on SmolLM2 (95 % t-intervals, no correction), {both.sum()} on both; "
        f"{(says[0] == says[1])[both].sum()} of these the same way.",
    ]


# Rates


def rates() -> list[str]:
    """What lag 16 costs at other rates less what it costs with the defaults, a point for each rate; then both."""
    records, usual = whole("rates"), lags("lag")
    found = grids.differences(records) if records else usual[:0]
    if usual.empty or found["seed"].nunique() < grids.MIN_SEEDS:
        return not_run("lag" if usual.empty else "rates")
    usual = usual[usual["setting"] == f"lag {LATE}"].astype({"loss": str})
    both = found.astype({"loss": str}).merge(usual, on=["loss", "seed"], suffixes=("", "_usual"))
    both["setting"] = both["setting"].astype(str).str.replace(r"^.*?delay` \d+, ", "", regex=True)
    rows, less = (
        grids.compare(one) for one in (both, both.assign(level=both["level"] - both["level_usual"]))
    )
    grpo, defaults = both[both["loss"] == "grpo"], "`lr` 0.001 with one update a step"
    bases = dict(
        [
            *grpo.groupby("setting", sort=False)["base"],
            (defaults, grpo.groupby("seed")["base_usual"].first()),
        ]
    )
    fresh = "; ".join(f"{grids.shown(list(of), '{:.3f}')} at {at}" for at, of in bases.items())
    tables = [*grids.compact(less), "", "The cost itself:", "", *grids.compact(rows)]
    return [*grids.sentences(less), "", *tables, "", f"Fresh, `grpo` has a level of {fresh}."]


# Time


def over_time(record: dict, start_s: float, end_s: float) -> float:
    """Mean training reward of the newest weights between two times in seconds of steps: a version counts from the end
    of its step to that of the next, whenever its samples are trained on."""
    of_version, ends = grids.reward_by_version(record), _ends(record)
    since, until = ends[of_version.index], ends[of_version.index + 1]
    inside = np.clip(until, start_s, end_s) - np.clip(since, start_s, end_s)
    return float(np.dot(of_version, inside) / inside.sum())


def _ends(record: dict) -> np.ndarray:
    """When each version was made, 0 the first, in seconds of steps."""
    return np.concatenate([[0.0], np.cumsum(record["series"]["step_s"])])


def by_time(records: list[dict]) -> pd.DataFrame:
    """A row per run: its loss, seed and α; and until the first run of that loss and seed has no newer version that
    sampled: seconds, steps and reward. `staleness` is that of the second half of its steps."""
    rows, runs = [], [record for record in records if "error" not in record]
    pairs = [(grids.loss(record["cell"]), record["cell"]["seed"]) for record in runs]
    for pair, record in zip(pairs, runs, strict=True):
        rivals = (other for of, other in zip(pairs, runs, strict=True) if of == pair)
        until = min(_ends(other)[grids.reward_by_version(other).index[-1] + 1] for other in rivals)
        row = {
            "loss": pair[0],
            "seed": pair[1],
            "alpha": record["cell"]["async_ratio"],
            "seconds": until,
        }
        row |= {"mean": over_time(record, 0, until), "late": over_time(record, 0.8 * until, until)}
        row |= {"steps": np.sum(_ends(record)[1:] <= until)}
        staleness = record["series"]["staleness_mean"]
        rows.append(row | {"staleness": np.mean(staleness[len(staleness) // 2 :])})
    return pd.DataFrame(rows)


def bought(runs: pd.DataFrame) -> pd.DataFrame:
    """What each α > 0 of a loss and seed has more than α = 0 after the same time."""
    both = runs[runs["alpha"] > 0].merge(
        runs[runs["alpha"] == 0], on=["loss", "seed"], suffixes=("", "_0")
    )
    both = both.assign(setting=[f"α = {alpha:g}" for alpha in both["alpha"]])
    less = {name: both[name] - both[f"{name}_0"] for name in ("mean", "late")}
    return both.assign(**less).sort_values("alpha", kind="stable")


def equal_time() -> list[str]:
    """What async ratios gain in equal time: on the whole and late; by how many steps, and how stale."""
    if (runs := by_time(whole("time"))).empty:
        return not_run("time")
    lines, found = [], bought(runs)
    for measured, text in (
        ("mean", "Mean reward up to that time"),
        ("late", "Mean reward in the last fifth of it"),
    ):
        lines += [
            f"**{text}, α > 0 − α = 0.**",
            "",
            *grids.compact(grids.compare(found, measured)),
            "",
        ]
    by_alpha = [
        [
            f"{alpha:g}",
            *(
                grids.shown(of.groupby("seed")[name].mean(), "{:.2f}")
                for name in ("steps", "staleness")
            ),
        ]
        for alpha, of in runs.groupby("alpha")
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


def best() -> list[str]:
    """The α with the greatest mean reward up to one time, for each loss, and whether it can be told from α = 0."""
    if (runs := by_time(whole("time"))).empty:
        return not_run("time")
    points, rows = [], grids.compare(bought(runs), "mean")
    for loss, of in rows.groupby("loss", sort=False):
        top = of.loc[of["values"].map(np.mean).idxmax()]
        first = "best at" if np.mean(top["values"]) > 0 else "best at α = 0. Next is"
        holds = f"{'also' if top['stays'] else 'not'} after Holm's correction over {len(rows)}"
        said = (
            top["says"] if top["says"] in (grids.FEW, grids.UNCLEAR) else f"{top['says']}, {holds}"
        )
        points.append(
            f"- `{loss}`: {first} {top['setting']}: {grids.shown(top['values'])} against α = 0, {said}."
        )
    return points


def in_short() -> list[str]:
    """What the study answers, a point for each interval that counts; and first, which question has no runs yet."""
    answers = {
        "Which losses can be told apart": order()[:1],
        "Whether the order holds on both models": same_order(),
    }
    answers["What asynchrony gains in equal time: the best α by loss, in mean reward"] = best()
    for part, measured in (*((part, "level") for part in EXACT), ("smollm2", "final")):
        said = (
            grids.sentences(compare(found, measured)) if len(found := lags(part)) else not_run(part)
        )
        answers[f"What lag costs: {WHAT[part]}; {measured}, lagged − fresh"] = said
    answers[
        f"What lag {LATE} costs at other rates, less what it costs with the defaults; level"
    ] = rates()[:3]
    lines, missing = (
        [],
        [title for title, points in answers.items() if not points[0].startswith("-")],
    )
    if missing:
        lines += [
            "**Not answered yet, as runs are missing:**",
            "",
            *(f"- {title}" for title in missing),
            "",
        ]
    for title in (title for title in answers if title not in missing):
        lines += [f"**{title}.**", "", *answers[title], ""]
    return lines[:-1]


def main() -> None:
    """Draw the figures from what is there."""
    found = {part: compare(of) for part in EXACT if len(of := lags(part))}
    if "lag" not in found:
        raise SystemExit(
            "error: no seed of results/study/lag is complete; scripts/ablate.py --study lag runs it"
        )
    figures.draw_lags(found["lag"], RESULTS / "lag.png")
    late = {part: rows[rows["setting"] == f"lag {LATE}"] for part, rows in found.items()}
    tiny = pd.concat([rows for part, rows in late.items() if part != "smollm2"])
    panels = {"tiny model": tiny} | {WHAT[part]: late[part] for part in late if part == "smollm2"}
    figures.draw_order(panels, RESULTS / "order.png")


if __name__ == "__main__":
    main()
