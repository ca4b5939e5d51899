"""The GPU bench's parts without an engine, and code that all parts share. They need no vLLM."""

import functools
import math
import multiprocessing
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.packing import TrainSequence
from asyncrl.trainer.policy import Policy, load_policy
from asyncrl.trainer.splitting import distribute
from extras.planning.shape import ModelShape, read_shape
from scripts.lines import ROOT
from scripts.qwen3_shapes import save_random_qwen3

JOBS = tomllib.loads(Path(__file__).with_name("gpu.toml").read_text(encoding="utf-8"))["jobs"]
TRAIN_STEPS = 4
"""Steps of training. The first one warms up."""
LENGTHS, TINY_LENGTHS = [512] * 64, [32, 48, 64, 16]
"""Tokens of the sequences of a step."""
NCCL_TESTS = ("tests/gpu/test_gpu_nccl.py",)
PROFILE_ROWS = 50
"""Kernels that a profile lists: the costliest."""


@dataclass(frozen=True)
class Setup:
    """The device to measure on, and what is measured there."""

    device: str
    size: str
    """A key of SHAPES."""
    models: Path
    """Folder of the random models. Each is made once."""

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
        return Config(**(sizes | fixed | options), optim=OptimOptions(warmup_steps=0)).checked()


@contextmanager
def training(
    setup: Setup, lengths: list[int], budget: int = 16384, prompt_share: float = 0.25
) -> Iterator[tuple[Policy, Callable, list[TrainSequence]]]:
    """Yield a policy, what makes a training step without an engine, and the synthetic sequences of that.

    They have these lengths, unless the model is tiny. `budget` is the most tokens of a micro-batch.
    """
    options = {"algo": "tis", "max_prompt_tokens": 256, "max_tokens_per_microbatch": budget}
    config, shape = setup.config(**options), read_shape(setup.model_path)
    lengths = TINY_LENGTHS if setup.size == "tiny" else lengths
    sequences = synthetic(lengths, shape.vocab_size, prompt_share)
    with one_rank(setup.device):
        policy = load_policy(config, setup.model_path, torch.device(setup.device))
        share = distribute([sequences], 1, budget)[0]
        train_step = functools.partial(policy.train_step, share, policy_version=0)
        yield policy, train_step, sequences


def trainer(setup: Setup, budget: int = 16384) -> dict:
    """Make training steps: tokens/s, and the share of the matmul rate."""
    rate = matmul_rate(setup.device)
    with training(setup, LENGTHS, budget) as (policy, train_step, sequences):
        steps_s = [timed(train_step, setup.device)[0] for _ in range(TRAIN_STEPS)]
    lengths = [len(sequence.tokens) for sequence in sequences]
    num_trained = sum(sequence.num_trained for sequence in sequences)
    flops = training_flops(read_shape(setup.model_path), lengths, num_trained)
    step_s = statistics.median(steps_s[1:])
    return {
        "attention": policy.module.attention, "step_s": step_s, "spread_s": float(np.ptp(steps_s[1:])),
        "steps": len(steps_s) - 1, "tokens_per_s": sum(lengths) / step_s, "tflops": flops / step_s / 1e12,
        "matmul_tflops": rate / 1e12, "mfu": flops / step_s / rate, **peak_memory(setup.device),
    }  # fmt: skip


def profile(setup: Setup, lengths: list[int] = LENGTHS, prompt_share: float = 0.25) -> dict:
    """Profile a training step: its costliest kernels, or operations on the CPU. The profiler makes a step longer."""
    with training(setup, lengths, prompt_share=prompt_share) as (_, train_step, _):
        for _ in range(TRAIN_STEPS - 1):
            train_step()
        with torch.profiler.profile() as profiler:
            step_s, _ = timed(train_step, setup.device)
    clock = "self_device_time_total" if setup.device == "cuda" else "self_cpu_time_total"
    averages = profiler.key_averages()
    return {"step_s": step_s, "kernels": averages.table(sort_by=clock, row_limit=PROFILE_ROWS)}


def matmul_rate(device: str) -> float:
    """Return the FLOP/s of a large square matmul in the trainer's dtype, the most that training can reach."""
    n, dtype = 8192 if device == "cuda" else 512, getattr(torch, Config().dtype_on(device))
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    seconds, _ = timed(lambda: [a @ b for _ in range(30)], device)
    return 2 * n**3 * 30 / seconds


def training_flops(shape: ModelShape, lengths: list[int], num_trained: int) -> float:
    """Return the FLOPs of a forward and backward pass over sequences; `num_trained` tokens meet the head.

    Each weight and token counts six (two forward, four backward). The embedding is left out, because it is looked up.
    Attention counts six times queries' width × length² per layer. That is half of a square for scores and for values,
    because it is causal. Recomputation does not count.
    """
    in_layers = shape.layer_parameters * shape.num_layers * sum(lengths)
    in_head = shape.vocab_size * shape.hidden_size * num_trained
    query_width = shape.num_attention_heads * shape.head_dim
    in_attention = shape.num_layers * query_width * sum(length**2 for length in lengths)
    return 6.0 * (in_layers + in_head + in_attention)


def synthetic(
    lengths: list[int], vocabulary: int, prompt_share: float = 0.25
) -> list[TrainSequence]:
    """Return random sequences that begin with a prompt, with log-probs about as those of a random model."""
    rng, logprob = np.random.default_rng(0), -math.log(vocabulary)
    return [
        made_up(rng.integers(0, vocabulary, length), int(length * prompt_share), index, logprob)
        for index, length in enumerate(lengths)
    ]


@contextmanager
def one_rank(device: str = "cpu") -> Iterator[None]:
    """A process group of only this process, because FSDP2 needs one."""
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
    """Return the peaks of this process's tensors and of torch's memory for them, and the use by all processes, GiB.

    It is empty on the CPU.
    """
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    return {
        "trainer_peak_gib": peak / 2**30, "reserved_gib": reserved / 2**30, "reserved_over_peak": reserved / peak,
        "gpu_used_gib": (total - free) / 2**30,
    }  # fmt: skip


def tests(_: Setup, paths: Sequence[str], marker: str = "gpu", names: str = "") -> dict:
    """Run tests, by default the tests that need a GPU; `names` selects some. Raises CalledProcessError if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-k", names, *paths]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(result.stdout, flush=True)
    result.check_returncode()
    return {"summary": result.stdout.strip().splitlines()[-1].strip("= ")}


FUNCTIONS = {
    "trainer": trainer,
    "profile": profile,
    "profile-job": functools.partial(profile, lengths=[272] * 128, prompt_share=1 / 17),
    "trainer-whole": functools.partial(trainer, budget=32768),
    "trainer-long": functools.partial(trainer, budget=8192),
    "trainer-short": functools.partial(trainer, budget=2048),
    "tests-trainer": functools.partial(tests, paths=("tests/gpu/test_gpu_trainer.py",)),
    "tests-cpu": functools.partial(
        tests, paths=("tests/algos", "tests/trainer"), marker="not slow and not study and not e2e"
    ),
    "tests-engine": functools.partial(tests, paths=("tests/gpu/test_gpu_engine.py",)),
    "tests-job": functools.partial(tests, paths=("tests/gpu/test_gpu_job.py",)),
    "tests-ranks": functools.partial(tests, paths=NCCL_TESTS, names="not job"),
    **{
        f"tests-nccl-{name}": functools.partial(tests, paths=NCCL_TESTS, names=f"job and {name}]")
        for name in ("two", "shm", "three", "four", "tp")
    },
}
"""Name of a part -> its function. gpu_parts.py has the parts that need vLLM here."""
