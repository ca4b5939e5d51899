"""The speed of each part against its limit, on the CPU: `python scripts/bench/parts.py`.

trainer      Policy.train_step against forward, backward, clipping and AdamW on the same tokens, packed beforehand
job          whole steps of the default task at α = 0, 1, 2: pause per update, speed-up over α = 0, and overlap: the
             step against the slower of the same loop without training and training alone

Training has a learning rate of 1e-12, so that policy and lengths stay as they are. Lengths of `natural` and `long` are
in work.py. The page also has `rollout`, one rollout worker against AsyncLLM on the same work; `reward`, what a reward
of one's own takes beyond its own time; `frozen_lake`, the speed-up where every turn takes 0.1 s; and `publish`,
`large`, `update` and `queue`: their code is in the history, at their records' commits.
"""

import argparse
import math
import random
import statistics
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import torch
from torch import nn

from asyncrl.config import Config
from asyncrl.tasks import load_task
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.optimizer import make_optimizer
from asyncrl.trainer.packing import MicroBatch, TrainSequence, pack
from asyncrl.trainer.policy import load_policy
from asyncrl.weights.models import load_tokenizer, resolve_model
from scripts.bench import harness
from scripts.bench.harness import Arm, Bench, Case, Column
from scripts.bench.rig import Rig, TrainingRig, running
from scripts.bench.trainer_alone import made_up, one_rank
from scripts.bench.work import (
    LONG,
    NATURAL,
    NO_LEARNING,
    SAMPLES_PER_STEP,
    Work,
    run_work_worker,
    work_of,
)
from scripts.lines import markdown, read

STEPS = {"full": 10, "tiny": 2}
"""Steps of a measurement."""

Measure = Callable[[], dict]


# Training


def make_sequences(
    config: Config, model_path: str, count: int = SAMPLES_PER_STEP
) -> list[TrainSequence]:
    """The task's first problems with responses of the work's lengths: right answers, or any tokens where forced."""
    task, tokenizer = load_task(config.task, config.seed), load_tokenizer(model_path)
    work, sequences = work_of(config.max_response_tokens), []
    for index in range(count):
        problem = task.train_problem(index // config.group_size)
        response = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]
        if work.forced:
            response = random.Random(index).choices(
                range(tokenizer.vocab_size), k=work.length(index)
            )
        prompt = task.encode_prompt(problem, tokenizer)
        sequences.append(made_up([*prompt, *response], len(prompt), index, logprob=-1.0))
    return sequences


class PlainStep:
    """Forward, backward, clipping and AdamW on micro-batches that are packed already: no loss but −A·log p."""

    def __init__(self, config: Config, model_path: str):
        from transformers import AutoModelForCausalLM

        self.config = config
        options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        self.model = AutoModelForCausalLM.from_pretrained(model_path, **options).eval()
        self.optimizer = make_optimizer(
            config, [{"params": self.model.parameters(), "lr": config.lr}]
        )

    def step(self, batches: list[MicroBatch]) -> None:
        """One optimizer update."""
        tokens = sum(len(batch.targets) for batch in batches)
        for batch in batches:
            hidden = self.model.base_model(
                batch.input_ids, position_ids=batch.position_ids, use_cache=False
            )
            rows = hidden.last_hidden_state.flatten(0, 1).index_select(0, batch.sources)
            logprobs = (
                self.model.lm_head(rows)
                .log_softmax(dim=-1)
                .gather(1, batch.targets[:, None])
                .squeeze(1)
            )
            (-(logprobs * batch.advantages).sum() / tokens).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def training(who: str, work: Work, steps: int, logs: Path) -> Iterator[Measure]:
    """Tokens per second, prompts included, of train_step or of the plain step."""
    # Else the policy would collapse on the same tokens, and steps would take longer.
    config = replace(work.config(), lr=NO_LEARNING)
    path = resolve_model(config.model, config.task)
    sequences = make_sequences(config, path)
    ((update,),) = distribute([sequences], 1, config.max_tokens_per_microbatch)
    if who == "ours":
        policy = load_policy(config, path, torch.device("cpu"))
        step = partial(policy.train_step, [update], 0)
    else:
        step = partial(PlainStep(config, path).step, [pack(m, one_row=False) for m in update])

    def measure() -> dict:
        start = time.monotonic()
        for _ in range(steps):
            step()
        return {
            "tokens_per_s": steps
            * sum(len(s.tokens) for s in sequences)
            / (time.monotonic() - start)
        }

    yield measure


# Whole steps


@contextmanager
def stepping(config: Config, steps: int, logs: Path, halves: bool) -> Iterator[Measure]:
    """Whole steps of train_async.py; and with `halves`, of the same loop without training and of training alone.

    The job is up only while it is measured: of several at a time, one engine alone would have cores of its own.
    """

    def measure() -> dict:
        with running(
            TrainingRig(config, logs / f"a{config.async_ratio:g}_{time.time_ns()}", run_work_worker)
        ) as rig:
            whole_steps(rig, steps)  # to warm up
            found = whole_steps(rig, steps)
            if halves:
                found["generate_alone_s"] = whole_steps(rig, steps, train=False)["step_s"]
                start = time.monotonic()
                for index in range(steps):
                    rig.train(rig.batches[index % len(rig.batches)])
                found["train_alone_s"] = (time.monotonic() - start) / steps
        return found

    yield measure


