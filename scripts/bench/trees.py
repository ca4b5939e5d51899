"""What it saves to read shared prefixes once, on the CPU: `python scripts/bench/trees.py`.

Short runs of train_async.py record batches, once, in --recordings. On these the trainer makes its own steps: bundling,
packing, forward, backward, clipping and AdamW, at a learning rate that leaves the weights as they are. Each value of
--share-prefix has a process of its own with one thread; they take turns, and a round is refused in which their
gradient norms differ, for which every second response is called right. Memory is the most that a process held in its
steps, and what of it came with the steps.
"""

import argparse
import functools
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from asyncrl.cluster.cluster import Cluster
from asyncrl.records import Group
from asyncrl.runlog.batches import batch_path, read_batch
from asyncrl.tasks import load_task
from asyncrl.trainer.batch import deal
from asyncrl.trainer.packing import pack
from asyncrl.trainer.policy import Policy, load_policy
from asyncrl.weights.models import resolve_model
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arm, Bench, Case, Column
from scripts.bench.work import NO_LEARNING
from scripts.lines import markdown
from scripts.replay import Recording

ARMS, SAME = ("off", "prompt", "tree"), {"float32": 1e-3, "bfloat16": 2e-2}
"""Values of --share-prefix; how much their gradient norms may differ by rounding, relative."""
SMOLLM2 = (
    "--steps 2 --model smollm2 --dtype bfloat16 --groups-per-step 4 --lr 4e-5 --max-response-tokens"
)
WORKS = {
    "prompts tiny": "--steps 4",
    "prompts SmolLM2": f"{SMOLLM2} 20 --task jsonl --data-path other-sums.jsonl",
    "turns frozen_lake": "--steps 4 --task frozen_lake --max-prompt-tokens 8 --max-response-tokens 64",
    "turns guess_number": "--steps 4 --task guess_number --max-prompt-tokens 4 --max-response-tokens 24",
    "turns SmolLM2": f"{SMOLLM2} 160 --groups-per-step 2 --task guess_number --max-prompt-tokens 128",
    "system tiny": "--steps 4 --max-prompt-tokens 400 --task jsonl --data-path same-addition.jsonl",
    "system SmolLM2": f"{SMOLLM2} 20 --task jsonl --data-path same-sums.jsonl",
}
"""Options of the run that is recorded. Rows are problems after five answered ones: others, or the same for all."""


def recorded(work: str, folder: Path) -> Path:
    """The recorded run of a work, which is made if it is not there."""
    run, options = folder / work.replace(" ", "-"), WORKS[work].split()
    if not run.exists():
        if options[-1].endswith(".jsonl"):
            options[-1] = str(write_rows(folder / options[-1]))
        fixed = ["--record", "--eval-every", "0", "--runs-dir", str(folder), "--run-name", run.name]
        subprocess.run([sys.executable, "train_async.py", *options, *fixed], cwd=ROOT, check=True)
    return run


