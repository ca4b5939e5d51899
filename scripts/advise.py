"""Advice on α and the split of devices, or on how many remote hosts are enough: scripts/advise.py runs/NAME.

It reads metrics.jsonl and events.jsonl of a run that has ended or still trains. extras/planning/README.md explains the
arithmetic.
"""

import argparse
import sys

from extras.planning.advice import advice_of
from scripts.runs import load


def main(args: list[str] | None = None) -> None:
    """Read the command line and print the advice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", metavar="runs/NAME", help="directory of a run with at least 8 steps")
    try:
        print(advice_of(load(parser.parse_args(args).run)))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
