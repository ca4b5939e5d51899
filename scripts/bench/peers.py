"""Ours against TRL on the same work, on the CPU: `python scripts/bench/peers.py`.

Model, task, prompts, reward, batch (32 groups of 8), token limits, optimizer (AdamW, 1e-3 after 5 steps of warm-up,
clipped at norm 1), clip range 0.2, float32 and the machine are the same for all. Workloads are in workloads.toml: on
`natural` the policy ends its responses, and learning is real; on `short` and `long` lengths are forced, by the same
law, and only speed is measured. `smollm2` is the job of the small language model, 8 groups of 8 at 4e-5, in bfloat16
with float32 weights (ours by FSDP, TRL by autocast). An arm's runs have the seeds 0, 1, 2, … TRL comes into a folder
of its own on top of .venv, so that torch, transformers and vLLM are the same ones.

Fairness. Each mode of TRL has the fastest settings found that are correct: one micro-batch per step; no gradient
checkpointing, saving, prompt shuffling or reference model. `generate` is transformers' with its cache, on policy.
`async` is TRL's asynchronous trainer and a vLLM server with our engine options, and its default staleness of 4. Where
TRL cannot run without a GPU, it gets the fastest that we have (peers_cpu.py). What is compared is the best arm of each.

Each measurement is a run of its own. Steady state is from the end of the first quarter of the steps on, when what was
sampled while the trainer was starting is used up. The page also has `colocate`, vLLM in TRL's trainer, and the time to
a held-out accuracy, from the start of the process or of the engine. Weights were kept every few steps and scored later.
The code of both is in the history, at their records' commits.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from asyncrl.weights.models import resolve_model
from scripts.bench.harness import (
    ROOT,
    Bench,
    Case,
    Column,
    main,
    rounds,
    run_process,
    table,
    tables_beside,
)
from scripts.bench.workloads import WORKLOADS, Workload
from scripts.lines import read

PINS = ("trl==1.16.0", "accelerate==1.15.0")
"""What .venv lacks of TRL."""
TIMEOUT_S = 1200.0
TINY_STEPS = 5
TABLES = tables_beside(__file__)
AIMS = TABLES["aims"]


@dataclass(frozen=True)
class Arm:
    """What is run for a workload, as peers.toml has it."""

    mode: str = ""
    threads: int = 1
    options: dict = field(default_factory=dict)


ARMS = {name: Arm(**fields) for name, fields in TABLES["arms"].items()}


def install(folder: Path) -> None:
    """Install TRL into a folder, unless it is there. Raises ValueError if that fails."""
    if all((folder / f"{pin.replace('==', '-')}.dist-info").exists() for pin in PINS):
        return
    print(f"installing {', '.join(PINS)} into {folder}", flush=True)
    target = ["--no-deps", "--upgrade", "--target", str(folder)]
    command = [sys.executable, "-m", "pip", "install", *target, *PINS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")


# One measurement


def measure(
    arm: Arm, workload: Workload, peers: Path, size: str, seeds: Iterator[int], logs: Path
) -> dict:
    """Run from start to end, with TRL from the folder `peers`. Returns what its steps and its processes say."""
    config = workload.config()
    steps = TABLES["synchronous_steps" if arm.mode == "generate" else "steps"][workload.name]
    out = Path(tempfile.mkdtemp(prefix=f"{arm.mode}-{workload.name}-", dir=logs))
    options = {"workload": workload.name, "out": str(out), "seed": next(seeds), **arm.options}
    options["steps"] = TINY_STEPS if size == "tiny" else steps
    script = "peers_ours.py"
    if arm.mode:
        script = "peers_trl.py"
        options |= {"mode": arm.mode, "model": resolve_model(config.model, config.task)}
    command = [sys.executable, str(ROOT / "scripts/bench" / script), json.dumps(options)]
    environment = TABLES["environment"] | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *[str(peers)] * bool(arm.mode)]),
        "OMP_NUM_THREADS": str(arm.threads),
    }
    started_at = time.time()
    looks = run(command, environment, out / "log")
    up, *lines = read(out / "steps.jsonl")
    rates = steady_state(lines)
    busy = cores_busy(looks, lines[len(lines) // 4]["time"], lines[-1]["time"])
    return {
        "work": workload.name, "steps": options["steps"], "seed": options["seed"], "peer": PINS[0], **rates,
        "up_s": up["time"] - started_at, "start_s": lines[0]["time"] - started_at,
        "cores_busy": busy, "cpu_ms_per_sample": 1e3 * busy / rates["samples_per_s"],
        "cores": len(os.sched_getaffinity(0)), "peak_memory_gb": max(memory for *_, memory in looks) / 1e9,
    }  # fmt: skip


def run(
    command: list[str], environment: dict[str, str], log: Path
) -> list[tuple[float, float, int]]:
    """Run a command to its end. Returns what `look` saw now and then.

    Raises RuntimeError, with the last lines of its log, if it fails or takes longer than TIMEOUT_S.
    """
    looks = [(time.time(), 0.0, 0)]
    status = run_process(command, log, environment, TIMEOUT_S, lambda pid: looks.append(look(pid)))
    if status != 0:
        how = f"status {status}" if status is not None else f"no status after {TIMEOUT_S:g} s"
        lines = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise RuntimeError(
            f"{' '.join(command)} ended with {how}; its last lines, of {log}:\n{lines}"
        )
    return looks


def look(pid: int) -> tuple[float, float, int]:
    """Return Unix time, CPU time (s) and memory (bytes, shared pages once) of a process and its living descendants."""
    looked_at, cpu_s, memory = time.time(), 0.0, 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                cpu_s += sum(process.cpu_times()[:2])  # user and system
                memory += process.memory_full_info().pss
    return looked_at, cpu_s, memory


def cores_busy(looks: list[tuple[float, float, int]], start: float, end: float) -> float:
    """Return the cores kept busy between two Unix times, up to the last look before the second; 0 if there is none.

    Soon after that processes end, and what they used is not seen any more.
    """
    times, cpu_s, _ = np.transpose([seen for seen in looks if seen[0] <= end])
    if times[-1] <= start:
        return 0.0
    return float((cpu_s[-1] - np.interp(start, times, cpu_s)) / (times[-1] - start))


def steady_state(lines: list[dict]) -> dict[str, float]:
    """Return the rates from the end of the first quarter of the steps to the end of the last one."""
    first, *steady = lines[len(lines) // 4 :]
    seconds = steady[-1]["time"] - first["time"]
    samples = sum(line["samples"] for line in steady)
    tokens = sum(line["tokens"] for line in steady)
    return {
        "step_s": seconds / len(steady), "samples_per_s": samples / seconds, "tokens_per_s": tokens / seconds,
        "tokens_per_sample": tokens / samples,
    }  # fmt: skip


# Tables


def completed(record: dict) -> dict:
    """Return a record with its rate were all cores busy, and infinity where an accuracy was not reached."""
    more = {}
    if record.get("cores_busy"):
        more["over_limit"] = record["cores_busy"] / record["cores"]
        more["limit"] = record["samples_per_s"] / more["over_limit"]
    if "curve" in record:  # held-out accuracy over time
        more["to_accuracy_s"] = record["to_accuracy_s"] or math.inf
        if "up_s" in record:
            more["learning_s"] = more["to_accuracy_s"] - record["up_s"]
    return record | more


def arms_of(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """Return workload -> arm -> its records."""
    workloads = rounds(map(completed, records), "work")
    return {workload: rounds(measured, "arm") for workload, measured in workloads.items()}


def best(arms: dict[str, list[dict]], prefix: str) -> str | None:
    """Return the arm with the most samples/s, by medians, of those whose name begins so."""
    rates = {
        arm: statistics.median(record["samples_per_s"] for record in records)
        for arm, records in arms.items()
        if arm.startswith(prefix)
    }
    return max(rates, key=rates.get, default=None)


def best_pairs(records: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """Return workload -> our best arm, then TRL's -> their records, of workloads that both did.

    Ours have the ratio to the run of TRL's whose turn was beside theirs, as the machine's speed drifts.
    """
    pairs = {}
    for workload, arms in arms_of(records).items():
        our, peer = best(arms, "ours"), best(arms, "TRL")
        rates = {(r["commit"], r["repeat"]): r["samples_per_s"] for r in arms.get(peer, ())}
        ours = []
        for record in arms.get(our, ()):
            if rate := rates.get((record["commit"], record["repeat"])):
                ours.append(record | {"over_peer": record["samples_per_s"] / rate})
        if ours:
            pairs[workload] = {our: ours, peer: arms[peer]}
    return pairs


def tables(workloads: dict[str, dict[str, list[dict]]], shown: str) -> Iterator[str]:
    """Yield a table for each workload: a row per arm."""
    columns = [Column(**column) for column in TABLES["columns"][shown]]
    for workload, arms in workloads.items():
        yield "\n".join(table(workload, arms, columns))


def report(records: list[dict]) -> list[str]:
    """Return the best arms, and then all of them, workload by workload."""
    return [*tables(best_pairs(records), "summary"), *tables(arms_of(records), "arms")]


# The command line


def cases(given: argparse.Namespace) -> list[Case]:
    """Return each workload, done by each of the chosen arms."""
    arms = {name: ARMS[name] for name in given.arms or ARMS}
    if any(arm.mode for arm in arms.values()):
        install(given.env.absolute())

    def start(arm: Arm, workload: Workload):
        run_once = functools.partial(
            measure, arm, workload, given.env.absolute(), given.size, itertools.count()
        )
        return lambda logs: contextlib.nullcontext(functools.partial(run_once, logs))

    def case(workload: Workload) -> Case:
        able = {
            name: start(arm, workload)
            for name, arm in arms.items()
            # one request for a group has one forced length
            if not workload.sigma or arm.options.get("replicate_prompts", True)
        }
        return Case(workload.name, able, warm_up=0)

    return [case(WORKLOADS[name]) for name in TABLES["steps"]]


OPTIONS = {
    "--arms": {
        "nargs": "+",
        "choices": ARMS,
        "metavar": "ARM",
        "help": f"of {', '.join(map(repr, ARMS))}",
    },
    "--env": {"type": Path, "default": ROOT / ".peers", "help": "folder of TRL, made on first use"},
}
BENCH = Bench(
    "peers", "Ours and TRL on the same work", cases, report, key=("work", "arm"), shown="samples_per_s", repeats=3,
    options=OPTIONS,
)  # fmt: skip

if __name__ == "__main__":
    main(BENCH)
