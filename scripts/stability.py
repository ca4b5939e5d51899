"""A map of stability over lag and learning rate, of a grid that scripts/ablate.py made.

    python scripts/ablate.py --out OUT --algos grpo tis --async-ratio 0 --publish-delay 0 4 16 \\
        --sweep 'lr=0.00025|0.001|0.004'
    python scripts/stability.py OUT

It writes OUT/stability.md and OUT/stability.png. arXiv 2607.01083 says that stale training is stable while lag · lr
stays below a constant. The first table shows which rates are stable for each loss and lag.

A run *collapses* at a step if its training reward stays below half of its running best for HELD steps. The best
must be LEARNT or more by then, and the first such step counts. A run that was not finite collapsed after its last step.
A run whose best stays below LEARNT has not learnt. It is neither stable nor collapsed.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from tyro.conf import Positional

from scripts.grids import (
    COLOURS,
    fresh_cell,
    is_result,
    key,
    loss_names,
    measures_of,
    read_records,
)
from scripts.lines import markdown, run_command
from scripts.runs import MISSING
from scripts.table import show

HELD = 5
"""Number of steps that the reward must stay low."""
LEARNT = 0.5
"""Least best reward of a run that has learnt."""
COMPARED = ("algo", "algo_args", "publish_delay", "lr", "seed")
"""Options that can differ between the runs of a map."""


def collapse_step(rewards: np.ndarray) -> int | None:
    """Return the step of a run's collapse, from 1; None if it does not collapse. `rewards` is [steps] float64."""
    best = np.maximum.accumulate(rewards)
    is_low = (rewards < best / 2) & (best >= LEARNT)
    for start in range(len(rewards) - HELD + 1):
        if is_low[start : start + HELD].all():
            return start + 1
    return None


def check_records(records: list[dict], out: Path) -> None:
    """Raise ValueError if records make no map: a run lacks a rate or a result, or settings differ."""
    if not records or any("lr" not in record["cell"] for record in records):
        raise ValueError(
            f"{out} is no grid with --sweep 'lr=V1|V2'; scripts/ablate.py --out {out} makes one"
        )
    for record in records:
        if not is_result(record):
            what = f"{out} has a run that is no result: {' '.join(record['error'].split())}"
            raise ValueError(f"{what}; the command that made it runs it again")
    cells = [record["cell"] for record in records]
    for name in sorted({name for cell in cells for name in cell} - {*COMPARED}):
        values = sorted({show(cell.get(name, "unset")) for cell in cells})
        # With an async_ratio the lag is no fixed number of steps.
        if len(values) > 1 or (name == "async_ratio" and values != ["0"]):
            raise ValueError(
                f"{out} has runs with {name} {' and '.join(values)}; those of a map have async_ratio 0, and differ in "
                "loss, publish_delay, lr and seed only; copy the lines of such runs to cells.jsonl in another folder"
            )


def read_runs(out: Path) -> pd.DataFrame:
    """Return a row per run: loss, lag, lr, seed, outcome, step of collapse, level and cost.

    `level` is the mean reward of the later versions. `cost` is the level less that of the fresh run with the same seed
    and rate. `outcome` is stable, collapsed or flat. Raises ValueError as `check_records` does.
    """
    records = read_records(out / "cells.jsonl")
    check_records(records, out)
    names = loss_names([record["cell"] for record in records])
    measured = measures_of(records)
    rows = []
    for record in records:
        cell = record["cell"]
        rewards = np.array(record["series"]["reward"], dtype=float)
        step = collapse_step(rewards)
        if step is None and "error" in record:
            step = len(rewards)
        outcome = "stable" if rewards.max() >= LEARNT else "flat"
        levels = measured["level"].reindex([key(cell), fresh_cell(record, measured.index)])
        rows.append(
            {
                "loss": names[key(cell)],
                "lag": cell["publish_delay"],
                "lr": cell["lr"],
                "seed": cell["seed"],
                "outcome": outcome if step is None else "collapsed",
                "step": step,
                "level": levels.iloc[0],
                "cost": levels.iloc[0] - levels.iloc[1],
            }
        )
    return pd.DataFrame(rows)


def cell_text(runs: pd.DataFrame) -> str:
    """Return the outcome of one loss, lag and rate: seeds that collapsed and when, or the lag's mean cost."""
    collapsed = runs[runs["outcome"] == "collapsed"]
    if len(collapsed):
        return (
            f"**{len(collapsed)} of {len(runs)} collapse**, step {collapsed['step'].median():.0f}"
        )
    text = f"{runs['level'].mean():.2f}"
    if runs["cost"].notna().any():
        text += f" ({runs['cost'].mean():+.2f})".replace("-", "−")
    return f"{text}, flat" if (runs["outcome"] == "flat").any() else text