def whole_steps(rig: TrainingRig, steps: int, train: bool = True) -> dict:
    """Steady state over `steps` steps, after as many as wait already; then the workers come to rest."""
    for _ in range(math.ceil(rig.config.async_ratio) + 1):
        rig.step(train)
    start, before = time.monotonic(), cpu_seconds(rig)
    for _ in range(steps):
        rig.step(train)
    seconds, after = time.monotonic() - start, cpu_seconds(rig)
    metrics = read(rig.node.run.path / "metrics.jsonl")[-steps:]
    rig.wait_until_idle()
    return {
        "step_s": seconds / steps,
        "tokens_per_step": statistics.fmean(
            sum(t.num_generated for group in batch for t in group.trajectories)
            for batch in rig.batches
        ),
        "pause_s": statistics.fmean(
            m["rollout/pause_s"] for m in metrics if "rollout/pause_s" in m
        ),
        "cpu_s": {who: (after[who] - before[who]) / steps for who in after},
        **{
            f"{what}_s": statistics.median(m[f"time/{what}_s"] for m in metrics)
            for what in ("wait", "train", "publish")
        },
    }


def cpu_seconds(rig: Rig) -> dict[str, float]:
    """CPU time so far of this process, of the workers, of their engines, and of what scores for them."""
    used = {"trainer": time.process_time(), "worker": 0.0, "engine": 0.0, "rewards": 0.0}
    for process in (psutil.Process(one.process.process.pid) for one in rig.controller.workers):
        used["worker"] += sum(process.cpu_times()[:2])
        for child in process.children(recursive=True):
            is_engine = "".join(child.cmdline()[:1]).startswith("engine ")
            used["engine" if is_engine else "rewards"] += sum(child.cpu_times()[:2])
    return used


# What is recorded and shown


PARTS: dict[str, dict] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Name of each part -> what is shown of it, and how; parts.toml says what is what."""


def record(name: str, ours: float, limit: float, **more) -> dict:
    """One measurement of a part; `more` are numbers beside it."""
    ratio = limit / ours if "speed_up" in PARTS[name] else ours / limit
    return {"part": name, "ours": ours, "limit": limit, "ratio": ratio, **more}


def against_plain(name: str, found: dict[str, dict]) -> list[dict]:
    """Ours against the plain arm."""
    return [record(name, found["ours"]["tokens_per_s"], found["plain"]["tokens_per_s"])]


def against_synchronous(found: dict[str, dict]) -> Iterator[dict]:
    """Overlap, pause and speed-up over α = 0."""
    for ratio in (1, 2):
        m = found[f"α={ratio}"]
        yield record(
            f"overlap α={ratio}", m["step_s"], max(m["generate_alone_s"], m["train_alone_s"]), **m
        )
        yield record(f"pause α={ratio}", m["pause_s"], m["step_s"])
        yield record(f"speed-up natural α={ratio}", m["step_s"], found["α=0"]["step_s"])


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """All parts, in the size that is asked for."""
    steps = STEPS[given.size]
    for work in (NATURAL, LONG):
        arms = [Arm(who, partial(training, who, work, steps)) for who in ("ours", "plain")]
        yield Case(f"trainer {work.name}", arms, partial(against_plain, f"trainer {work.name}"))
    configs = [NATURAL.config(async_ratio=ratio) for ratio in (0.0, 1.0, 2.0)]
    arms = [
        Arm(f"α={c.async_ratio:g}", partial(stepping, c, steps, halves=c.async_ratio > 0))
        for c in configs
    ]
    yield Case("job", arms, against_synchronous, warm_up=0)


# Tables


def table(records: list[dict]) -> list[str]:
    """Markdown lines, one per part; medians with minimum and maximum."""
    heading = ["part", "what", "n", "ours", "limit", "ratio", "target", "reached", "against"]
    return markdown(heading, rows(records))


def rows(records: list[dict]) -> Iterator[list[str]]:
    """The cells of each part."""
    of_parts = harness.rounds(records, "part")
    for name, part, found in (
        (name, part, of_parts[name]) for name, part in PARTS.items() if name in of_parts
    ):
        form, factor = part.get("form", ".3f"), part.get("factor", 1.0)
        columns = [Column("ours", "ours", form, factor), Column("limit", "limit", form, factor)]
        columns.append(
            Column("ratio", "ratio", ".3f", better=part.get("better", 1), target=part.get("target"))
        )
        cells = [cell for column in columns for cell in column.cells(found, found)]
        yield [
            name,
            part["ours"],
            str(len(found)),
            *cells,
            *["–"] * (5 - len(cells)),
            part.get("limit", "–"),
        ]


def summary(records: list[dict]) -> list[str]:
    """Markdown lines of the parts that have a limit: ratio and target."""
    of_limit = (
        (r[0], r[1].split(",")[0], r[8], *r[5:8]) for r in rows(records) if "limit" in PARTS[r[0]]
    )
    return markdown(["part", "what", "against", "ours ÷ limit", "target", "reached"], of_limit)


def cpu_table(records: list[dict]) -> list[str]:
    """Markdown lines: where the CPU time of a whole step goes, for each part that recorded it."""
    of_parts = harness.rounds(
        (r["cpu_s"] | {"part": r["part"]} for r in records if "cpu_s" in r), "part"
    )
    columns = [
        Column(who, f"{who}, ms", ".0f", 1e3) for who in ("trainer", "worker", "engine", "rewards")
    ]
    return harness.table("CPU time per step", of_parts, columns) if of_parts else []


def report(records: list[dict]) -> Iterable[str]:
    """Paragraphs of the page."""
    how = "Ratios are of measurements that were made one after the other; of speed-ups they are limit ÷ ours."
    return [how, "\n".join(table(records)), "\n".join(cpu_table(records))]


BENCH = Bench(
    "parts", "The parts against their limits", cases, report, key=("part",), shown="ratio"
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    with one_rank():
        harness.main(BENCH)
