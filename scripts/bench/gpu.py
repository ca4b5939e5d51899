"""What a GPU gives, in one table: `python scripts/bench/gpu.py`, or `bash scripts/gpu_check.sh`.

Each part runs in a process of its own, within a time limit, so that one that fails or hangs leaves the other rows. A
part that no longer fits into the budget is not begun, and the table says so. A bench that is started again runs what
failed or was not begun. `--device cpu --out FOLDER` runs the same code with a tiny model and without a GPU: to see that
it runs, not to measure.
"""

import contextlib
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from asyncrl.cluster.gpus import visible_gpus
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arguments, Bench, Case

BUDGET_S = 470.0
"""Of one call; the whole takes several, an hour at most."""
FAR_OFF = 1.5
"""Factor between measurement and prediction from which the table says what to change."""
TABLES = harness.tables_beside(__file__)
"""What is done, and what is shown of it; gpu.toml says what is what."""


def run_part(part: str, limit_s: float, device: str, models: Path, deadline: float) -> dict:
    """Run a part in a process of its own, and no longer than to `deadline`. Returns its numbers, or how it failed."""
    kind, model = part.split()
    gpu = gpu_name() if device == "cuda" else None
    record = {"kind": kind, "model": model, "gpu": gpu, "seconds": 0.0}
    start = time.monotonic()
    left_s = deadline - start
    if left_s < limit_s / 3:
        return record | {"failed": f"not run: {max(0.0, left_s):.0f} s are left"}
    limit_s = min(limit_s, left_s)
    log = Path(tempfile.mkstemp(prefix=f"bench-gpu-{kind}-{model}-", suffix=".log")[1])
    result = log.with_suffix(".json")
    command = [sys.executable, __file__, "--part", kind, model, device, str(models), str(result)]
    environment = {"HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    status = harness.run_process(command, log, environment, limit_s)
    record["seconds"] = round(time.monotonic() - start, 1)
    if result.exists():
        return record | {"numbers": json.loads(result.read_text())}
    how = f"took more than {limit_s:.0f} s" if status is None else f"exited with {status}"
    return record | {"failed": f"{how}; {last_error(log.read_text())} ({log})"}


def last_error(log: str) -> str:
    """Return the last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    errors = [line for line in lines if "Error" in line or line.startswith("error:")]
    return (errors or lines)[-1][:200]


def measure(kind: str, model: str, device: str, models: str, result: str) -> None:
    """Run a part: the body of its process."""
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
    """Return a row for each number that was taken, and one for each part that failed."""
    newest = {record["case"]: record for record in records}.values()
    measured = [record for record in newest if "numbers" in record]
    numbers = {record["kind"]: record["numbers"] for record in measured}
    rows = [row for record in measured for row in _rows(record)]
    for what, (above, below, key, form) in TABLES["ratios"].items():
        if {above, below} <= numbers.keys():
            rows.append((what, form.format(numbers[above][key] / numbers[below][key])))
    for record in measured:
        for key, prediction in TABLES["predictions"].get(record["case"], {}).items():
            text = beside_prediction(record["numbers"][key], *prediction)
            rows.append((f"{record['case']}, {key}", text))
    rows += [(record["case"], record["failed"]) for record in newest if "failed" in record]
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join(f"{what:{width}}  {value}" for what, value in rows)


def beside_prediction(number: float, predicted: float, assumed: str, change: str) -> str:
    """Return a number beside what was predicted, and what to change where it is far off."""
    ratio = number / predicted
    text = f"{number:.3g}, predicted {predicted:.3g}, {ratio:.2f} ×: {assumed}"
    return text if 1 / FAR_OFF < ratio < FAR_OFF else f"{text}; CHANGE {change}"


def _rows(record: dict) -> Iterator[tuple[str, str]]:
    """Yield what a part's numbers say; memory is not taken on the CPU, and then has no row."""
    fields = record | record["numbers"]
    for what, value in TABLES["rows"][record["kind"].split("-")[0]].items():
        with contextlib.suppress(KeyError):
            yield what.format_map(fields), value.format_map(fields)


def report(records: list[dict]) -> list[str]:
    """Return the GPUs and the table."""
    gpus = dict.fromkeys(record["gpu"] or "no GPU: the numbers mean nothing" for record in records)
    return [", ".join(gpus), f"```\n{table(records)}\n```"]


# The command line


@dataclass(frozen=True, kw_only=True)
class GpuArguments(Arguments):
    """The command line."""

    device: Literal["cuda", "cpu"] = "cuda"
    """Where everything runs."""
    budget_s: float = BUDGET_S
    """Seconds in all."""


def cases(given: GpuArguments, models: Path) -> list[Case]:
    """Return a case for each part, with random models in a folder that they share."""
    if given.device == "cuda" and gpu_name() is None:
        raise ValueError(
            "torch sees no NVIDIA GPU; --device cpu --out FOLDER runs the same code without one"
        )
    if given.device == "cpu" and given.out.resolve().is_relative_to(ROOT / "results"):
        raise ValueError(
            "what --device cpu measures means nothing; keep it out of results/ with --out FOLDER"
        )
    deadline = time.monotonic() + given.budget_s
    is_tiny = given.size == "tiny" or given.device == "cpu"
    parts = TABLES["tiny_parts" if is_tiny else "parts"]

    def case(part: str, limit_s: float) -> Case:
        run_once = functools.partial(run_part, part, limit_s, given.device, models, deadline)
        return Case(part, {given.device: lambda logs: contextlib.nullcontext(run_once)}, warm_up=0)

    return [case(part, limit_s) for part, limit_s in parts.items()]


def gpu_name() -> str | None:
    """Return the first GPU's name and memory."""
    gpus = visible_gpus()
    return f"{gpus[0].name}, {gpus[0].total_bytes / 2**30:.0f} GiB" if gpus else None


def main() -> None:
    """Measure and print the table; exits with 1 if a part failed."""
    defaults = GpuArguments(out=ROOT / "results/gpu", repeats=1)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-models-") as models:
        these = functools.partial(cases, models=Path(models))
        bench = Bench("gpu", "What a GPU gives", these, report, ("case",), defaults)
        records = harness.main(bench)
    print(table(records), flush=True)
    sys.exit(any("failed" in record for record in records))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        measure(*sys.argv[2:])
    else:
        main()
