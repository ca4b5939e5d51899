"""Tabulate runs, as Markdown on stdout: `python scripts/table.py RUN [RUN ...] [--by OPTION [OPTION ...]]`.

A row per run: its name, the options in which the runs differ, and what runs.py summarises. With --by a row per
combination of the options' values: mean ± standard deviation over the n runs that have it. If a run has not
made all its steps, a column says how many it made.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable

import pandas as pd

from asyncrl.config import nearest
from asyncrl.user_code import typed
from scripts.lines import markdown
from scripts.runs import Run, load, names, summarise

COLUMNS = {
    "accuracy_first": ("held-out accuracy, first", "{:.3f}"), "accuracy_last": ("last", "{:.3f}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"), "staleness_max": ("max", "{:.3g}"),
    "seconds_per_step": ("s per step", "{:.2f}"), "tokens_per_s": ("tokens/s", "{:.0f}"),
    "wait_share": ("trainer waited", "{:.0%}"),
}  # fmt: skip
"""Columns of the table: key of the summary, heading, format."""
MISSING = "–"


def table(runs: list[Run], by: list[str] | None = None) -> list[str]:
    """The lines of the table. Raises ValueError for an option that no run has."""
    options = [option.replace("-", "_") for option in by] if by else differing_options(runs)
    known = dict.fromkeys(name for run in runs for name in run.info["config"])
    for option in options:
        if option not in known:
            raise ValueError(f"--by {option}: run.json has no such option{nearest(option, known)}")
    frame = pd.DataFrame([summarise(run.metrics) for run in runs])
    wanted = frame["steps"].clip(lower=[run.info["config"].get("steps", 0) for run in runs])
    made = frame["steps"].astype(str) + " of " + wanted.astype(str)
    values = [[run.info["config"].get(option) for option in options] for run in runs]
    order = [tuple(map(sort_key, row)) for row in values] if by else list(range(len(runs)))
    rows, others = [], {}
    for _, group in frame.groupby(pd.Series(order)):
        alike = [runs[index] for index in group.index]
        row = {} if by else {"run": names(runs)[group.index[0]]}
        shown = map(show, values[group.index[0]])
        row |= zip((f"`{option}`" for option in options), shown, strict=True)
        row |= {"n": len(alike)} if by else {}
        row |= {"steps made": ", ".join(made[group.index].unique())}
        row |= {heading: spread(group[key], form) for key, (heading, form) in COLUMNS.items()}
        rows.append(row)
        others |= dict.fromkeys(f"`{option}`" for option in differing_options(alike))
    table = pd.DataFrame(rows)
    if (frame["steps"] == wanted).all():
        table = table.drop(columns="steps made")
    lines = markdown(table.columns, table.to_numpy())
    others.pop("`seed`", None)
    return [*lines, "", f"Runs of one row also differ in {', '.join(others)}."] if others else lines


def differing_options(runs: list[Run]) -> list[str]:
    """The options that do not have one value in all runs, but for the names of the runs."""
    options = [run.info["config"] for run in runs]
    known = dict.fromkeys(name for config in options for name in config)
    return [
        name
        for name in known
        if name not in ("run_name", "runs_dir")
        and len({show(config.get(name)) for config in options}) > 1
    ]


def show(value) -> str:
    """An option's value as the command line has it."""
    if isinstance(value, list | tuple):
        return " ".join(map(show, value)) or "none"
    if isinstance(value, str):
        return typed(value)
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return text.lower() if value is None or isinstance(value, bool) else text


def sort_key(value) -> tuple[bool, float, str]:
    """Numbers in their order, then all else in that of its text."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0.0, show(value)


def spread(values: Iterable[float | None], template: str) -> str:
    """Mean ± standard deviation in the format of one number; the number itself where all are equal."""
    measured = [value for value in values if pd.notna(value)]
    if not measured:
        return MISSING
    mean = template.format(statistics.mean(measured))
    if len(set(measured)) == 1:
        return mean
    return f"{mean} ± {template.format(statistics.stdev(measured))}"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", help="directory of a run")
    text = "options, as in run.json, whose values share a row; unset gives every run its own"
    parser.add_argument("--by", nargs="+", metavar="OPTION", help=text)
    arguments = parser.parse_args()
    try:
        print("\n".join(table([load(run) for run in arguments.runs], arguments.by)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
