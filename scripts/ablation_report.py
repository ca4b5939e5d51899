"""Tabulate and draw a grid of runs: `python scripts/ablation_report.py OUT`, OUT the directory of ablate.py's cells.

Reads OUT/cells.jsonl and writes beside it cells.csv (a row per run), table.md (final held-out accuracy, losses ×
settings), curves.png (held-out accuracy over samples), wallclock.png (reward over time in steps) and staleness.png
(final accuracy and reward over the staleness that the runs really had). A setting is a pair of async_ratio and
publish_delay. A run that ended with an error counts as failed, and in no mean.
"""

import argparse
import csv
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from config import Algo

Setting = tuple[float, int]
"""(async_ratio, publish_delay in steps)."""
Curve = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Step, x and y of the points of one run, `[P] float64` each, steps increasing."""

COLUMNS = (
    "algo", "async_ratio", "publish_delay", "seed", "steps", "samples", "final_accuracy", "best_accuracy",
    "final_reward", "staleness_mean", "staleness_max", "seconds", "error",
)  # fmt: skip
"""Columns of cells.csv: the keys of what summarise() returns."""
COLORS = (*(f"C{index}" for index in range(10)), "black")
DASHES = ("-", "--", "-.")
MARKERS = "os^Dv<>PpX*"
MISSING = "–"
PANEL_INCHES = (4.0, 3.6)
DPI = 100
LEGEND_COLUMNS = 6


def read_records(out: Path) -> list[dict]:
    """The records of OUT/cells.jsonl, the last one of each cell; none if there is no such file.

    Raises ValueError, naming the line, if one is broken.
    """
    path = out / "cells.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = {}
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            records[tuple(record["cell"].items())] = record
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            where = f"{path}, line {number} of {len(lines)}"
            what = f"is not a cell ({type(error).__name__}: {error})"
            raise ValueError(f"{where} {what}; delete the line and ablate.py runs its cell again") from None
    return list(records.values())


def summarise(record: dict) -> dict:
    """Reduce a run to COLUMNS; None where nothing was measured.

    Rewards are of the last tenth of the steps, staleness (steps) is the mean over the last half of them, when a publish
    delay has run in; seconds are those spent in steps.
    """
    series = record["series"]
    accuracies = [accuracy for _, accuracy in record["evaluations"]]
    return record["cell"] | {
        "steps": len(series["reward"]),
        "samples": series["samples"][-1],
        "final_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "final_reward": statistics.fmean(series["reward"][-_tenth(series["reward"]) :]),
        "staleness_mean": statistics.fmean(series["staleness_mean"][len(series["staleness_mean"]) // 2 :]),
        "staleness_max": max(series["staleness_max"]),
        "seconds": sum(series["step_s"]),
        "error": " ".join(record.get("error", "").split()) or None,
    }


def _tenth(values: list) -> int:
    return max(1, len(values) // 10)


def setting(cell: dict) -> Setting:
    """The setting of a record's cell or of a row."""
    return cell["async_ratio"], cell["publish_delay"]


def settings(rows: list[dict]) -> list[Setting]:
    """All settings that occur, in order."""
    return sorted({setting(row) for row in rows})


def algos(rows: list[dict]) -> list[str]:
    """All losses that occur, in the order of config.py; names that it does not know are last."""
    known = list(Algo.__args__)
    return sorted({row["algo"] for row in rows}, key=lambda algo: (known.index(algo) if algo in known else 99, algo))


def write_csv(rows: list[dict], path: Path) -> None:
    """Write one line per run, losses in order."""
    order = algos(rows)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: (setting(row), order.index(row["algo"]), row["seed"])):
            writer.writerow({key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()})


def initial_accuracies(records: list[dict]) -> list[float]:
    """Held-out accuracy of version 0, one per seed: the losses share it, so they are averaged before."""
    by_seed: dict[int, list[float]] = {}
    for record in records:
        of_start = [accuracy for version, accuracy in record["evaluations"] if version == 0]
        by_seed.setdefault(record["cell"]["seed"], []).extend(of_start)
    return [statistics.fmean(values) for values in by_seed.values() if values]


def final_accuracies(rows: list[dict]) -> list[float]:
    """The last held-out accuracy of every run that came to its end."""
    return [row["final_accuracy"] for row in rows if not row["error"] and row["final_accuracy"] is not None]


def table(records: list[dict]) -> str:
    """The Markdown table of final held-out accuracies, and a caption below it."""
    rows = [summarise(record) for record in records]
    columns = settings(rows)
    starts = [initial_accuracies([r for r in records if setting(r["cell"]) == column]) for column in columns]
    chosen = {algo: [_of(rows, algo, column) for column in columns] for algo in algos(rows)}
    counts = {len(runs) for line in chosen.values() for runs in line if runs}
    show_n = len(counts) > 1
    body = [["before training", *(_mean(values, show_n) or MISSING for values in starts)]]
    body += [[f"`{algo}`", *(_cell(runs, show_n) for runs in line)] for algo, line in chosen.items()]
    head = ["", *(f"`async_ratio` {ratio:g}, `publish_delay` {delay}" for ratio, delay in columns)]
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_caption(rows, counts)}\n"


