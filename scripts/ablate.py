"""A grid of real runs: `python scripts/ablate.py --algos grpo tis --async-ratio 0 1 --publish-delay 0 4 --seeds 3`.

Every combination is one cell: one `torchrun train_async.py`, all with the same number of consumed samples. A finished
cell is one line of OUT/cells.jsonl (what was run, on what, and its curves) and is not run again, so an interrupted grid
goes on where it stopped. What follows `--` is handed to every run. Then ablation_report.py draws and tabulates.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from plot import column, evaluations, read_metrics  # noqa: E402

from config import Algo, Config  # noqa: E402

SERIES = {
    "reward": "reward/mean",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "step_s": "time/step_s",
    "samples": "samples",
}
"""What a cell keeps of every step: its name here and in metrics.jsonl."""
DIGITS = 5  # of every kept number


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    algo: str
    async_ratio: float
    publish_delay: int
    seed: int

    @property
    def name(self) -> str:
        """Directory name of its run."""
        return f"{self.algo}-a{self.async_ratio:g}-k{self.publish_delay}-s{self.seed}"

    def options(self) -> list[str]:
        """Its command-line options."""
        return [f"--{key.replace('_', '-')}={value}" for key, value in asdict(self).items()]


def grid(algos: list[str], async_ratios: list[float], publish_delays: list[int], seeds: int) -> list[Cell]:
    """All cells, seeds outermost: a grid that is stopped early has whole seeds, and a busy hour falls on all alike."""
    combinations = itertools.product(range(seeds), publish_delays, async_ratios, algos)
    return [Cell(algo, ratio, delay, seed) for seed, delay, ratio, algo in combinations]


def read_cells(out: Path) -> dict[Cell, dict]:
    """The finished cells of a grid and their records."""
    path = out / "cells.jsonl"
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {Cell(**record["cell"]): record for record in records}


def run_cell(cell: Cell, extra: list[str]) -> dict:
    """Run one cell to its end.

    Returns its record: a run that ends with an error (a loss that is not finite, say) is a result, and its record holds
    the error and the steps it made.
    """
    runs = Path(tempfile.mkdtemp(prefix="ablate-"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py"]
    options = [*cell.options(), *extra]
    start = time.monotonic()
    try:
        job = subprocess.run(
            [*command, *options, f"--runs-dir={runs}", f"--run-name={cell.name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        record = {"cell": asdict(cell), "options": options, "seconds": round(time.monotonic() - start, 1)}
        if job.returncode:
            record["error"] = _error(job.stderr)
        return record | read_run(runs / cell.name)
    finally:
        shutil.rmtree(runs)


def read_run(run: Path) -> dict:
    """What a cell keeps of its run directory. Raises ValueError if the run did not make a step."""
    metrics = read_metrics(run)
    header = json.loads((run / "run.json").read_text(encoding="utf-8"))
    kept = {key: header[key] for key in ("git_commit", "hardware", "packages")}
    kept["git_dirty"] = bool(header["git_diff"])
    series = {name: [round(value, DIGITS) for value in column(metrics, key)] for name, key in SERIES.items()}
    return kept | {"evaluations": evaluations(metrics), "series": series}


def _error(stderr: str) -> str:
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    return lines[0] if lines else stderr[-500:]


def run_grid(cells: list[Cell], out: Path, parallel: int, extra: list[str]) -> None:
    """Run the cells that are not finished, `parallel` at a time, and append each record as it comes."""
    finished = read_cells(out)
    missing = [cell for cell in cells if cell not in finished]
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    lock = Lock()

    def run(cell: Cell) -> None:
        record = run_cell(cell, extra)
        with lock, open(out / "cells.jsonl", "a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        last = record["evaluations"][-1][1] if record["evaluations"] else float("nan")
        outcome = record.get("error", f"held-out accuracy {last:.3f}")
        print(f"{cell.name}: {outcome}, {record['seconds']:.0f} s", flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        for future in [pool.submit(run, cell) for cell in missing]:
            future.result()


def check_extra(cells: list[Cell], extra: list[str]) -> None:
    """Refuse options that no run would accept, before the first of them starts."""
    import tyro

    for cell in cells:
        try:
            tyro.cli(Config, args=[*cell.options(), *extra], config=(tyro.conf.FlagConversionOff,)).checked()
        except ValueError as error:
            sys.exit(f"error: cell {cell.name}: {error}")


def main() -> None:
    """Read the command line, run what is missing, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algos", nargs="+", default=["grpo"], choices=Algo.__args__, metavar="ALGO")
    parser.add_argument("--async-ratio", nargs="+", type=float, default=[0.0], metavar="ALPHA")
    parser.add_argument("--publish-delay", nargs="+", type=int, default=[0], metavar="K")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 … N − 1")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "ablation", help="where cells.jsonl is kept")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="runs at a time; above 1, times mean less")
    parser.add_argument("extra", nargs="*", metavar="-- --option=value", help="options of every run")
    arguments = parser.parse_args()
    cells = grid(arguments.algos, arguments.async_ratio, arguments.publish_delay, arguments.seeds)
    check_extra(cells, arguments.extra)
    try:
        run_grid(cells, arguments.out, arguments.parallel, arguments.extra)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
