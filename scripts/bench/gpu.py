"""What a GPU gives, in one table: `python scripts/bench/gpu.py`, or `bash scripts/gpu_check.sh`.

Each part runs in a process of its own, within a time limit, so that one that fails or hangs leaves the other rows. A
part that no longer fits into the budget is not begun, and the table says so; started again, the bench goes on with what
failed or was not begun. `--device cpu --out FOLDER` runs the same code with a tiny model and without a GPU: to see that
it runs, not to measure.
"""

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster.gpus import visible_gpus
from cluster.processes import kill_session
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arm, Bench, Case

BUDGET_S = 470.0
PARTS = {
    "trainer 0.6b": 80, "tests-trainer -": 150, "sync 0.6b": 200, "job-async 0.6b": 180, "tests-engine -": 300,
    "rollout 0.6b": 110, "bare 0.6b": 110, "job-sync 0.6b": 150, "sync 1.7b": 110, "job-sleep 0.6b": 150,
    "sync 4b": 150,
}  # fmt: skip
"""What is done, and with which model -> most seconds; in the order of what a minute tells. First is what needs no vLLM,
then the engine's first start, which compiles, and whether its log-probs are the trainer's, then a whole job."""
TINY_PARTS = {f"{kind} tiny": 200 for kind in ("sync", "trainer", "rollout", "bare", "job-sync", "job-async")}


def run_part(part: str, limit_s: float, device: str, models: Path, deadline: float) -> dict:
    """Run a part in a process of its own, and no longer than to `deadline`. Returns its numbers, or how it failed."""
    (kind, model), left = part.split(), deadline - time.monotonic()
    record = {"kind": kind, "model": model, "gpu": gpu_name() if device == "cuda" else None, "seconds": 0.0}
    if left < limit_s / 3:
        return record | {"failed": f"not run: {max(0.0, left):.0f} s are left"}
    log = Path(tempfile.mkstemp(prefix=f"bench-gpu-{kind}-{model}-", suffix=".log")[1])
    result, start = log.with_suffix(".json"), time.monotonic()
    command = [sys.executable, __file__, "--part", kind, model, device, str(models), str(result)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | hidden,
        )  # fmt: skip
        try:
            status = f"exited with {process.wait(timeout=min(limit_s, left))}"
        except subprocess.TimeoutExpired:
            status = f"took more than {min(limit_s, left):.0f} s"
        finally:
            kill_session(process.pid)  # engines that it may have left
            process.wait()
    record["seconds"] = round(time.monotonic() - start, 1)
    if result.exists():
        return record | {"numbers": json.loads(result.read_text())}
    return record | {"failed": f"{status}; {last_error(log.read_text())} ({log})"}


def last_error(log: str) -> str:
    """The last line of a log that names an error, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it printed nothing"]
    return next((line for line in reversed(lines) if "Error" in line or line.startswith("error:")), lines[-1])[:200]


def measure(kind: str, model: str, device: str, models: str, result: str) -> None:
    """Body of a part's process."""
    from scripts.bench.trainer_alone import FUNCTIONS, Setup

    if kind not in FUNCTIONS:
        from scripts.bench.gpu_parts import FUNCTIONS  # and with it what only rollout needs

    numbers = FUNCTIONS[kind](Setup(device, model, Path(models)))
    Path(result).write_text(json.dumps(numbers))
    sys.stdout.flush()
    os._exit(0)  # all that is left is the end of engines, which must not fail what has been measured


# The table