def _of(rows: list[dict], algo: str, column: Setting) -> list[dict]:
    return [row for row in rows if row["algo"] == algo and setting(row) == column]


def _cell(runs: list[dict], show_n: bool) -> str:
    num_failed = sum(bool(run["error"]) for run in runs)
    failed = f"failed {num_failed}/{len(runs)}" if num_failed else ""
    return ", ".join(filter(None, [_mean(final_accuracies(runs), show_n), failed])) or MISSING


def _mean(values: list[float], show_n: bool) -> str:
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}" + f", n = {len(values)}" * show_n


def _caption(rows: list[dict], counts: set[int]) -> str:
    samples = sorted({row["samples"] for row in rows if not row["error"]})
    trained = " to ".join(str(count) for count in dict.fromkeys([*samples[:1], *samples[-1:]])) or MISSING
    n = f"n = {max(counts)} seed{'s' * (max(counts) > 1)}" if len(counts) == 1 else "the n seeds given in each cell"
    of = f"mean ± standard deviation over {n}" if max(counts) > 1 else n
    failed = "; failed k/m: k of m runs ended with an error, the mean is of the others"
    any_failed = any(row["error"] for row in rows)
    return (
        f"Final held-out accuracy, {of}{failed if any_failed else ''}. Samples trained on, per run: {trained}. "
        "`publish_delay` is in steps."
    )


def accuracy_over_samples(record: dict) -> Curve:
    """Held-out accuracy over the samples that its version had been trained on."""
    samples = [0, *record["series"]["samples"]]
    points = {version: accuracy for version, accuracy in record["evaluations"] if version < len(samples)}
    versions = np.array(sorted(points), int)
    return versions.astype(float), np.array(samples, float)[versions], np.array([points[v] for v in versions], float)


def reward_over_seconds(record: dict) -> Curve:
    """Mean reward of the last tenth of the run's steps, trailing, over the seconds spent in steps."""
    rewards = record["series"]["reward"]
    window = _tenth(rewards)
    smooth = np.convolve(rewards, np.full(window, 1 / window), mode="valid")
    steps = np.arange(window, len(rewards) + 1, dtype=float)
    return steps, np.cumsum(record["series"]["step_s"])[window - 1 :], smooth