def outcome_table(runs: pd.DataFrame) -> list[str]:
    """Return the table of outcomes: a row per loss, a column per lag and rate."""
    texts = {}
    for (name, lag, rate), group in runs.groupby(["loss", "lag", "lr"], sort=False):
        texts[name, (lag, rate)] = cell_text(group)
    columns = sorted({column for _, column in texts})
    rows = [
        [f"`{name}`", *(texts.get((name, column), MISSING) for column in columns)]
        for name in runs["loss"].unique()
    ]
    return markdown(["loss", *(f"lag {lag}, lr {rate:g}" for lag, rate in columns)], rows)


def largest_stable_rate(runs: pd.DataFrame) -> float:
    """Return the largest rate up to which all seeds of one loss and lag are stable; 0 if the smallest is not."""
    largest = 0.0
    for rate, group in runs.groupby("lr"):
        if (group["outcome"] != "stable").any():
            break
        largest = rate
    return largest


def line_table(runs: pd.DataFrame) -> list[str]:
    """Return the table of the largest stable rate for each loss and lag, and of its product with the lag."""
    rows, highest = [], runs["lr"].max()
    lags = sorted(lag for lag in runs["lag"].unique() if lag)
    for name, of_loss in runs.groupby("loss", sort=False):
        cells = []
        for lag in lags:
            group = of_loss[of_loss["lag"] == lag]
            rate = largest_stable_rate(group) if len(group) else None
            sign = "≥ " if rate == highest else ""
            cells.append(
                MISSING if rate is None else f"{sign}{rate:g}, lag · lr {sign}{rate * lag:g}"
            )
        rows.append([f"`{name}`", *cells])
    return markdown(["loss", *(f"lag {lag}" for lag in lags)], rows)


def page(runs: pd.DataFrame) -> list[str]:
    """Return the lines of stability.md."""
    return [
        "**Outcome.** Collapsed seeds and the median step, else the level and, in brackets, the level less that of the "
        f"fresh run of the same seed and rate. *Flat*: a seed whose reward never reached {LEARNT}.",
        "",
        *outcome_table(runs),
        "",
        "**Largest rate up to which all seeds are stable.** A sign ≥ marks the largest rate that was tried. 0: the "
        "smallest is not stable.",
        "",
        *line_table(runs),
        "",
        f"n = {runs.groupby(['loss', 'lag', 'lr']).size().min()} seeds or more in each cell.",
    ]


def draw(runs: pd.DataFrame, path: Path) -> None:
    """Draw the level by learning rate. A lag has a panel, a loss a line, a run a dot, a collapse a cross."""
    lags = sorted(runs["lag"].unique())
    figure = Figure(figsize=(4 * len(lags) + 2, 4), layout="constrained")
    panels = figure.subplots(1, len(lags), sharey=True, squeeze=False)[0]
    names, rates = list(runs["loss"].unique()), sorted(runs["lr"].unique())
    for lag, panel in zip(lags, panels, strict=True):
        for number, name in enumerate(names):
            group = runs[(runs["lag"] == lag) & (runs["loss"] == name)]
            shift = 1.04 ** (number - len(names) / 2)
            colour = COLOURS[number % len(COLOURS)]
            means = group.groupby("lr")["level"].mean()
            panel.plot(means.index * shift, means, color=colour, label=name)
            for outcome, marker in (("stable", "o"), ("flat", "v"), ("collapsed", "x")):
                dots = group[group["outcome"] == outcome]
                panel.plot(dots["lr"] * shift, dots["level"], marker, color=colour, alpha=0.7)
        panel.set(title=f"lag {lag}", xlabel="learning rate", xscale="log", ylim=(-0.03, 1.03))
        panel.set_xticks(rates, [f"{rate:g}" for rate in rates])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("mean training reward of the later versions")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=100)


def main(out: Positional[Path]) -> None:
    """Write the table and the figure of a grid.

    Args:
        out: The --out of scripts/ablate.py.
    """
    runs = read_runs(out)
    lines = page(runs)
    (out / "stability.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw(runs, out / "stability.png")
    print("\n".join(lines))


if __name__ == "__main__":
    run_command(main)
