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
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import load_policy
from extras.planning.shape import ModelShape, read_shape
from scripts.bench.harness import ROOT
from scripts.qwen3_shapes import save_random_qwen3

TRAIN_STEPS = 4
"""Of which the first warms up."""


@dataclass(frozen=True)
class Setup:
    """Where and what to measure."""

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
            # elsewhere, so that no context and no memory of it is here when an engine starts
            if self.device == "cuda":
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
                    elsewhere.submit(save_random_qwen3, making, self.size, self.device).result()
            else:
                save_random_qwen3(making, self.size)
            making.rename(path)
        return str(path)

    def config(self, **options) -> Config:
        """Options of a run with this model: on a GPU 256 responses of 256 tokens a step, else a few short ones."""
        big = {
            "groups_per_step": 32,
            "group_size": 8,
            "max_response_tokens": 256,
            "max_running_requests": 256,
        }
        few = {
            "groups_per_step": 2,
            "group_size": 2,
            "max_response_tokens": 16,
            "max_running_requests": 8,
        }
        fixed = {
            "model": self.model_path,
            "env_timeout_s": 30.0,
            "optim": OptimOptions(warmup=0),
            "lr": 1e-5,
        }
        return Config(**{**(few if self.size == "tiny" else big), **fixed, **options}).checked()


def trainer(setup: Setup) -> dict:
    """Training steps on synthetic sequences, without an engine: tokens/s, and the share of the matmul rate."""
    lengths = [32, 48, 64, 16] if setup.size == "tiny" else [512] * 64
    config, shape = setup.config(algo="tis", max_prompt_tokens=256), read_shape(setup.model_path)
    rate = matmul_rate(setup.device)
    sequences = synthetic(lengths, shape.vocab_size)
    with one_rank(setup.device):
        policy = load_policy(config, setup.model_path, torch.device(setup.device))
        share = distribute([sequences], 1, config.max_tokens_per_microbatch)[0]
        steps = [
            timed(lambda: policy.train_step(share, policy_version=0), setup.device)[0]
            for _ in range(TRAIN_STEPS)
        ]
        attention = policy.module.attention
    flops = training_flops(shape, lengths, sum(sequence.num_trained for sequence in sequences))
    return {
        "attention": attention,
        **throughput(sum(lengths), flops, steps[1:], rate),
        **peak_memory(setup.device),
    }


def matmul_rate(device: str) -> float:
    """FLOP/s of a large square matmul in the dtype that the trainer computes in: what there is to be had."""
    n, dtype = 8192 if device == "cuda" else 512, getattr(torch, Config().dtype_on(device))
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    seconds, _ = timed(lambda: [a @ b for _ in range(30)], device)
    return 2 * n**3 * 30 / seconds


def training_flops(shape: ModelShape, lengths: list[int], num_trained: int) -> float:
    """FLOPs of a forward and backward pass over sequences of these lengths; `num_trained` tokens meet the head.

    Six per weight and token (two forward, four backward), the embedding left out as it is looked up; and in attention
    six times queries' width × length² per layer: half of a square, as it is causal, for scores and for values. What is
    computed twice counts once.
    """
    in_layers = shape.layer_parameters * shape.num_layers * sum(lengths)
    in_head = shape.vocab_size * shape.hidden_size * num_trained
    in_attention = (
        shape.num_layers * shape.num_attention_heads * shape.head_dim * sum(t * t for t in lengths)
    )
    return 6.0 * (in_layers + in_head + in_attention)


def throughput(
    num_tokens: int, flops: float, steps_s: list[float], matmul_flops_per_s: float
) -> dict[str, float]:
    """Tokens/s of the median step, its FLOP/s, and that over the matmul rate (MFU)."""
    seconds = statistics.median(steps_s)
    return {
        "step_s": seconds, "spread_s": float(np.ptp(steps_s)), "steps": len(steps_s),
        "tokens_per_s": num_tokens / seconds, "tflops": flops / seconds / 1e12,
        "matmul_tflops": matmul_flops_per_s / 1e12, "mfu": flops / seconds / matmul_flops_per_s,
    }  # fmt: skip


def synthetic(lengths: list[int], vocabulary: int) -> list[TrainSequence]:
    """Random sequences with a prompt of a quarter of their length, and log-probs that are about a random model's."""
    rng, logprob = np.random.default_rng(0), -math.log(vocabulary)
    return [
        made_up(rng.integers(0, vocabulary, n), n // 4, i, logprob) for i, n in enumerate(lengths)
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
    """A sequence as if version 0 had sampled all but its prompt, each token at `logprob` nats; every second is good."""
    mask = np.arange(len(tokens)) >= prompt_tokens
    logprobs, versions = (
        np.where(mask, logprob, 0.0).astype(np.float32),
        np.where(mask, 0, -1).astype(np.int32),
    )
    good = index % 2
    return TrainSequence(
        np.array(tokens, dtype=np.int64), mask, logprobs, versions, 2.0 * good - 1.0, float(good)
    )


def timed(action: Callable, device: str) -> tuple[float, object]:
    """Seconds that an action takes, GPU included, and its result."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    result = action()
    synchronize()
    return time.perf_counter() - start, result


def peak_memory(device: str) -> dict[str, float]:
    """Most that tensors of this process held, and what all processes hold now, GiB; nothing on the CPU."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "trainer_peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "gpu_used_gib": (total - free) / 2**30,
    }


def tests(_: Setup, files: Sequence[str]) -> dict:
    """Tests that need a GPU. Raises CalledProcessError if one fails."""
    paths = [f"tests/gpu/test_gpu_{file}.py" for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *paths]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(result.stdout, flush=True)
    result.check_returncode()
    return {"summary": result.stdout.strip().splitlines()[-1].strip("= ")}


FUNCTIONS = {
    "trainer": trainer,
    "tests-trainer": functools.partial(tests, files=("trainer", "prefix_and_lora")),
    "tests-engine": functools.partial(tests, files=("engine", "job", "nccl")),
}
"""What a part is called -> what it does; gpu_parts.py has those that need vLLM here."""
