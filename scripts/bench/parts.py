"""The speed of each part against its limit, on the CPU: `python scripts/bench/parts.py`.

trainer      Policy.train_step against forward, backward, clipping and AdamW on the same tokens, packed beforehand
job          whole steps of the default task at α = 0, 1, 2: pause per update, speed-up over α = 0, and overlap: the
             step against the slower of the same loop without training and training alone

Training has a learning rate of 1e-12, so that policy and lengths stay as they are. Lengths of `natural` and `long` are
in workloads.toml. The page also has `rollout`, one rollout worker against AsyncLLM on the same work; `reward`, what a
reward of one's own takes beyond its own time; `frozen_lake`, the speed-up where every turn takes 0.1 s; and `publish`,
`large`, `update` and `queue`: their code is in the history, at their records' commits.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from asyncrl.config import Config
from asyncrl.job.node import Leader
from asyncrl.tasks import load_task
from asyncrl.trainer.dealing import distribute
from asyncrl.trainer.optimizer import make_optimizer
from asyncrl.trainer.packing import MicroBatch, TrainSequence, pack
from asyncrl.trainer.policy import load_policy
from asyncrl.weights.models import load_tokenizer, resolve_model
from scripts.bench import harness
from scripts.bench.harness import Bench, Case, Column, Measure, rounds
from scripts.bench.rig import TrainingRig, running, wait_until_idle
from scripts.bench.trainer_alone import made_up, one_rank, timed
from scripts.bench.workloads import NO_LEARNING, WORKLOADS, Workload, run_workload
from scripts.lines import markdown, read

STEPS = {"full": 10, "tiny": 2}
"""Steps of a measurement."""


# Training


def make_sequences(workload: Workload, config: Config, model_path: str) -> list[TrainSequence]:
    """Return a batch of the task's first problems with the workload's responses: right answers, or any tokens."""
    task, tokenizer = load_task(config.task, config.seed), load_tokenizer(model_path)
    sequences = []
    for index in range(config.groups_per_step * config.group_size):
        problem = task.train_problem(index // config.group_size)
        prompt = task.encode_prompt(problem, tokenizer)
        response = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]
        if workload.is_forced:
            vocabulary = range(tokenizer.vocab_size)
            response = random.Random(index).choices(vocabulary, k=workload.length(index))
        sequences.append(made_up([*prompt, *response], len(prompt), index, logprob=-1.0))
    return sequences


class PlainStep:
    """Forward, backward, clipping and AdamW on micro-batches that are packed already: no loss but −A·log p."""

    def __init__(self, config: Config, model_path: str):
        from transformers import AutoModelForCausalLM

        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        self.model = AutoModelForCausalLM.from_pretrained(model_path, **options).eval()
        self.parameters, self.max_grad_norm = [*self.model.parameters()], config.max_grad_norm
        self.optimizer = make_optimizer(config, [{"params": self.parameters, "lr": config.lr}])

    def step(self, batches: list[MicroBatch]) -> None:
        """Make one optimizer update."""
        num_tokens = sum(len(batch.targets) for batch in batches)
        for batch in batches:
            hidden = self.model.base_model(
                batch.input_ids, position_ids=batch.position_ids, use_cache=False
            )
            rows = hidden.last_hidden_state.flatten(0, 1).index_select(0, batch.sources)
            nll = nn.functional.cross_entropy(
                self.model.lm_head(rows), batch.targets, reduction="none"
            )
            ((nll * batch.advantages).sum() / num_tokens).backward()
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def training(arm: str, workload: Workload, steps: int, logs: Path) -> Iterator[Measure]:
    """Tokens per second, prompts included, of train_step or of the plain step."""
    # Else the policy would collapse on the same tokens, and steps would take longer.
    config = workload.config(lr=NO_LEARNING)
    path = resolve_model(config.model, config.task)
    sequences = make_sequences(workload, config, path)
    ((update,),) = distribute([sequences], 1, config.max_tokens_per_microbatch)
    if arm == "ours":
        policy = load_policy(config, path, torch.device("cpu"))
        step = partial(policy.train_step, [update], 0)
    else:
        batches = [pack(bundles, one_row=False) for bundles in update]
        step = partial(PlainStep(config, path).step, batches)

    num_tokens = steps * sum(len(sequence.tokens) for sequence in sequences)

    def measure() -> dict:
        seconds, _ = timed(lambda: [step() for _ in range(steps)], "cpu")
        return {"tokens_per_s": num_tokens / seconds}

    yield measure


# Whole steps


@contextmanager
def stepping(config: Config, steps: int, logs: Path) -> Iterator[Measure]:
    """Whole steps of train_async.py; with α > 0 also of the same loop without training, and of training alone.

    The job is up only while it is measured: of several at a time, one engine alone would have cores of its own.
    """

    def measure() -> dict:
        folder = logs / f"a{config.async_ratio:g}_{time.time_ns()}"
        with running(config, run_workload, folder) as node:
            rig = TrainingRig(node)
            whole_steps(rig, steps)  # to warm up
            numbers = whole_steps(rig, steps)
            if config.async_ratio > 0:
                numbers["generate_alone_s"] = whole_steps(rig, steps, train=False)["step_s"]
                groups = [rig.batches[index % len(rig.batches)] for index in range(steps)]
                seconds, _ = timed(lambda: list(map(rig.train, groups)), "cpu")
                numbers["train_alone_s"] = seconds / steps
        return numbers

    yield measure


def whole_steps(rig: TrainingRig, steps: int, train: bool = True) -> dict:
    """Return the steady state over `steps` steps, after as many as wait already; then the workers come to rest."""
    for _ in range(math.ceil(rig.node.config.async_ratio) + 1):
        rig.step(train)
    start, cpu_before = time.monotonic(), cpu_seconds(rig.node)
    batches = [rig.step(train) for _ in range(steps)]
    seconds, cpu_after = time.monotonic() - start, cpu_seconds(rig.node)
    metrics = read(rig.node.run.path / "metrics.jsonl")[-steps:]
    wait_until_idle(rig.node)
    tokens = sum(
        t.num_generated for groups in batches for group in groups for t in group.trajectories
    )
    pauses = [line["rollout/pause_s"] for line in metrics if "rollout/pause_s" in line]
    return {
        "step_s": seconds / steps,
        "tokens_per_step": tokens / steps,
        "pause_s": statistics.fmean(pauses),
        "cpu_s": {
            process: (cpu_after[process] - cpu_before[process]) / steps for process in cpu_after
        },
        "wait_s": statistics.median(line["time/wait_s"] for line in metrics),
        "train_s": statistics.median(line["time/train_s"] for line in metrics),
        "publish_s": statistics.median(line["time/publish_s"] for line in metrics),
    }


def cpu_seconds(node: Leader) -> dict[str, float]:
    """Return the CPU time so far of this process, of the workers, of their engines, and of what scores for them."""
    used = {"trainer": time.process_time(), "worker": 0.0, "engine": 0.0, "rewards": 0.0}
    for worker in node.controller.workers:
        process = psutil.Process(worker.process.process.pid)
        used["worker"] += sum(process.cpu_times()[:2])
        for child in process.children(recursive=True):
            is_engine = "".join(child.cmdline()[:1]).startswith("engine ")
            used["engine" if is_engine else "rewards"] += sum(child.cpu_times()[:2])
    return used


# What is recorded and shown

RATIO = Column("ratio", "ratio", ".3f")
PARTS = harness.tables_beside(__file__)
"""Name of each part -> what is shown of it, and how; parts.toml says what is what."""


def record(part: str, ours: float, limit: float, **more) -> dict:
    """Return one measurement of a part; `more` are numbers beside it."""
    ratio = limit / ours if "speed_up" in PARTS[part] else ours / limit
    return {"part": part, "ours": ours, "limit": limit, "ratio": ratio, **more}


def against_plain(part: str, measured: dict[str, dict]) -> list[dict]:
    """Return the record of ours against the plain arm."""
    return [record(part, measured["ours"]["tokens_per_s"], measured["plain"]["tokens_per_s"])]


def against_synchronous(measured: dict[str, dict]) -> Iterator[dict]:
    """Yield records of overlap, pause and speed-up over α = 0."""
    for ratio in (1, 2):
        numbers = measured[f"α={ratio}"]
        step_s = numbers["step_s"]
        slower_half_s = max(numbers["generate_alone_s"], numbers["train_alone_s"])
        yield record(f"overlap α={ratio}", step_s, slower_half_s, **numbers)
        yield record(f"pause α={ratio}", numbers["pause_s"], step_s)
        yield record(f"speed-up natural α={ratio}", step_s, measured["α=0"]["step_s"])


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Yield all parts, in the size that is asked for."""
    steps = STEPS[given.size]
    for workload in (WORKLOADS["natural"], WORKLOADS["long"]):
        part = f"trainer {workload.name}"
        arms = {arm: partial(training, arm, workload, steps) for arm in ("ours", "plain")}
        yield Case(part, arms, partial(against_plain, part))
    arms = {}
    for ratio in (0, 1, 2):
        config = WORKLOADS["natural"].config(async_ratio=float(ratio))
        arms[f"α={ratio}"] = partial(stepping, config, steps)
    yield Case("job", arms, against_synchronous, warm_up=0)