def write_rows(path: Path) -> Path:
    """Write the rows that a file's name says; returns its path."""
    task = load_task("addition" if "addition" in path.name else "sums:one_digit", seed=0)
    rng = random.Random(0)
    problems = [task.train_problem(index) for index in range(256)]
    lines = []
    for asked in problems[5:]:
        shown = problems[:5] if "same" in path.name else rng.sample(problems, 5)
        prompt = " ".join([*(f"{p.prompt} {p.answer}" for p in shown), asked.prompt])
        lines.append(json.dumps({"prompt": prompt, "answer": asked.answer}) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Loaded:
    """What the process of an arm trains, and on what."""

    policy: Policy
    batches: dict[int, list[Group]]
    """By step."""
    held_bytes: int
    """Memory of the process before its first step."""
    row_lengths: list[int]
    """Columns of each row of a micro-batch, of all steps."""

    def updates(self, step: int) -> list[list]:
        """The bundles of each update of a step."""
        return deal(self.batches[step], step, self.policy, Cluster())


@functools.cache
def loaded(run: Path, share_prefix: str) -> Loaded:
    """Load the policy and the batches of a recorded run, once in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    recording = Recording.open(run)
    config = replace(recording.config, share_prefix=share_prefix, lr=NO_LEARNING)
    path = resolve_model(config.model, config.task)
    recording.check_weights(config.model, path)
    policy = load_policy(config, path, torch.device("cpu"))
    steps = range(1, recording.num_steps + 1)
    batches = {step: rewarded(read_batch(batch_path(run, step), step)) for step in steps}
    arm = Loaded(policy, batches, 0, [])
    updates = (update for step in steps for update in arm.updates(step))
    rows = (
        pack(bundles, policy.module.one_row, share_prefix)
        for update in updates
        for bundles in update
    )
    shapes = [row.input_ids.shape for row in rows]
    held_bytes = psutil.Process().memory_info().rss
    return replace(arm, held_bytes=held_bytes, row_lengths=[w for n, w in shapes for _ in range(n)])


def rewarded(groups: list[Group]) -> list[Group]:
    """Give every second member a reward: where all have the same there is no gradient that could differ."""
    return [
        Group(g.group_id, tuple(replace(t, reward=float(t.member % 2)) for t in g.trajectories))
        for g in groups
    ]


def measure(run: Path, share_prefix: str) -> dict:
    """A training step on each batch, in an arm's process: means."""
    arm = loaded(run, share_prefix)
    # the most that was held is counted anew
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.perf_counter()
    stats = [
        arm.policy.train_step(arm.updates(step), policy_version=step - 1) for step in arm.batches
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
def training(
    work: str, folder: Path, share_prefix: str, logs: Path
) -> Iterator[Callable[[], dict]]:
    """An arm, in a process of its own so that its memory is too."""
    run = recorded(work, folder)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda: process.submit(measure, run, share_prefix).result()


def of_round(found: dict[str, dict]) -> list[dict]:
    """Records of a round. Raises RuntimeError if the arms' gradients differ, or there is none."""
    norms = [measured["grad_norm"] for measured in found.values()]
    same = SAME[next(iter(found.values()))["dtype"]]
    if not 0 < max(norms) <= min(norms) * (1 + same):
        what = f"gradient norms of {', '.join(found)} are {norms}"
        raise RuntimeError(f"{what}: they must agree to {same:g}, above 0")
    return [{"arm": arm, **measured} for arm, measured in found.items()]


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Every work with an arm for each way to share."""
    for work in WORKS:
        arms = [
            Arm(arm, functools.partial(training, work, given.recordings.resolve(), arm))
            for arm in ARMS
        ]
        yield Case(work, arms, of_round, memory=16e9 if "SmolLM2" in work else 3e9)


def table(records: list[dict]) -> list[str]:
    """Markdown lines: a row for each work and way to share."""
    columns = [
        Column("seconds", "ms per step", ".0f", 1e3, better=-1, against="times faster"),
        Column("peak", "peak, GiB", ".2f", 2**-30),
        Column("added", "of it with the steps", ".2f", 2**-30),
    ]
    rows = []
    for work, of_work in harness.rounds(records, "case").items():
        arms = harness.rounds(of_work, "arm")
        for arm, measured in arms.items():
            first = measured[0]
            row = {"work": work, "`--share-prefix`": f"`{arm}`", "n": len(measured)}
            row["POR, %"] = f"{100 * first['tokens/shareable']:.1f}"
            row["ERR, %"] = f"{100 * first['tokens/saved_share']:.1f}"
            row["1/(1 − POR)"] = f"{1 / (1 - first['tokens/shareable']):.2f}"
            for column in columns:
                cells = column.cells(measured, arms[ARMS[0]])
                row |= zip(column.headings(), cells, strict=True)
            row["columns ÷ tokens read"] = f"{first['columns'] / first['tokens/forward']:.2f}"
            row["longest row"] = first["width"]
            rows.append(row)
    return markdown(rows[0], (row.values() for row in rows))


BENCH = Bench(
    "trees", "Shared prefixes in the trainer", cases, lambda records: ["\n".join(table(records))], key=("case", "arm"),
    add_options=lambda p: p.add_argument("--recordings", type=Path, default=ROOT / "runs/trees", help="recorded runs"),
)  # fmt: skip

if __name__ == "__main__":
    harness.main(BENCH)
