"""Tabulate runs, as Markdown on stdout: `python scripts/table.py RUN [RUN ...] [--by OPTION [OPTION ...]]`.

A row per run: its name, the options in which the runs differ, and what runs.py summarises. With --by a row per
combination of the options' values: mean ± standard deviation over the n runs that have it. If a run has not
made all its steps, a column says how many it made.
"""

import argparse
import json
import statistics
import sys

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
    for option in options:
        known = dict.fromkeys(name for run in runs for name in run.info["config"])
        if option not in known:
            raise ValueError(f"--by {option}: run.json has no such option{nearest(option, known)}")
    groups: dict[tuple, list[Run]] = {}
    for index, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        values = [run.info["config"].get(option) for option in options]
        order = tuple(map(sort_key, values)) if by else (index,)
        label = tuple(map(show, values)) if by else (name, *map(show, values))
        groups.setdefault((order, label), []).append(run)
    lines, made, is_cut, others = [], [], False, dict[str, None]()
    for (_, label), alike in sorted(groups.items(), key=lambda group: group[0]):
        summaries = [summarise(run.metrics) for run in alike]
        cells = [
            spread([one[key] for one in summaries], template)
            for key, (_, template) in COLUMNS.items()
        ]
        steps = [
            (one["steps"], run.info["config"].get("steps", 0))
            for one, run in zip(summaries, alike, strict=True)
        ]
        made.append(
            ", ".join(dict.fromkeys(f"{done} of {max(done, wanted)}" for done, wanted in steps))
        )
        is_cut |= any(done < wanted for done, wanted in steps)
        lines.append([*label, *[str(len(alike))] * bool(by), *cells])
        others |= dict.fromkeys(
            f"`{option}`" for option in differing_options(alike) if option != "seed"
        )
    head = [*["run"] * (not by), *(f"`{option}`" for option in options), *["n"] * bool(by)]
    if is_cut:
        lines = [
            [*line[: len(head)], text, *line[len(head) :]]
            for line, text in zip(lines, made, strict=True)
        ]
        head.append("steps made")
    rows = markdown([*head, *(heading for heading, _ in COLUMNS.values())], lines)
    return [
        *rows,
        *(["", f"Runs of one row also differ in {', '.join(others)}."] if others else []),
    ]


def differing_options(runs: list[Run]) -> list[str]:
    """The options that do not have one value in all runs, but for the names of the runs."""
    options = [run.info["config"] for run in runs]
    values = {name: {json.dumps(of.get(name)) for of in options} for of in options for name in of}
    return [
        name
        for name, found in values.items()
        if len(found) > 1 and name not in ("run_name", "runs_dir")
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


def spread(values: list[float | None], template: str) -> str:
    """Mean ± standard deviation in the format of one number; the number itself where all are equal."""
    measured = [value for value in values if value is not None]
    if not measured:
        return MISSING
    mean = template.format(statistics.mean(measured))
    return (
        mean
        if len(set(measured)) == 1
        else f"{mean} ± {template.format(statistics.stdev(measured))}"
    )


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
