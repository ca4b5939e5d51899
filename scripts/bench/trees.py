"""What it saves to read shared prefixes once, on SmolLM2-135M on the CPU: `python scripts/bench/trees.py`.

The trainer makes its own steps on made-up tokens: bundling, packing, forward, backward, clipping and AdamW, at a
learning rate that leaves the weights as they are. *branches* is what agents with sub-agents make: branches that begin
with a long context. *turns* is a game of several turns, whose members share a prompt alone. In *singles* next to
nothing is shared. Each value of --share-prefix has a process of its own with one thread; they take turns. There is no
page of a round in which their gradient norms differ. Memory is the most that a process held in its steps.
"""

import functools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.config import Config
from asyncrl.trainer.dealing import distribute
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import Policy, load_policy
from asyncrl.weights.models import resolve_model
from scripts.bench import harness
from scripts.bench.harness import ROOT, Arguments, Bench, Case, Column, Measure, rounds
from scripts.bench.workloads import NO_LEARNING

ARMS = ("off", "tree", "auto")
"""Values of --share-prefix."""
TOLERANCE = 5e-2
"""How much gradient norms may differ by rounding to bfloat16, relative."""
VOCABULARY = 49_000
TABLES = harness.tables_beside(__file__)


def make_update(
    *, groups: int, members: int, common: int, prompt: int, response: list[int], branches: int
) -> list[TrainSequence]:
    """Return the sequences of an update; their log-probs are 0."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(0, VOCABULARY, common)
    sequences = []
    for group_id in range(groups):
        question = np.concatenate([beginning, rng.integers(0, VOCABULARY, prompt)])
        for number in range(members * branches):
            said = rng.integers(0, VOCABULARY, rng.integers(response[0], response[1] + 1))
            tokens = np.concatenate([question, said])
            mask = np.arange(len(tokens)) >= len(question)
            logprobs = np.zeros(len(tokens), np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            reward = float(number // branches % 2)
            sequences.append(
                TrainSequence(tokens, mask, logprobs, versions, 2 * reward - 1, reward, group_id)
            )
    return sequences


def as_sampled(policy: Policy, update: list[TrainSequence]) -> list[TrainSequence]:
    """Return sequences with the policy's own log-probs: far ones would be clipped, or not, by rounding."""
    scores = policy.score([[sequence] for sequence in update])
    sequences = []
    for sequence, scored in zip(update, scores, strict=True):
        logprobs = np.zeros_like(sequence.behavior_logprobs)
        logprobs[sequence.loss_mask] = scored
        sequences.append(replace(sequence, behavior_logprobs=logprobs))
    return sequences


@dataclass(frozen=True)
class Loaded:
    """What the process of an arm trains, and on what."""

    policy: Policy
    update: list[TrainSequence]


@functools.cache
def load(workload: str, share_prefix: str) -> Loaded:
    """Load SmolLM2 and the update of a workload, once in each process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = Config(
        model="smollm2", dtype="bfloat16", task="sums:one_digit", share_prefix=share_prefix, lr=NO_LEARNING,
    ).checked()  # fmt: skip
    path = resolve_model(config.model, config.task)
    policy = load_policy(config, path, torch.device("cpu"))
    return Loaded(policy, as_sampled(policy, make_update(**TABLES["workloads"][workload])))


def measure(workload: str, share_prefix: str) -> dict:
    """Make a training step."""
    arm = load(workload, share_prefix)
    # the most that was held is counted anew
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    start = time.perf_counter()
    module, config = arm.policy.module, arm.policy.config
    (share,) = distribute(
        [arm.update], 1, config.max_tokens_per_microbatch, share_prefix, module.cost, module.layout
    )
    choosing = time.perf_counter() - start
    metrics = arm.policy.train_step(share, policy_version=0)
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text(encoding="ascii").split()
    names = ("grad_norm", "tokens/shareable", "tokens/saved_share", "tokens/forward")
    return {
        "seconds": seconds, "choosing": choosing, "peak": 1024 * int(status[status.index("VmHWM:") + 1]),
        **{name: metrics[name] for name in names},
    }  # fmt: skip


@contextmanager
def start(workload: str, share_prefix: str, logs: Path) -> Iterator[Measure]:
    """An arm, in a process of its own so that its memory is too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda: process.submit(measure, workload, share_prefix).result()


def cases(given: Arguments) -> Iterator[Case]:
    """Yield every workload, with an arm for each way to share."""
    for workload in TABLES["workloads"]:
        arms = {arm: functools.partial(start, workload, arm) for arm in ARMS}
        yield Case(workload, arms, memory=14e9)


def tables(records: list[dict]) -> Iterator[str]:
    """Yield a table of each workload: a row for each way to share.

    Raises RuntimeError if the arms of a round have different gradients, or none.
    """
    columns = [Column(**column) for column in TABLES["columns"]]
    for workload, measured in rounds(records, "case").items():
        for of_round in rounds(measured, "repeat").values():
            norms = {record["arm"]: record["grad_norm"] for record in of_round}
            if not 0 < max(norms.values()) <= min(norms.values()) * (1 + TOLERANCE):
                raise RuntimeError(f"gradient norms are {norms}: they must agree, above 0")
        yield "\n".join(harness.table(workload, rounds(measured, "arm"), columns))


DEFAULTS = Arguments(out=ROOT / "results/sharing")
BENCH = Bench("trees", "Shared prefixes, chosen by cost", cases, tables, ("case", "arm"), DEFAULTS)

if __name__ == "__main__":
    harness.main(BENCH)
