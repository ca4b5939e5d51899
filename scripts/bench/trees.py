"""What it saves to read shared prefixes once, on the CPU: `python scripts/bench/trees.py`.

Short runs of train_async.py record batches, once, in --recordings. On these the trainer makes its own steps: bundling,
packing, forward, backward, clipping and AdamW, at a learning rate that leaves the weights as they are. Each value of
--share-prefix has a process of its own with one thread; they take turns. There is no page of a round in which their
gradient norms differ, for which every second response is called right. Memory is the most that a process held in its
steps, and what of it came with the steps.
"""

import functools
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from asyncrl.cluster.cluster import Cluster
from asyncrl.records import Group
from asyncrl.tasks import load_task
from asyncrl.trainer.batch import deal
from asyncrl.trainer.packing import pack
from asyncrl.trainer.policy import Policy, load_policy
from asyncrl.weights.models import resolve_model
from extras.recording import batch_path, read_batch
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arguments, Bench, Case, Column, Measure, rounds
from scripts.bench.workloads import NO_LEARNING
from scripts.replay import Recording

ARMS = ("off", "prompt", "tree")
"""Values of --share-prefix."""
TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
"""How much gradient norms may differ by rounding, relative."""
NUM_ROWS, NUM_EXAMPLES = 256, 5
TABLES = harness.tables_beside(__file__)
"""Options of the runs that are recorded, and what is shown of a step."""


def recorded(workload: str, folder: Path) -> Path:
    """Return the recorded run of a workload, which is made if it is not there."""
    run, options = folder / workload.replace(" ", "-"), TABLES["workloads"][workload].split()
    if not run.exists():
        if options[-1].endswith(".jsonl"):
            options[-1] = str(write_rows(folder / options[-1]))
        fixed = ["--record", "--eval-every", "0", "--runs-dir", str(folder), "--run-name", run.name]
        subprocess.run([sys.executable, "train_async.py", *options, *fixed], cwd=ROOT, check=True)
    return run


def write_rows(path: Path) -> Path:
    """Write rows of problems that follow answered ones: the same for all, or others, as the file's name says."""
    task = load_task("addition" if "addition" in path.name else "sums:one_digit", seed=0)
    rng = random.Random(0)
    problems = [task.train_problem(index) for index in range(NUM_ROWS)]
    lines = []
    for asked in problems[NUM_EXAMPLES:]:
        examples = problems[:NUM_EXAMPLES]
        if "other" in path.name:
            examples = rng.sample(problems, NUM_EXAMPLES)
        prompt = " ".join([*(f"{p.prompt} {p.answer}" for p in examples), asked.prompt])
        lines.append(json.dumps({"prompt": prompt, "answer": asked.answer}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


# Measuring, in the process of an arm


@dataclass(frozen=True)
class Loaded:
    """What the process of an arm trains, and on what."""

    policy: Policy
    batches: dict[int, list[Group]]
    """By step."""
    row_lengths: list[int]
    """Columns of each row of a micro-batch, of all steps."""
    held_bytes: int
    """Memory of the process before its first step."""


@functools.cache
def load(run: Path, share_prefix: str) -> Loaded:
    """Load the policy and the batches of a recorded run, once in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recording = Recording.open(run)
    config = replace(recording.config, share_prefix=share_prefix, lr=NO_LEARNING)
    path = resolve_model(config.model, config.task)
    recording.check_weights(config.model, path)
    policy = load_policy(config, path, torch.device("cpu"))
    batches, row_lengths = {}, []
    for step in range(1, recording.num_steps + 1):
        batches[step] = rewarded(read_batch(batch_path(run, step), step))
        for update in deal(batches[step], step, policy, Cluster()):
            for bundles in update:
                rows = pack(bundles, policy.module.layout, share_prefix).input_ids
                row_lengths += map(len, rows)
    return Loaded(policy, batches, row_lengths, psutil.Process().memory_info().rss)


def rewarded(groups: list[Group]) -> list[Group]:
    """Give every second member a reward: where all have the same there is no gradient that could differ."""
    return [
        Group(g.group_id, tuple(replace(t, reward=float(t.member % 2)) for t in g.trajectories))
        for g in groups
    ]


def measure(run: Path, share_prefix: str) -> dict:
    """Make a training step on each batch: means."""
    arm = load(run, share_prefix)
    # the most that was held is counted anew
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.perf_counter()
    stats = [
        arm.policy.train_step(deal(groups, step, arm.policy, Cluster()), policy_version=step - 1)
        for step, groups in arm.batches.items()
    ]
    seconds = (time.perf_counter() - start) / len(stats)
    status = Path("/proc/self/status").read_text(encoding="ascii").split()
    peak = 1024 * int(status[status.index("VmHWM:") + 1])
    names = ("grad_norm", "tokens/shareable", "tokens/saved_share", "tokens/forward")
    return {
        "seconds": seconds, "peak": peak, "added": peak - arm.held_bytes,
        "columns": sum(arm.row_lengths) / len(stats), "width": max(arm.row_lengths),
        **{name: statistics.fmean(step[name] for step in stats) for name in names},
        "dtype": arm.policy.config.dtype_on("cpu"),
    }  # fmt: skip


@contextmanager
def start(workload: str, recordings: Path, share_prefix: str, logs: Path) -> Iterator[Measure]:
    """An arm, in a process of its own so that its memory is too."""
    run = recorded(workload, recordings)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda: process.submit(measure, run, share_prefix).result()


@dataclass(frozen=True, kw_only=True)
class TreeArguments(Arguments):
    """The command line."""

    recordings: Path = ROOT / "runs/trees"
    """Recorded runs."""


def cases(given: TreeArguments) -> Iterator[Case]:
    """Yield every workload, with an arm for each way to share."""
    recordings = given.recordings.resolve()
    for workload in TABLES["workloads"]:
        arms = {arm: functools.partial(start, workload, recordings, arm) for arm in ARMS}
        memory = 16e9 if "SmolLM2" in workload else 3e9
        yield Case(workload, arms, memory=memory)


# Tables


def check_gradients(records: list[dict]) -> None:
    """Raise RuntimeError if the arms of a round have different gradients, or none."""
    norms = {record["arm"]: record["grad_norm"] for record in records}
    # The first records of the tiny models, all in float32, do not say so.
    tolerance = max(TOLERANCES[record.get("dtype", "float32")] for record in records)
    if not 0 < max(norms.values()) <= min(norms.values()) * (1 + tolerance):
        raise RuntimeError(f"gradient norms are {norms}: they must agree to {tolerance:g}, above 0")


def tables(records: list[dict]) -> Iterator[str]:
    """Yield a table of each workload: a row for each way to share. Raises RuntimeError as `check_gradients` does."""
    for record in records:
        record["bound"] = 1 / (1 - record["tokens/shareable"])
        record["padding"] = record["columns"] / record["tokens/forward"]
    columns = [Column(**column) for column in TABLES["columns"]]
    for workload, measured in rounds(records, "case").items():
        for of_round in rounds(measured, "repeat").values():
            check_gradients(of_round)
        yield "\n".join(harness.table(workload, rounds(measured, "arm"), columns))


DEFAULTS = TreeArguments(out=ROOT / "results/trees")
BENCH = Bench("trees", "Shared prefixes in the trainer", cases, tables, ("case", "arm"), DEFAULTS)

if __name__ == "__main__":
    harness.main(BENCH)
