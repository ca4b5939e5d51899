"""Break runs on purpose: `python -m tests.chaos --rounds 20 --seed 0`, or `--faults` for what no signal does."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos import campaign, default_job, faults, rewards
from scripts.bench.harness import add, provenance


def main() -> None:
    """Make the rounds, or the faults, and write what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="signals to send")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn, and of the runs")
    parser.add_argument(
        "--faults",
        action="store_true",
        help="make each of the other faults once, instead of rounds",
    )
    parser.add_argument(
        "--rewards", action="store_true", help="measure what answers that hang cost, instead"
    )
    parser.add_argument(
        "--job", action="store_true", help="kill and resume the default job five times, instead"
    )
    parser.add_argument(
        "--cost", type=int, metavar="PAIRS", help="measure what checkpoints cost, instead"
    )
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
        if given.faults:
            result = {"faults": faults.run_all(folder)}
        elif given.rewards:
            result = {"rewards": rewards.measure()}
        elif given.job:
            result = default_job.compare(folder, given.seed)
        elif given.cost:
            result = {"cost": default_job.measure_cost(folder, given.cost)}
        else:
            result = campaign.run_rounds(folder, given.rounds, given.seed)
    if given.out:
        add(made | {"repeat": 0} | result, given.out, key=("command",))
    print(f"passed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
