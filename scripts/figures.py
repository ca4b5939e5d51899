"""The figures of staleness.py, as PNGs: what staleness costs each loss."""

from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from algos import LOSSES


def draw_lags(rows: pd.DataFrame, out: Path) -> None:
    """Draw what compare of grids.py found over lag: a panel per loss, mean and interval."""
    losses = [name for name in dict.fromkeys(rows["loss"]) if name in LOSSES]
    settings = list(dict.fromkeys(rows["setting"]))
    figure = Figure(figsize=(10, 1.9 * -(-len(losses) // 4) + 0.6), layout="constrained")
    axes = list(
        figure.subplots(-(-len(losses) // 4), 4, sharex=True, sharey=True, squeeze=False).flat
    )
    for panel, name in zip(axes, losses, strict=False):
        for row in rows[rows["loss"] == name].to_dict("records"):
            _draw_interval(panel, row, settings.index(row["setting"]))
        panel.set_title(name, fontsize="medium")
        panel.axhline(0, color="0.6", linewidth=0.8)
        panel.set_xticks(range(len(settings)), [one.removeprefix("lag ") for one in settings])
    for panel in axes[len(losses) :]:
        panel.set_visible(False)
    figure.supxlabel("lag, steps", fontsize="medium")
    figure.supylabel("level, lagged − fresh", fontsize="medium")
    figure.savefig(out, dpi=100)


def draw_order(parts: dict[str, pd.DataFrame], out: Path) -> None:
    """Draw what the greatest lag costs on each model: a row per loss, the least cost on top, mean and interval."""
    figure = Figure(figsize=(5 * max(1.6, len(parts)), 4.5), layout="constrained")
    for panel, (title, rows) in zip(
        figure.subplots(1, len(parts), squeeze=False)[0], parts.items(), strict=True
    ):
        ordered = rows.assign(mean=rows["values"].map(fmean)).sort_values("mean").to_dict("records")
        names = [row["loss"] for row in ordered]
        for place, row in enumerate(ordered):
            _draw_interval(panel, row, place, across=True)
        panel.set(yticks=range(len(names)), yticklabels=names)
        panel.set_title(title, fontsize="medium")
        panel.axvline(0, color="0.6", linewidth=0.8)
    figure.supxlabel("level at the greatest lag, lagged − fresh", fontsize="medium")
    figure.savefig(out, dpi=100)


def _draw_interval(panel, row: dict, place: float, across: bool = False) -> None:
    """Mean, 95 % interval and seeds of a row of compare at one place; filled if it stays after Holm's correction."""
    (low, high), values = row["ends"], row["values"]
    mean, face = fmean(values), "C0" if row["stays"] else "white"
    bar = [[mean - low], [high - mean]] if len(values) > 1 else None
    x, y = ([mean], [place]) if across else ([place], [mean])
    panel.errorbar(
        x, y, **{"xerr" if across else "yerr": bar}, fmt="o", color="C0", mfc=face, capsize=3
    )
    beside = [place + 0.25] * len(values)
    panel.plot(*((values, beside) if across else (beside, values)), ".", color="0.5", markersize=4)
