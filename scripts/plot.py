"""Summarise and draw runs, also while they go on: `python scripts/plot.py RUN [RUN ...] [--out PNG]`.

Prints a table and writes a figure: reward, held-out accuracy, staleness, and the phases of a step.
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from scripts.runs import load, names, readable_summary


def main() -> None:
    """Read the command line, print, draw, and say where the records are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="directory of a run")
    parser.add_argument("--out", type=Path, help="PNG to write; unset writes curves.png into the first run")
    arguments = parser.parse_args()
    out = arguments.out or arguments.runs[0] / "curves.png"
    try:
        runs = [load(run) for run in arguments.runs]
        from scripts.figures import draw_runs  # a mistake is said before matplotlib is there

        named = dict(zip(names(runs), [run.metrics for run in runs], strict=True))
        print(pd.DataFrame({name: readable_summary(metrics) for name, metrics in named.items()}).to_string(na_rep="-"))
        draw_runs(named, out)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(*(f"run:    {run}" for run in arguments.runs), f"curves: {out}", sep="\n")


if __name__ == "__main__":
    main()