def table(records: list[dict]) -> list[str]:
    """Return the lines of a table, one per part; medians with minimum and maximum."""
    heading = ["part", "what", "n", "ours", "limit", "ratio", "target", "reached", "against"]
    measured = rounds(records, "part")
    return markdown(heading, [row(part, measured[part]) for part in PARTS if part in measured])


def row(part: str, records: list[dict]) -> list[str]:
    """Return the cells of a part."""
    settings = PARTS[part]
    shown = {"form": settings.get("form", ".3f"), "factor": settings.get("factor", 1.0)}
    cells = [part, settings["ours"], str(len(records))]
    for column in (Column("ours", "", **shown), Column("limit", "", **shown), RATIO):
        cells += column.cells(records, records)
    if "target" in settings:
        target, better = settings["target"], settings.get("better", 1)
        is_reached = (statistics.median(RATIO.values(records)) - target) * better >= 0
        cells += [f"{'≥' if better > 0 else '≤'} {target:g}", "yes" if is_reached else "no"]
    else:
        cells += ["–", "–"]
    return [*cells, settings.get("limit", "–")]


def cpu_table(records: list[dict]) -> list[str]:
    """Return the lines of a table: where the CPU time of a step goes, for each part that recorded it."""
    of_processes = [{"part": r["part"], **r["cpu_s"]} for r in records if "cpu_s" in r]
    columns = [
        Column(process, f"{process}, ms", ".0f", 1e3)
        for process in ("trainer", "worker", "engine", "rewards")
    ]
    return harness.table("CPU time per step", rounds(of_processes, "part"), columns)


def report(records: list[dict]) -> list[str]:
    """Return the paragraphs of the page."""
    how = "Ratios are of measurements that were made one after the other; of speed-ups they are limit ÷ ours."
    return [how, "\n".join(table(records)), "\n".join(cpu_table(records))]


BENCH = Bench(
    "parts", "The parts against their limits", cases, report, key=("part",), shown="ratio"
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with one_rank():
        harness.main(BENCH)