def average(curves: list[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean x, and mean, minimum and maximum of y at every step, `[P] float64` each, over the runs that reached it.

    Runs need not have points at the same steps: between its own a run is interpolated.
    """
    steps = np.unique(np.concatenate([curve[0] for curve in curves]))
    x, y = (
        np.array([np.interp(steps, curve[0], curve[axis], left=np.nan, right=np.nan) for curve in curves])
        for axis in (1, 2)
    )
    return np.nanmean(x, axis=0), np.nanmean(y, axis=0), np.nanmin(y, axis=0), np.nanmax(y, axis=0)


def style(algo: str, names: list[str]) -> dict:
    """Colour, dash and marker of a loss, the same in every figure."""
    known = list(Algo.__args__)
    index = known.index(algo) if algo in known else len(known) + names.index(algo)
    return {
        "color": COLORS[index % len(COLORS)],
        "linestyle": DASHES[index % 3],
        "marker": MARKERS[index % len(MARKERS)],
    }


def draw_panels(records: list[dict], curve: Callable[[dict], Curve], labels: tuple[str, str], out: Path) -> None:
    """Write a figure with one panel per setting, three in a row, and in it one line per loss."""
    columns = settings([record["cell"] for record in records])
    names = algos([record["cell"] for record in records])
    num_rows, num_columns = -(-len(columns) // 3), min(3, len(columns))
    figure = _figure(max(2, num_columns), num_rows)
    panels = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False).flat
    for panel, column in itertools.zip_longest(panels, columns):
        if column is None:
            panel.set_visible(False)
            continue
        for algo in names:
            runs = [r for r in records if r["cell"]["algo"] == algo and setting(r["cell"]) == column]
            _draw_runs(panel, runs, curve, style(algo, names))
        panel.set(title=f"async_ratio {column[0]:g}, publish_delay {column[1]}", xlabel=labels[0])
        panel.tick_params(labelbottom=True, labelleft=True)
        panel.grid(alpha=0.3)
    figure.supylabel(labels[1], fontsize="medium")
    _save(figure, names, _notes(records), out)


def _notes(records: list[dict]) -> str:
    notes = []
    if len({record["cell"]["seed"] for record in records}) > 1:
        notes.append("line: mean over seeds; band: minimum to maximum")
    if any(record.get("error") for record in records):
        notes.append("thin, up to ×: a run that ended with an error")
    return "; ".join(notes)


def _draw_runs(panel, runs: list[dict], curve: Callable[[dict], Curve], look: dict) -> None:
    curves = [(bool(run.get("error")), curve(run)) for run in runs]
    for _, x, y in (points for failed, points in curves if failed and len(points[0])):
        panel.plot(x, y, linewidth=0.8, **look | {"marker": ""})
        panel.plot(x[-1:], y[-1:], "x", color=look["color"], markersize=8)
    finished = [points for failed, points in curves if not failed and len(points[0])]
    if not finished:
        return
    x, mean, low, high = average(finished)
    panel.plot(x, mean, **look if len(x) <= 20 else look | {"marker": ""}, markersize=4, linewidth=1.4)
    if len(finished) > 1:
        panel.fill_between(x, low, high, color=look["color"], alpha=0.12, linewidth=0)


def draw_staleness(rows: list[dict], out: Path) -> None:
    """Write final held-out accuracy and final reward over realised staleness, in steps, one line per loss."""
    names = algos(rows)
    rows = [row for row in rows if not row["error"]]
    labels = {"final_accuracy": "final held-out accuracy", "final_reward": "reward, last tenth of the steps"}
    figure = _figure(3, 1.4)
    panels = figure.subplots(1, len(labels), sharex=True)
    for panel, (measured, label) in zip(panels, labels.items(), strict=True):
        _draw_measured(panel, [row for row in rows if row[measured] is not None], measured, names)
        panel.set(xlabel="realised staleness, mean over the last half of the steps, steps", ylabel=label)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    seeds = ["mean and standard deviation over seeds"] * (len({row["seed"] for row in rows}) > 1)
    moved = ["losses are moved sideways, apart from each other"] * (len(names) > 1)
    _save(figure, names, "; ".join(seeds + moved), out)


def _draw_measured(panel, rows: list[dict], measured: str, names: list[str]) -> None:
    shift = _shift([row["staleness_mean"] for row in rows], len(names))
    for algo in algos(rows):
        offset = shift * (names.index(algo) - (len(names) - 1) / 2)
        points = sorted(_point(_of(rows, algo, column), measured) for column in settings(_by(rows, algo)))
        x, y, spread = zip(*points, strict=True)
        panel.errorbar(np.add(x, offset), y, spread, **style(algo, names), markersize=5, linewidth=1.2, capsize=2)


def _by(rows: list[dict], algo: str) -> list[dict]:
    return [row for row in rows if row["algo"] == algo]


def _point(runs: list[dict], measured: str) -> tuple[float, float, float]:
    """Mean staleness, mean of the measured value and its standard deviation, over seeds."""
    values = [run[measured] for run in runs]
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return statistics.fmean(run["staleness_mean"] for run in runs), statistics.fmean(values), spread


def _shift(staleness: list[float], num_algos: int) -> float:
    """Steps between neighbouring losses: together 8 % of the range."""
    width = max(staleness, default=0) - min(staleness, default=0) or 1.0
    return 0.08 * width / max(1, num_algos - 1)


def _figure(num_columns: int, num_rows: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (PANEL_INCHES[0] * num_columns, PANEL_INCHES[1] * num_rows + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure, names: list[str], notes: str, out: Path) -> None:
    """Add the notes and the legend of all losses below the panels, and write the PNG."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], label=algo, markersize=5, **style(algo, names)) for algo in names]
    place = {"loc": "outside lower center", "ncols": LEGEND_COLUMNS, "handlelength": 3.5}
    figure.legend(handles=lines, title=notes or None, **place)
    figure.savefig(out, dpi=DPI)


def report(out: Path) -> None:
    """Write the table and the figures of a grid, print the table and where everything is.

    Raises ValueError if no cell is finished.
    """
    records = read_records(out)
    if not records:
        raise ValueError(f"{out / 'cells.jsonl'} has no finished cell; scripts/ablate.py --out {out} makes it")
    rows = [summarise(record) for record in records]
    write_csv(rows, out / "cells.csv")
    text = table(records)
    (out / "table.md").write_text(text, encoding="utf-8")
    draw_panels(records, accuracy_over_samples, ("samples trained on", "held-out accuracy"), out / "curves.png")
    reward = "reward, mean of the last tenth of the steps"
    draw_panels(records, reward_over_seconds, ("time in steps, s", reward), out / "wallclock.png")
    draw_staleness(rows, out / "staleness.png")
    print(text)
    for name in ("cells.jsonl", "cells.csv", "table.md", "curves.png", "wallclock.png", "staleness.png"):
        print(out / name)


def main() -> None:
    """Read the command line and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", metavar="OUT", type=Path, help="directory of a grid, where cells.jsonl is")
    try:
        report(parser.parse_args().out)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