_RATE = "{tokens_per_s:.0f} tokens/s; n = {steps} batches of {tokens} tokens, spread {spread:.0f}"
_MEMORY = {"memory, {case}": "{trainer_peak_gib:.1f} GiB peak of tensors, {gpu_used_gib:.1f} GiB used in all"}
_JOB = {
    "{case}": "{step_s:.2f} s per step (n = {steps}, spread {spread_s:.2f}); publish {publish_s:.3f} s, "
    "{tokens_per_s:.0f} tokens/s",
    "memory, {case}": "{peak_gib:.1f} GiB peak of the trainer",
    "|engine − trainer| {case}, nats": "{gap_mean:.1e}",
}
ROWS = {
    "sync": {
        "weight sync {model}, {transport}": "{gb:.2f} GB in {stage_s:.3f} + {load_s:.3f} s (trainer + engine), "
        "{gb_per_s:.1f} GB/s; n = {rounds}, spread {spread_s:.3f} s",
        "|engine − trainer| {model}, nats": "mean {gap_mean:.2e}, max {gap_max:.2e} over {gap_tokens} tokens",
        **_MEMORY,
    },
    "trainer": {
        "trainer {model}, {attention}": "{tokens_per_s:.0f} tokens/s; n = {steps}, step {step_s:.2f} s, "
        "spread {spread_s:.2f} s",
        "MFU of the trainer {model}": "{tflops:.1f} of {matmul_tflops:.1f} TFLOP/s = {mfu:.1%}",
        **_MEMORY,
    },
    "rollout": {"rollout {model}": _RATE},
    "bare": {"bare vLLM {model}": _RATE},
    **dict.fromkeys(("job-sync", "job-async", "job-sleep"), _JOB),
    **{kind: {kind: "{summary}"} for kind in ("tests-trainer", "tests-engine")},
}
"""Of each kind: what a row is of, and what it says."""
RATIOS = (
    ("rollout over bare vLLM", "rollout", "bare", "tokens_per_s", "{:.2f}"),
    ("job-async over job-sync", "job-sync", "job-async", "step_s", "{:.2f}× faster per step"),
    ("job-sleep over job-sync", "job-sync", "job-sleep", "step_s", "{:.2f}× faster per step"),
)
"""What it is of, the part above the line, the one below, the number of both, what the row says."""


PREDICTIONS = {
    ("trainer 0.6b", "step_s"): (0.29, "40 % of an H100's 989 TFLOP/s, and nothing is computed twice"),
    ("sync 0.6b", "stage_s"): (0.16, "DTensor takes 0.5 ms for each of 310 parameters, their bytes 2 ms"),
    ("sync 0.6b", "load_s"): (0.3, "vLLM takes 1 ms to load each; 1.2 GB are copied twice at 3.35 TB/s"),
    ("rollout 0.6b", "tokens_per_s"): (70e3, "10 to 15 µs of Python per token in the worker, as for any small model"),
    ("bare 0.6b", "tokens_per_s"): (150e3, "weights and 256 requests' keys are read once a token, at 3.35 TB/s"),
}
"""Part and number -> what a desk calculation for one H100 says, before anything has run on one, and what it assumes."""


def table(records: list[dict]) -> str:
    """A row for each number that was taken, and one for each part that failed."""
    records = {record["case"]: record for record in records}.values()  # the newest of each part
    measured = {record["kind"]: record["numbers"] for record in records if "numbers" in record}
    rows = [row for record in records if "numbers" in record for row in _rows(record)]
    for what, above, below, key, form in RATIOS:
        if {above, below} <= measured.keys():
            rows.append((what, form.format(measured[above][key] / measured[below][key])))
    for (case, key), (value, assumed) in PREDICTIONS.items():
        if found := next((r["numbers"] for r in records if r["case"] == case and "numbers" in r), None):
            rows.append((f"{case}, {key}", f"{found[key]:.3g}, {found[key] / value:.2f} × the prediction: {assumed}"))
    rows += [(record["case"], record["failed"]) for record in records if "failed" in record]
    width = max((len(what) for what, _ in rows), default=0)
    return "\n".join(f"{what:{width}}  {value}" for what, value in rows)


def _rows(record: dict) -> list[tuple[str, str]]:
    """What a part's numbers say; memory is not taken on the CPU, and then has no row."""
    rows, found = [], record | record["numbers"]
    for what, value in ROWS[record["kind"]].items():
        with contextlib.suppress(KeyError):
            rows.append((what.format_map(found), value.format_map(found)))
    return rows


def report(records: list[dict]) -> list[str]:
    """The GPUs and the table."""
    gpus = dict.fromkeys(record["gpu"] or "no GPU: the numbers mean nothing" for record in records)
    return [", ".join(gpus), f"```\n{table(records)}\n```"]


# The command line


def add_options(parser: argparse.ArgumentParser) -> None:
    """What this bench alone can be told."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds in all")


def cases(given: argparse.Namespace, models: Path) -> list[Case]:
    """A case for each part, with random models in a folder that they share."""
    if given.device == "cuda" and gpu_name() is None:
        raise ValueError("torch sees no NVIDIA GPU; --device cpu --out FOLDER runs the same code without one")
    if given.device == "cpu" and given.out.resolve().is_relative_to(ROOT / "results"):
        raise ValueError("what --device cpu measures means nothing; keep it out of results/ with --out FOLDER")
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
        bench = Bench("gpu", "What a GPU gives", these, report, key=("case",), repeats=1, add_options=add_options)
        records = harness.main(bench)
    print(table(records), flush=True)
    sys.exit(any("failed" in record for record in records))


if __name__ == "__main__":
    measure(*sys.argv[2:]) if sys.argv[1:2] == ["--part"] else main()
