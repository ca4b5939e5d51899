"""Break runs on purpose: `python -m tests.chaos --rounds 20 --seed 0`."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos import campaign
from scripts.bench.harness import add, provenance


def main() -> None:
    """Make the rounds, and write what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="signals to send")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn, and of the runs")
    parser.add_argument(
        "--keep", type=Path, help="a new folder for the runs; else they are deleted"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="JSON lines, to which the numbers go; those of the same command are replaced",
    )
    given, began = parser.parse_args(), time.monotonic()
    made = provenance() | {"command": " ".join(["python -m tests.chaos", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as temporary:
        folder = given.keep or Path(temporary)
        result = campaign.run_rounds(folder, given.rounds, given.seed)
    if given.out:
        add(made | {"repeat": 0} | result, given.out, key=("command",))
    print(f"passed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
