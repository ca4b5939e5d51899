"""Advice on α and the split of devices, or on the number of remote hosts: scripts/advise.py runs/NAME.

It reads metrics.jsonl and events.jsonl of a run. The run has ended or still trains. The arithmetic is in
extras/planning/README.md.
"""

from tyro.conf import Positional

from extras.planning.advice import advice_of
from scripts.lines import run_command
from scripts.runs import load


def main(run: Positional[str]) -> None:
    """Print advice on a run.

    Args:
        run: Directory of a run with at least 8 steps.
    """
    print(advice_of(load(run)))


if __name__ == "__main__":
    run_command(main)
