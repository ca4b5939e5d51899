"""The GPU bench's parts without rollout, which need no vLLM, and what they share with the others."""

import functools
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.dealing import distribute
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import load_policy
from extras.planning.shape import ModelShape, read_shape
from scripts.bench.harness import ROOT, tables_beside
from scripts.qwen3_shapes import save_random_qwen3

JOBS = tables_beside(Path(__file__).with_name("gpu.py"))["jobs"]
TRAIN_STEPS = 4
"""Of which the first warms up."""


@dataclass(frozen=True)
class Setup:
    """The device to measure on, and what is measured there."""

    device: str
    size: str
    """A key of SHAPES."""
    models: Path
    """Folder in which each random model is made once."""

    @property
    def model_path(self) -> str:
        """The random model of this size, made if it is not there."""
        path = self.models / self.size
        if not path.exists():
            making = path.with_name(path.name + "-making")
            # in another process, so that no context and no memory of it is here when an engine starts
            if self.device == "cuda":
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    process.submit(save_random_qwen3, making, self.size, self.device).result()
            else:
                save_random_qwen3(making, self.size)
            making.rename(path)
        return str(path)

    def config(self, **options) -> Config:
        """Return the options of a run with this model: a few short responses if it is tiny."""
        sizes = JOBS["tiny" if self.size == "tiny" else "full"]
        fixed = {"model": self.model_path, "env_timeout_s": 30.0, "lr": 1e-5}
        return Config(**(sizes | fixed | options), optim=OptimOptions(warmup=0)).checked()


def trainer(setup: Setup, budget: int = 16384) -> dict:
    """Make training steps on synthetic sequences, without an engine: tokens/s, and the share of the matmul rate.

    `budget` is the most tokens of a micro-batch.
    """
    lengths = [32, 48, 64, 16] if setup.size == "tiny" else [512] * 64
    options = {"algo": "tis", "max_prompt_tokens": 256, "max_tokens_per_microbatch": budget}
    config, shape = setup.config(**options), read_shape(setup.model_path)
    rate = matmul_rate(setup.device)
    sequences = synthetic(lengths, shape.vocab_size)
    with one_rank(setup.device):
        policy = load_policy(config, setup.model_path, torch.device(setup.device))
        share = distribute([sequences], 1, config.max_tokens_per_microbatch)[0]
        train_step = functools.partial(policy.train_step, share, policy_version=0)
        steps_s = [timed(train_step, setup.device)[0] for _ in range(TRAIN_STEPS)]
    flops = training_flops(shape, lengths, sum(sequence.num_trained for sequence in sequences))
    step_s = statistics.median(steps_s[1:])
    return {
        "attention": policy.module.attention, "step_s": step_s, "spread_s": float(np.ptp(steps_s[1:])),
        "steps": len(steps_s) - 1, "tokens_per_s": sum(lengths) / step_s, "tflops": flops / step_s / 1e12,
        "matmul_tflops": rate / 1e12, "mfu": flops / step_s / rate, **peak_memory(setup.device),
    }  # fmt: skip


def matmul_rate(device: str) -> float:
    """Return the FLOP/s of a large square matmul in the dtype that the trainer computes in: what there is to be had."""
    n, dtype = 8192 if device == "cuda" else 512, getattr(torch, Config().dtype_on(device))
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    seconds, _ = timed(lambda: [a @ b for _ in range(30)], device)
    return 2 * n**3 * 30 / seconds


def training_flops(shape: ModelShape, lengths: list[int], num_trained: int) -> float:
    """Return the FLOPs of a forward and backward pass over sequences; `num_trained` tokens meet the head.

    Six per weight and token (two forward, four backward), the embedding left out as it is looked up; and in attention
    six times queries' width × length² per layer: half of a square, as it is causal, for scores and for values. What is
    computed twice counts once.
    """
    in_layers = shape.layer_parameters * shape.num_layers * sum(lengths)
    in_head = shape.vocab_size * shape.hidden_size * num_trained
    query_width = shape.num_attention_heads * shape.head_dim
    in_attention = shape.num_layers * query_width * sum(length**2 for length in lengths)
    return 6.0 * (in_layers + in_head + in_attention)


def synthetic(lengths: list[int], vocabulary: int) -> list[TrainSequence]:
    """Return random sequences whose prompt is a quarter of them, with log-probs about as those of a random model."""
    rng, logprob = np.random.default_rng(0), -math.log(vocabulary)
    return [
        made_up(rng.integers(0, vocabulary, length), length // 4, index, logprob)
        for index, length in enumerate(lengths)
    ]


@contextmanager
def one_rank(device: str = "cpu") -> Iterator[None]:
    """A process group of this process alone, which FSDP2 needs."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def made_up(
    tokens: Sequence[int], prompt_tokens: int, index: int, logprob: float = 0.0
) -> TrainSequence:
    """Return a sequence as if version 0 had sampled all but its prompt, each token at `logprob` nats.

    Every second one earned a reward.
    """
    mask = np.arange(len(tokens)) >= prompt_tokens
    reward = float(index % 2)
    return TrainSequence(
        tokens=np.array(tokens, dtype=np.int64),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        advantage=2.0 * reward - 1.0,
        reward=reward,
    )


def timed(action: Callable, device: str) -> tuple[float, object]:
    """Return the seconds that an action takes, GPU included, and its result."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    result = action()
    synchronize()
    return time.perf_counter() - start, result


def peak_memory(device: str) -> dict[str, float]:
    """Return the most that tensors of this process held and that torch took for them, and what all processes hold now,
    GiB; nothing on the CPU."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    return {
        "trainer_peak_gib": peak / 2**30, "reserved_over_peak": reserved / peak,
        "gpu_used_gib": (total - free) / 2**30,
    }  # fmt: skip


def tests(_: Setup, paths: Sequence[str], marker: str = "gpu") -> dict:
    """Run tests, by default those that need a GPU. Raises CalledProcessError if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, *paths]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(result.stdout, flush=True)
    result.check_returncode()
    return {"summary": result.stdout.strip().splitlines()[-1].strip("= ")}


FUNCTIONS = {
    "trainer": trainer,
    "trainer-long": functools.partial(trainer, budget=8192),
    "trainer-short": functools.partial(trainer, budget=2048),
    "tests-trainer": functools.partial(tests, paths=("tests/gpu/test_gpu_trainer.py",)),
    "tests-cpu": functools.partial(
        tests, paths=("tests/algos", "tests/trainer"), marker="not slow and not study and not e2e"
    ),
    "tests-engine": functools.partial(
        tests, paths=[f"tests/gpu/test_gpu_{part}.py" for part in ("engine", "job", "nccl")]
    ),
}
"""What a part is called -> what it does; gpu_parts.py has those that need vLLM here."""
