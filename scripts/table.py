"""Tabulate runs, as Markdown on stdout: `python scripts/table.py RUN [RUN ...] [--by OPTION [OPTION ...]]`.

A run has a row: its name, the options that differ between the runs, and the summary of runs.py. With --by there is a
row per combination of the options' values: mean ± standard deviation over its n runs. If a run has not made all its
steps, a column has the number that it made. Such runs have separate rows.
"""

import sys
from pathlib import Path

import pandas as pd
from tyro.conf import Positional

from asyncrl.config import nearest
from scripts.lines import markdown, run_command
from scripts.runs import SUMMARY, Run, check_are_given, load, names, spread, summarise

COLUMNS = {
    key: SUMMARY[key]
    for key in (
        "accuracy_first",
        "accuracy_last",
        "staleness_mean",
        "staleness_max",
        "seconds_per_step",
        "tokens_per_s",
        "wait_share",
    )
}
"""Columns of the table that are from the summary."""


def table(runs: list[Run], by: list[str]) -> list[str]:
    """Return the lines of the table. Raises ValueError for an option that no run has."""
    configs = [run.info["config"] for run in runs]
    options = options_of(configs)
    chosen = [name.replace("-", "_") for name in by] or differing(options)
    for name in chosen:
        if name not in options:
            hint = nearest(name, list(options))
            raise ValueError(f"--by {name}: run.json has no such option{hint}")
    rows = options[chosen].rename(columns="`{}`".format)
    if not by:
        rows.insert(0, "run", names(runs))
    steps = [(run.metrics["step"].iloc[-1], run.info["config"].get("steps", 0)) for run in runs]
    if any(made < wanted for made, wanted in steps):
        rows["steps made"] = [f"{made} of {wanted}" for made, wanted in steps]
    keys = list(rows)
    rows = rows.join(pd.DataFrame([summarise(run.metrics) for run in runs]))
    if not by:
        shown = grouped(rows, keys, COLUMNS).drop(columns="n")
        return markdown(shown, shown.to_numpy())
    order = sorted(rows.index, key=lambda i: [sort_key(configs[i].get(name)) for name in chosen])
    shown = grouped(rows.loc[order], keys, COLUMNS)
    lines = markdown(shown, shown.to_numpy())
    if others := [f"`{name}`" for name in differing(options, chosen) if name != "seed"]:
        lines += ["", f"Runs of one row also differ in {', '.join(others)}."]
    return lines


def grouped(
    rows: pd.DataFrame, keys: list[str], columns: dict[str, tuple[str, str]]
) -> pd.DataFrame:
    """Return a row per combination of `keys`: the number n of its rows, and the spread of each column.

    `columns` has the heading and the format of a number by the name of a column.
    """
    groups = rows.groupby(keys, sort=False, observed=True)
    shown = {"n": groups.size()}
    for name, (heading, form) in columns.items():
        shown[heading] = groups[name].agg(spread, form)
    return pd.DataFrame(shown).reset_index()


def options_of(configs: list[dict]) -> pd.DataFrame:
    """Return a row per run and a column per option, as text, but for the names of the runs."""
    known = dict.fromkeys(name for config in configs for name in config)
    columns = {name: [show(config.get(name)) for config in configs] for name in known}
    return pd.DataFrame(columns).drop(columns=["run_name", "runs_dir"], errors="ignore")


def differing(options: pd.DataFrame, by: list[str] | None = None) -> list[str]:
    """Return the options that have several values, or several in rows that agree in `by`."""
    counts = options.groupby(by).nunique() if by else options.nunique().to_frame().T
    return [name for name in counts if counts[name].max() > 1]


def show(value: object) -> str:
    """Return an option's value as the command line has it."""
    if isinstance(value, list | tuple):
        return " ".join(map(show, value)) or "none"
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return text.lower() if value is None or isinstance(value, bool) else text


def sort_key(value: object) -> tuple[bool, float, str]:
    """Return what sorts numbers in their order, then all else in that of its text."""
    is_number = isinstance(value, int | float)
    return not is_number, value if is_number else 0.0, show(value)


def has_steps(run: str) -> bool:
    """Return whether a run has finished a step. It is also True of a path without a run, and `load` refuses it."""
    metrics = Path(run) / "metrics.jsonl"
    return not metrics.exists() or metrics.stat().st_size > 0


def main(runs: Positional[list[str]], by: tuple[str, ...] = ()) -> None:
    """Tabulate runs, as Markdown on stdout.

    Args:
        runs: Directories of runs, or logs of nano_async.py.
        by: Options, as in run.json, whose values share a row; unset gives every run its own.
    """
    check_are_given(runs)
    finished = [run for run in runs if has_steps(run)]
    for run in sorted(set(runs) - set(finished)) if finished else ():
        print(f"{run} has not finished a step: passed over", file=sys.stderr)
    print("\n".join(table([load(run) for run in finished or runs], by)))


if __name__ == "__main__":
    run_command(main)
