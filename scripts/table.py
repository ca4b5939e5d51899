"""Tabulate runs by one option: `python scripts/table.py RUN [RUN ...] --by async_ratio`, as Markdown on stdout.

Each row is one value of the option: mean ± standard deviation over its n runs, of the numbers that plot.py summarises.
"""

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

from scripts.plot import read_metrics, summarise

COLUMNS = {
    "accuracy_first": ("held-out accuracy, first", "{:.3f}"),
    "accuracy_last": ("last", "{:.3f}"),
    "staleness_mean": ("staleness, mean", "{:.2f}"),
    "staleness_max": ("max", "{:.0f}"),
    "seconds_per_step": ("s per step", "{:.2f}"),
    "tokens_per_s": ("tokens/s", "{:.0f}"),
    "wait_share": ("trainer waited", "{:.0%}"),
}
"""Columns of the table: key of the summary, heading, format."""


def summarise_run(run: Path) -> dict:
    """The summary of one run, its options and its hardware."""
    summary = summarise(read_metrics(run))
    header = json.loads((run / "run.json").read_text(encoding="utf-8"))
    made_on = {"config": header["config"], "hardware": header.get("hardware")}
    return {**made_on, "seconds_per_step": summary["seconds"] / summary["steps"], **summary}


def table(summaries: list[dict], option: str) -> list[str]:
    """The lines of the whole table."""
    heading = f"| `{option}` | n | {' | '.join(heading for heading, _ in COLUMNS.values())} |"
    return [heading, "|" + "---|" * (len(COLUMNS) + 2), *rows(summaries, option)]


def rows(summaries: list[dict], option: str) -> list[str]:
    """Markdown rows, one per value of the option, in order of the values."""
    by_value = sorted(summaries, key=lambda s: s["config"][option])
    lines = []
    for value, group in itertools.groupby(by_value, key=lambda s: s["config"][option]):
        runs = list(group)
        cells = [cell([run[key] for run in runs], template) for key, (_, template) in COLUMNS.items()]
        lines.append(f"| {value:g} | {len(runs)} | {' | '.join(cells)} |")
    return lines


def cell(values: list[float], template: str) -> str:
    """Mean ± standard deviation in the format of one number; the number itself where all are equal."""
    mean = template.format(statistics.mean(values))
    if len(set(values)) == 1:
        return mean
    return f"{mean} ± {template.format(statistics.stdev(values))}"


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directory of a run")
    parser.add_argument("--by", required=True, metavar="OPTION", help="numeric option, as in run.json")
    arguments = parser.parse_args()
    try:
        summaries = [summarise_run(run) for run in arguments.runs]
    except ValueError as error:
        sys.exit(f"error: {error}")
    print("\n".join(table(summaries, arguments.by)))


if __name__ == "__main__":
    main()
