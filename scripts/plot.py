"""Summarise and draw runs: `python scripts/plot.py RUN [RUN ...] [--out PNG]`, RUN a directory with metrics.jsonl.

Prints a table and writes a figure: reward and held-out accuracy over samples and over time, staleness and the phases of
a step over steps. Reads nothing but metrics.jsonl, so it also works on a run that is still going.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

Metrics = list[dict]
"""The lines of one metrics.jsonl, one per step."""

PHASES = {"wait": "-", "train": "--", "publish": ":"}
"""Phases of a step, as in `time/wait_s`, and their line styles."""
TABLE = {
    "steps": ("steps", "{}"),
    "samples": ("samples", "{}"),
    "seconds": ("time in steps, s", "{:.1f}"),
    "reward_first": ("reward, first tenth of the steps", "{:.3f}"),
    "reward_last": ("reward, last tenth", "{:.3f}"),
    "accuracy_first": ("held-out accuracy, first", "{:.3f}"),
    "accuracy_last": ("held-out accuracy, last", "{:.3f}"),
    "staleness_mean": ("staleness, mean, steps", "{:.2f}"),
    "staleness_max": ("staleness, max, steps", "{}"),
    "tokens_per_s": ("generated tokens/s", "{:.0f}"),
    "wait_share": ("share of time the trainer waited", "{:.1%}"),
}
"""Rows of the table: key of the summary, label, format."""


def read_metrics(run: Path) -> Metrics:
    """Return the metrics of a run directory.

    Raises ValueError if they are missing, empty or broken.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"{path} does not exist; give the directory of a run, as in runs/NAME")
    lines = path.read_text(encoding="utf-8").splitlines()
    if not lines:
        raise ValueError(f"{path} is empty: the run has not finished a step; worker_*.log beside it may say why")
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} of {len(lines)} is not JSON: {error}") from None
    return metrics


def summarise(metrics: Metrics) -> dict[str, float | None]:
    """Reduce a run to the numbers of TABLE; None where nothing was measured.

    Rewards are means over the first and the last tenth of the steps, at least one; accuracies are those of the oldest
    and the newest version evaluated; staleness/mean is averaged over steps, as all have as many samples.
    """
    rewards = column(metrics, "reward/mean")
    tenth = max(1, len(rewards) // 10)
    seconds = sum(column(metrics, "time/step_s"))
    accuracies = [accuracy for _, accuracy in evaluations(metrics)] or [None]
    return {
        "steps": metrics[-1]["step"],
        "samples": metrics[-1]["samples"],
        "seconds": seconds,
        "reward_first": mean(rewards[:tenth]),
        "reward_last": mean(rewards[-tenth:]),
        "accuracy_first": accuracies[0],
        "accuracy_last": accuracies[-1],
        "staleness_mean": mean(column(metrics, "staleness/mean")),
        "staleness_max": max(column(metrics, "staleness/max")),
        "tokens_per_s": metrics[-1]["tokens/generated"] / seconds,
        "wait_share": sum(column(metrics, "time/wait_s")) / seconds,
    }


def column(metrics: Metrics, name: str) -> list[float]:
    """One metric of every step."""
    return [line[name] for line in metrics]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def evaluations(metrics: Metrics) -> list[tuple[int, float]]:
    """(policy version, accuracy) of every evaluation; a line may report one of an earlier version."""
    evaluated = [line for line in metrics if line.get("eval/accuracy") is not None]  # null: nothing could be scored
    return [(line["eval/policy_version"], line["eval/accuracy"]) for line in evaluated]


def samples_by_version(metrics: Metrics) -> dict[int, float]:
    """Samples trained on when each version existed; the first version is there before the first step."""
    first = metrics[0]["step"] - 1
    per_step = metrics[0]["samples"] / metrics[0]["step"]
    return {first: first * per_step} | {line["step"]: line["samples"] for line in metrics}


def seconds_by_version(metrics: Metrics) -> dict[int, float]:
    """Seconds of steps until each version existed."""
    seconds = itertools.accumulate(column(metrics, "time/step_s"), initial=0.0)
    return dict(zip([metrics[0]["step"] - 1, *column(metrics, "step")], seconds, strict=True))


def print_table(runs: dict[str, Metrics]) -> None:
    """Print the summaries, a column per run."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", *runs)
    summaries = [summarise(metrics) for metrics in runs.values()]
    for key, (label, template) in TABLE.items():
        cells = ["-" if summary[key] is None else template.format(summary[key]) for summary in summaries]
        table.add_row(label, *cells)
    Console(width=None if sys.stdout.isatty() else 60 + 40 * len(runs)).print(table)


def draw(runs: dict[str, Metrics], out: Path) -> None:
    """Write the figure as a PNG, all runs over each other, a colour per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(2, 2).flat)
    for index, metrics in enumerate(runs.values()):
        color = f"C{index % 10}"
        _draw_rewards(panels[0], metrics, samples_by_version(metrics), color)
        _draw_rewards(panels[1], metrics, seconds_by_version(metrics), color)
        _draw_staleness(panels[2], metrics, color)
        _draw_phases(panels[3], metrics, color)
    labels = [("samples", ""), ("time in steps, s", ""), ("step", "steps"), ("step", "s")]
    for panel, (x, y) in zip(panels, labels, strict=True):
        panel.set(xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
        handles, names = panel.get_legend_handles_labels()
        panel.legend(handles[: len(set(names))], names[: len(set(names))], fontsize="small")  # the first run's
    if len(runs) == 1:
        figure.suptitle(*runs)
    else:
        lines = [Line2D([], [], color=f"C{index % 10}", label=name) for index, name in enumerate(runs)]
        figure.legend(handles=lines, loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(out, dpi=120)


def _draw_rewards(panel, metrics: Metrics, x_of_version: dict[int, float], color: str) -> None:
    x = [x_of_version[step] for step in column(metrics, "step")]
    panel.plot(x, column(metrics, "reward/mean"), color=color, alpha=0.6, label="reward")
    if evaluated := [pair for pair in evaluations(metrics) if pair[0] in x_of_version]:
        x = [x_of_version[version] for version, _ in evaluated]
        panel.plot(x, [accuracy for _, accuracy in evaluated], "o--", color=color, label="held-out accuracy")


def _draw_staleness(panel, metrics: Metrics, color: str) -> None:
    steps = column(metrics, "step")
    panel.plot(steps, column(metrics, "staleness/mean"), color=color, label="staleness, mean")
    panel.plot(steps, column(metrics, "staleness/max"), ":", color=color, label="staleness, max")


def _draw_phases(panel, metrics: Metrics, color: str) -> None:
    for phase, style in PHASES.items():
        seconds = column(metrics, f"time/{phase}_s")
        panel.plot(column(metrics, "step"), seconds, style, color=color, label=phase)


def _name(run: Path, runs: list[Path]) -> str:
    """The last part of a run's path if that tells it from the others, else the path."""
    return run.name if [other.name for other in runs].count(run.name) == 1 else str(run)


def main() -> None:
    """Read the command line, print, draw, and say where the records are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directory of a run")
    parser.add_argument("--out", type=Path, help="PNG to write; unset writes curves.png into the first run")
    arguments = parser.parse_args()
    try:
        runs = {_name(run, arguments.runs): read_metrics(run) for run in arguments.runs}
    except ValueError as error:
        sys.exit(f"error: {error}")
    out = arguments.out or arguments.runs[0] / "curves.png"
    print_table(runs)
    draw(runs, out)
    for run in arguments.runs:
        print(f"run:    {run}")
    print(f"curves: {out}")


if __name__ == "__main__":
    main()
