"""The trainer alone, on synthetic sequences: tokens/s, and its FLOPs against those of a matmul in the same process."""

import math
import statistics

import numpy as np

from cluster.shape import ModelShape, read_shape
from scripts.bench_gpu_setup import Setup, one_rank, peak_memory, timed

TRAIN_STEPS = 4
"""Of which the first warms up."""


def matmul_rate(device: str) -> float:
    """FLOP/s of a large square matmul in the dtype that the trainer computes in: what there is to be had."""
    import torch

    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    repeats = 30
    seconds, _ = timed(lambda: [a @ b for _ in range(repeats)], device)
    return 2 * n**3 * repeats / seconds


def training_flops(shape: ModelShape, lengths: list[int], num_trained: int) -> float:
    """FLOPs of a forward and backward pass over sequences of these lengths; `num_trained` tokens meet the head.

    Six per weight and token (two forward, four backward), the embedding left out as it is looked up; and in attention
    six times queries' width × length² per layer: half of a square, as it is causal, for scores and for values. What is
    computed twice counts once.
    """
    in_layers = shape.layer_parameters * shape.num_layers * sum(lengths)
    in_head = shape.vocab_size * shape.hidden_size * num_trained
    in_attention = shape.num_layers * shape.num_attention_heads * shape.head_dim * sum(t * t for t in lengths)
    return 6.0 * (in_layers + in_head + in_attention)


def trainer(setup: Setup) -> dict:
    """Training steps on synthetic sequences, without an engine: tokens/s, and the share of the matmul rate."""
    import torch

    from trainer.batch import distribute
    from trainer.policy import load_policy

    lengths = [32, 48, 64, 16] if setup.size == "tiny" else [512] * 64
    config, shape = setup.config(algo="tis", max_prompt_tokens=256), read_shape(setup.model_path)
    rate = matmul_rate(setup.device)
    sequences = synthetic(lengths, shape.vocab_size)
    with one_rank(setup.device):
        policy = load_policy(config, setup.model_path, torch.device(setup.device))
        share = distribute([sequences], 1, config.max_tokens_per_microbatch)[0]
        steps = [timed(lambda: policy.train_step(share, policy_version=0), setup.device)[0] for _ in range(TRAIN_STEPS)]
        attention = policy.attention
    flops = training_flops(shape, lengths, sum(sequence.num_trained for sequence in sequences))
    return {"attention": attention, **throughput(sum(lengths), flops, steps[1:], rate), **peak_memory(setup.device)}


def throughput(num_tokens: int, flops: float, steps_s: list[float], matmul_flops_per_s: float) -> dict[str, float]:
    """Tokens/s of the median step, its FLOP/s, and that over the matmul rate (MFU)."""
    seconds = statistics.median(steps_s)
    return {
        "step_s": seconds,
        "spread_s": max(steps_s) - min(steps_s),
        "steps": len(steps_s),
        "tokens_per_s": num_tokens / seconds,
        "tflops": flops / seconds / 1e12,
        "matmul_tflops": matmul_flops_per_s / 1e12,
        "mfu": flops / seconds / matmul_flops_per_s,
    }


def synthetic(lengths: list[int], vocabulary: int) -> list:
    """Random sequences with a prompt of a quarter of their length, and log-probs that are about a random model's."""
    from trainer.packing import TrainSequence

    rng = np.random.default_rng(0)
    sequences = []
    for index, length in enumerate(lengths):
        mask = np.arange(length) >= length // 4
        logprobs = np.where(mask, -math.log(vocabulary), 0.0).astype(np.float32)
        versions = np.where(mask, 0, -1).astype(np.int32)
        advantage = 1.0 if index % 2 else -1.0
        sequences.append(
            TrainSequence(rng.integers(0, vocabulary, length), mask, logprobs, versions, advantage, max(advantage, 0.0))
        )
    return sequences
