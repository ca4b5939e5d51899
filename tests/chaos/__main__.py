"""Break runs on purpose: `python -m tests.chaos --rounds 20 --seed 0`."""

import sys
import tempfile
import time
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos import campaign
from scripts.bench.harness import add, provenance


def main(
    rounds: int = 20, seed: int = 0, keep: Path | None = None, out: Path | None = None
) -> None:
    """Break runs on purpose.

    Args:
        rounds: signals to send
        seed: of what is drawn, and of the runs
        keep: a new folder for the runs; else they are deleted
        out: JSON lines, to which the numbers go; those of the same command are replaced
    """
    began = time.monotonic()
    made = provenance() | {"command": " ".join(["python -m tests.chaos", *sys.argv[1:]])}
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as temporary:
        result = campaign.run_rounds(keep or Path(temporary), rounds, seed)
    if out:
        add(made | {"repeat": 0} | result, out, key=("command",))
    print(f"passed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    tyro.cli(main)
