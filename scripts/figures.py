"""The figures of plot.py and ablate.py, as PNGs: panels of curves, a line per run or loss, and what staleness costs."""

from pathlib import Path
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from config import ALGOS
from scripts.runs import evaluations, progress

Panels = dict[str, dict[str, list[tuple[pd.DataFrame, bool]]]]
"""Title of a panel → name of a line → curves of its runs, and whether each failed. A curve has columns x and y."""


def draw_runs(runs: dict[str, pd.DataFrame], out: Path) -> None:
    """Draw the metrics of runs, a line per run."""
    panels: Panels = {}
    for name, metrics in runs.items():
        reached, steps, window = progress(metrics), metrics["step"], max(1, len(metrics) // 20)
        of_run = {
            f"reward, over {label}": pd.DataFrame({"x": reached[x][steps].to_numpy(), "y": metrics["reward/mean"]})
            for x, label in (("samples", "samples"), ("seconds", "time in steps, s"))
        }
        of_run["held-out accuracy, over samples"] = accuracy_over_samples(metrics)
        for column, title in (("mean", "mean staleness of a batch"), ("max", "greatest staleness in a batch")):
            of_run[f"{title}, steps, over steps"] = pd.DataFrame({"x": steps, "y": metrics[f"staleness/{column}"]})
        for phase in ("step", "wait", "train", "publish"):
            smooth = metrics[f"time/{phase}_s"].rolling(window, min_periods=1, center=True).mean()
            title = f"{phase}, s, mean of a twentieth of the steps"
            of_run[title] = pd.DataFrame({"x": steps, "y": smooth})
        for title, curve in of_run.items():
            panels.setdefault(title, {})[name] = [(curve.astype(float), False)]
    draw_panels(panels, ("", ""), "", out, share=False)


def accuracy_over_samples(metrics: pd.DataFrame) -> pd.DataFrame:
    """Held-out accuracy over the samples that its version had been trained on, a row per version."""
    accuracy = evaluations(metrics).groupby(level=0).last()
    return pd.DataFrame({"x": progress(metrics)["samples"], "y": accuracy}).dropna()


def average(curves: list[pd.DataFrame]) -> pd.DataFrame:
    """Mean x, and mean, low and high y at every step, over the runs that reached it.

    Runs need not have points at the same steps: between its own a run is interpolated.
    """
    steps = sorted(set().union(*(curve.index for curve in curves)))
    wide = [curve.reindex(steps).interpolate(method="index", limit_area="inside") for curve in curves]
    at_step = pd.concat(wide).groupby(level=0)
    y = at_step["y"].agg(["mean", "min", "max"])
    return y.set_axis(["mean", "low", "high"], axis=1).assign(x=at_step["x"].mean())


def looks(names: list[str]) -> dict[str, dict]:
    """Colour, dash and marker of each loss, the same in every figure, or of other lines; no two are alike."""
    losses = ALGOS if set(names) & set(ALGOS) else ()
    known = list(dict.fromkeys([*losses, *names]))
    colors = [*(f"C{index}" for index in range(10)), "black"]
    return {
        name: {"color": colors[i % 11], "linestyle": ("-", "--", "-.")[i % 3], "marker": "os^Dv<>PpX*"[i % 11]}
        for name, i in ((name, known.index(name)) for name in names)
    }


def draw_panels(panels: Panels, labels: tuple[str, str], notes: str, out: Path, share: bool = True) -> None:
    """Draw panels, three in a row, all with the same axes if they `share` them; the labels are of x and of y."""
    num_columns, num_rows = min(3, len(panels)), -(-len(panels) // 3)
    figure = Figure(figsize=(4.0 * max(2, num_columns), 3.6 * num_rows + 1.2), layout="constrained")
    axes = list(figure.subplots(num_rows, num_columns, sharex=share, sharey=share, squeeze=False).flat)
    look = looks(list(dict.fromkeys(name for lines in panels.values() for name in lines)))
    for panel, (title, lines) in zip(axes, panels.items(), strict=False):
        for name, runs in lines.items():
            _draw_line(panel, [run for run in runs if len(run[0])], look[name])
        panel.set_title(title, fontsize="medium")
        panel.set_xlabel(labels[0])
        panel.tick_params(labelbottom=True, labelleft=True)
        panel.grid(alpha=0.3)
    for panel in axes[len(panels) :]:
        panel.set_visible(False)
    figure.supylabel(labels[1], fontsize="medium")
    key = [Line2D([], [], label=name, markersize=5, **one) for name, one in look.items()]
    place = {"loc": "outside lower center", "ncols": 2 * max(2, num_columns), "handlelength": 3.5}
    figure.legend(handles=key, title=notes or None, **place)
    figure.savefig(out, dpi=100)


def _draw_line(panel, runs: list[tuple[pd.DataFrame, bool]], look: dict) -> None:
    for curve in (curve for curve, failed in runs if failed):
        panel.plot(curve["x"], curve["y"], linewidth=0.8, **look | {"marker": ""})
        panel.plot(curve["x"].iloc[-1:], curve["y"].iloc[-1:], "x", color=look["color"], markersize=8)
    finished = [curve for curve, failed in runs if not failed]
    if finished:
        line = average(finished).sort_values("x")
        marker = look["marker"] if len(line) <= 20 else ""
        panel.plot(line["x"], line["mean"], **look | {"marker": marker}, markersize=4, linewidth=1.4)
    if len(finished) > 1 and len(line) > 5:
        panel.fill_between(line["x"], line["low"], line["high"], color=look["color"], alpha=0.12, linewidth=0)
    elif len(finished) > 1:
        bars = line["mean"] - line["low"], line["high"] - line["mean"]
        panel.errorbar(line["x"], line["mean"], bars, fmt="none", ecolor=look["color"], capsize=2, linewidth=1.2)


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
