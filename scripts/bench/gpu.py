"""What a GPU gives, in one table: `python scripts/bench/gpu.py`, or `bash scripts/gpu_check.sh`.

Each part runs in a process of its own, within a time limit, so that one that fails or hangs leaves the other rows. A
part that no longer fits into the budget is not begun, and the table says so. A bench that is started again runs what
failed or was not begun. `--device cpu --out FOLDER` runs the same code with a tiny model and without a GPU: to see that
it runs, not to measure.
"""

import argparse
import contextlib
import functools
import json
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from asyncrl.cluster.gpus import visible_gpus
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arm, Bench, Case

BUDGET_S = 470.0
SAYS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PARTS, ROWS, RATIOS, PREDICTIONS = (
    SAYS[what] for what in ("parts", "rows", "ratios", "predictions")
)
"""What is done, and what is shown of it; gpu.toml says what is what."""
TINY_PARTS = {
    f"{kind} tiny": 200 for kind in ("sync", "trainer", "rollout", "bare", "job-sync", "job-async")
}


def run_part(part: str, limit_s: float, device: str, models: Path, deadline: float) -> dict:
    """Run a part in a process of its own, and no longer than to `deadline`. Returns its numbers, or how it failed."""
    kind, model = part.split()
    left = deadline - time.monotonic()
    gpu = gpu_name() if device == "cuda" else None
    record = {"kind": kind, "model": model, "gpu": gpu, "seconds": 0.0}
    if left < limit_s / 3:
        return record | {"failed": f"not run: {max(0.0, left):.0f} s are left"}
    log = Path(tempfile.mkstemp(prefix=f"bench-gpu-{kind}-{model}-", suffix=".log")[1])
    result, start = log.with_suffix(".json"), time.monotonic()
    command = [sys.executable, __file__, "--part", kind, model, device, str(models), str(result)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    limit_s = min(limit_s, left)
    status = harness.run_process(command, log, {"HF_HUB_OFFLINE": "1"} | hidden, limit_s)
    record["seconds"] = round(time.monotonic() - start, 1)
    if result.exists():
        return record | {"numbers": json.loads(result.read_text())}
    how = f"took more than {limit_s:.0f} s" if status is None else f"exited with {status}"
    return record | {"failed": f"{how}; {last_error(log.read_text())} ({log})"}


def last_error(log: str) -> str:
    """The last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    return next(
        (line for line in reversed(lines) if "Error" in line or line.startswith("error:")),
        lines[-1],
    )[:200]


def measure(kind: str, model: str, device: str, models: str, result: str) -> None:
    """Body of a part's process."""
    from scripts.bench.trainer_alone import FUNCTIONS, Setup

    if kind not in FUNCTIONS:
        from scripts.bench.gpu_parts import FUNCTIONS  # and with it what only rollout needs

    numbers = FUNCTIONS[kind](Setup(device, model, Path(models)))
    Path(result).write_text(json.dumps(numbers))
    sys.stdout.flush()
    # all that is left is the end of engines, which must not fail what has been measured
    os._exit(0)


# The table


def table(records: list[dict]) -> str:
    """A row for each number that was taken, and one for each part that failed."""
    records = {record["case"]: record for record in records}.values()  # the newest of each part
    measured = {record["kind"]: record["numbers"] for record in records if "numbers" in record}
    rows = [row for record in records if "numbers" in record for row in _rows(record)]
    for what, (above, below, key, form) in RATIOS.items():
        if {above, below} <= measured.keys():
            rows.append((what, form.format(measured[above][key] / measured[below][key])))
    for record in (record for record in records if "numbers" in record):
        for key, (value, assumed) in PREDICTIONS.get(record["case"], {}).items():
            of = f"{record['numbers'][key]:.3g}, {record['numbers'][key] / value:.2f} × the prediction"
            rows.append((f"{record['case']}, {key}", f"{of}: {assumed}"))
    rows += [(record["case"], record["failed"]) for record in records if "failed" in record]
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join(f"{what:{width}}  {value}" for what, value in rows)


def _rows(record: dict) -> list[tuple[str, str]]:
    """What a part's numbers say; memory is not taken on the CPU, and then has no row."""
    rows, found = [], record | record["numbers"]
    for what, value in ROWS[record["kind"].split("-")[0]].items():
        with contextlib.suppress(KeyError):
            rows.append((what.format_map(found), value.format_map(found)))
    return rows


def report(records: list[dict]) -> list[str]:
    """The GPUs and the table."""
    gpus = dict.fromkeys(record["gpu"] or "no GPU: the numbers mean nothing" for record in records)
    return [", ".join(gpus), f"```\n{table(records)}\n```"]


# The command line


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this bench alone."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds in all")


def cases(given: argparse.Namespace, models: Path) -> list[Case]:
    """A case for each part, with random models in a folder that they share."""
    if given.device == "cuda" and gpu_name() is None:
        raise ValueError(
            "torch sees no NVIDIA GPU; --device cpu --out FOLDER runs the same code without one"
        )
    if given.device == "cpu" and given.out.resolve().is_relative_to(ROOT / "results"):
        raise ValueError(
            "what --device cpu measures means nothing; keep it out of results/ with --out FOLDER"
        )
    deadline = time.monotonic() + given.budget_s

    def arm(part: str, limit_s: float) -> Arm:
        run_once = functools.partial(run_part, part, limit_s, given.device, models, deadline)
        return Arm(given.device, lambda logs: contextlib.nullcontext(run_once))

    parts = TINY_PARTS if given.size == "tiny" or given.device == "cpu" else PARTS
    return [Case(part, [arm(part, limit_s)], warm_up=0) for part, limit_s in parts.items()]


def gpu_name() -> str | None:
    """The first GPU's name and memory."""
    gpus = visible_gpus()
    return f"{gpus[0].name}, {gpus[0].total_bytes / 2**30:.0f} GiB" if gpus else None


def main() -> None:
    """Measure and print the table; exits with 1 if a part failed."""
    with tempfile.TemporaryDirectory(prefix="bench-gpu-models-") as models:
        these = functools.partial(cases, models=Path(models))
        bench = Bench(
            "gpu",
            "What a GPU gives",
            these,
            report,
            key=("case",),
            repeats=1,
            add_options=add_options,
        )
        records = harness.main(bench)
    print(table(records), flush=True)
    sys.exit(any("failed" in record for record in records))


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1:2] == ["--part"] else main()
