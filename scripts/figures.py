"""The figures of staleness.py, as PNGs: what staleness costs each loss."""

from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure

from config import ALGOS


def draw_lags(rows: pd.DataFrame, out: Path) -> None:
    """Draw what compare of grids.py found over lag: a panel per loss, mean and interval; at lag 0 chance."""
    losses = [name for name in dict.fromkeys(rows["loss"]) if name in ALGOS]
    settings = ["lag 0", *(name for name in dict.fromkeys(rows["setting"]) if name != "lag 0")]
    figure = Figure(figsize=(10, 1.9 * -(-len(losses) // 4) + 0.6), layout="constrained")
    axes = list(figure.subplots(-(-len(losses) // 4), 4, sharex=True, sharey=True, squeeze=False).flat)
    for panel, name in zip(axes, losses, strict=False):
        of = rows.loc[(rows["loss"] == name) | (rows["setting"] == "lag 0"), ["values", "ends", "setting"]]
        for values, ends, setting in of.itertuples(index=False):
            _draw_interval(panel, values, ends, settings.index(setting))
        panel.set_title(name, fontsize="medium")
        panel.axhline(0, color="0.6", linewidth=0.8)
        panel.set_xticks(range(len(settings)), [one.removeprefix("lag ") for one in settings])
    lowest = min(min(values) for values in rows["values"])
    axes[0].set_ylim(1.3 * lowest, max(0.05, -0.15 * lowest))  # a wide interval of few seeds may go beyond
    for panel in axes[len(losses) :]:
        panel.set_visible(False)
    figure.supxlabel("lag, steps", fontsize="medium")
    figure.supylabel("reward, less that on fresh data", fontsize="medium")
    figure.savefig(out, dpi=100)


def draw_order(parts: dict[str, pd.DataFrame], out: Path) -> None:
    """Draw what the greatest lag costs on each model: a row per loss in the order of the first, mean and interval."""
    first = next(iter(parts.values()))
    names = first.assign(mean=first["values"].map(fmean)).sort_values("mean")["loss"].tolist()
    figure = Figure(figsize=(5 * max(1.6, len(parts)), 4.5), layout="constrained")
    for panel, (title, rows) in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts.items(), strict=True):
        for values, ends, name in rows[["values", "ends", "loss"]].itertuples(index=False):
            _draw_interval(panel, values, ends, names.index(name), across=True)
        lowest = min(min(values) for values in rows["values"])
        panel.set(xlim=(1.3 * lowest, max(0.05, -0.3 * lowest)), yticks=range(len(names)), yticklabels=names)
        panel.set_title(title, fontsize="medium")
        panel.axvline(0, color="0.6", linewidth=0.8)
    figure.supxlabel("reward at the greatest lag, less that on fresh data", fontsize="medium")
    figure.savefig(out, dpi=100)


def _draw_interval(panel, values: list[float], ends: tuple[float, float], place: float, across: bool = False) -> None:
    """Mean, 95 % interval and seeds at one place; filled where the interval leaves zero out."""
    (low, high), mean = ends, fmean(values)
    bar, face = ([[mean - low], [high - mean]] if len(values) > 1 else None), "C0" if low > 0 or high < 0 else "white"
    x, y = ([mean], [place]) if across else ([place], [mean])
    panel.errorbar(x, y, **{"xerr" if across else "yerr": bar}, fmt="o", color="C0", mfc=face, capsize=3)
    beside = [place + 0.25] * len(values)
    panel.plot(*((values, beside) if across else (beside, values)), ".", color="0.5", markersize=4)
