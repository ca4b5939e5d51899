"""A grid of real runs: `python scripts/ablate.py --algos grpo tis --async-ratio 0 1 --publish-delay 0 4 --seeds 3`.

Every combination is one cell: one `torchrun train_async.py`, all with the same number of consumed samples. A finished
cell is one line of OUT/cells.jsonl (what was run, on what, and its curves) and is not run again, so an interrupted grid
goes on where it stopped. What follows `--` is handed to every run. Then ablation_report.py draws and tabulates. Without
options: three losses at two async ratios, 3 seeds, 18 runs of about a minute.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from config import Algo
from job.command_line import read_options
from scripts.ablation_report import read_records, report
from scripts.plot import column, evaluations, read_metrics

ROOT = Path(__file__).resolve().parent.parent

SERIES = {
    "reward": "reward/mean",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
    "step_s": "time/step_s",
    "samples": "samples",
}
"""What a cell keeps of every step: its name here and in metrics.jsonl."""
DIGITS = 5  # of every kept number
TRAIN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py")


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
    return {Cell(**record["cell"]): record for record in read_records(out)}


def run_cell(cell: Cell, extra: list[str], train: tuple[str, ...] = TRAIN) -> dict:
    """Run one cell to its end.

    Returns its record: a run that ends with an error (a loss that is not finite, say) is a result, and its record holds
    the error and the steps it made. Raises ValueError, with the error of the run, if it did not make a step.
    """
    runs = Path(tempfile.mkdtemp(prefix="ablate-"))
    options = [*cell.options(), *extra]
    command = [*train, *options, f"--runs-dir={runs}", f"--run-name={cell.name}"]
    start = time.monotonic()
    try:
        job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        record = {"cell": asdict(cell), "options": options, "seconds": round(time.monotonic() - start, 1)}
        if job.returncode:
            record["error"] = _error(job.stderr)
        return record | read_run(runs / cell.name)
    except ValueError:
        error = _error(job.stderr).strip()
        raise ValueError(f"cell {cell.name} has no metrics (exit status {job.returncode}): {error}") from None
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


def run_grid(
    cells: list[Cell], out: Path, parallel: int, extra: list[str], run: Callable[[Cell, list[str]], dict] = run_cell
) -> None:
    """Run the cells that are not finished, `parallel` at a time, and append each record as it comes."""
    missing = missing_cells(cells, read_cells(out), extra)
    print(f"{len(cells)} cells, {len(cells) - len(missing)} of them finished before", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for record in run_all(missing, parallel, lambda cell: run(cell, extra)):
        keep(record, out)


def run_all(cells: list[Cell], parallel: int, run: Callable[[Cell], dict]) -> Iterator[dict]:
    """Yield the record of each cell when it ends.

    After a ValueError no other cell is started; it is raised when those that run have ended and are yielded. Ctrl-C
    also ends the runs themselves: that is not a result of theirs, so none of them is yielded.
    """
    failures = []

    def attempt(cell: Cell) -> dict | None:
        try:
            return None if failures else run(cell)
        except ValueError as error:
            failures.append(error)

    pool = ThreadPoolExecutor(parallel)
    try:
        yield from filter(None, (future.result() for future in as_completed([pool.submit(attempt, c) for c in cells])))
    finally:
        pool.shutdown(cancel_futures=True)
    if failures:
        raise failures[0]


def missing_cells(cells: list[Cell], finished: dict[Cell, dict], extra: list[str]) -> list[Cell]:
    """The cells to run. Raises ValueError if one is finished, but with other options than `extra`."""
    for cell in cells:
        if cell in finished and finished[cell]["options"] != (options := [*cell.options(), *extra]):
            kept = " ".join(finished[cell]["options"])
            raise ValueError(f"{cell.name} was run with {kept}, not {' '.join(options)}; give another --out")
    return [cell for cell in cells if cell not in finished]


def keep(record: dict, out: Path) -> None:
    """Append a record to the finished cells, and print how it ended."""
    with open(out / "cells.jsonl", "a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")
    last = record["evaluations"][-1][1] if record["evaluations"] else float("nan")
    outcome = record.get("error", f"held-out accuracy {last:.3f}")
    print(f"{Cell(**record['cell']).name}: {outcome}, {record['seconds']:.0f} s", flush=True)


def check_extra(cells: list[Cell], extra: list[str]) -> None:
    """Refuse options that no run would accept, before the first of them starts."""
    for cell in cells:
        try:
            read_options([*cell.options(), *extra]).checked()
        except ValueError as error:
            sys.exit(f"error: cell {cell.name}: {error}")


def main() -> None:
    """Read the command line, run what is missing, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algos", nargs="+", default=["grpo", "tis", "topr"], choices=Algo.__args__, metavar="ALGO")
    parser.add_argument("--async-ratio", nargs="+", type=float, default=[0.0, 4.0], metavar="ALPHA")
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
        report(arguments.out)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
