"""The trainer's options on one GPU, without an engine: the same updates in bfloat16, and the memory that each saves.

A random Qwen3 of 8 layers with the vocabulary of the real one, 0.29 B parameters: 64 sequences of 64 to 256 tokens, or
8 groups of 8 sequences that share their prompts.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dense_varlen import backward, forward
from tiny_policy import grouped_sequences, random_sequences
from torch.nn.attention.varlen import varlen_attn

import asyncrl.trainer.model
from asyncrl.config import Config, OptimOptions
from asyncrl.trainer.policy import load_policy
from asyncrl.trainer.splitting import distribute
from scripts.qwen3_shapes import save_random_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

STEPS = 4
GIB = 2**30
AS_IT_IS = {"compile": False}
"""Layers that are not compiled, so that a process takes seconds."""
OPTIONS = {
    "plain": AS_IT_IS,
    "head": AS_IT_IS | {"save_memory": ("head",)},
    "activations": AS_IT_IS | {"save_memory": ("activations",)},
    "optimizer": AS_IT_IS | {"save_memory": ("optimizer",)},
    "default": {},
    "sdpa": AS_IT_IS,
}
GROUPED_OPTIONS = {
    "grouped": AS_IT_IS,
    "share_prefix": AS_IT_IS | {"share_prefix": "prompt"},
    "share_prefix_compiled": {"share_prefix": "tree"},
    "lora": AS_IT_IS | {"lora_rank": 8, "lr": 1e-3},
    "lora_compiled": {"lora_rank": 8, "lr": 1e-3},
}
"""The same on groups that share their prompts."""


def measure(rank: int, path: str, name: str, result: str) -> None:
    """Body of a spawned rank: train STEPS steps with one of the options, and write what came of it to `result`."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    if name == "sdpa":
        asyncrl.trainer.model.choose_attention = lambda *_: "sdpa"
    fixed = {"model": path, "algo": "tis", "lr": 1e-5, "optim": OptimOptions(warmup_steps=0)}
    config = Config(**(fixed | (OPTIONS | GROUPED_OPTIONS)[name]))
    policy = load_policy(config, path, torch.device("cuda:0"))
    policy.module.chunk_rows = 1024
    metrics, seconds = [], []
    for step in range(STEPS):
        sequences = random_sequences(64, step, 64, 256)
        if name in GROUPED_OPTIONS:
            sequences = grouped_sequences(8, 8, seed=step, max_prompt=400)
        share = distribute([sequences], 1, 16384, policy.module.layout, policy.split_over_ranks)[0]
        start = time.perf_counter()
        metrics.append(policy.train_step(share, policy_version=12))
        seconds.append(round(time.perf_counter() - start, 3))
    print(name, policy.module.attention, seconds, flush=True)
    num_parameters = sum(parameter.numel() for parameter in policy.module.parameters())
    used = policy.module.model.config._attn_implementation
    torch.save((metrics, used, num_parameters), result)
    dist.destroy_process_group()


class Trained:
    """What one process measured."""

    def __init__(self, metrics: list[dict], attention: str, num_parameters: int):
        self.losses = [line["loss/total"] for line in metrics]
        self.grad_norms = [line["loss/grad_norm"] for line in metrics]
        self.tokens_read = [line["tokens/forward"] for line in metrics]
        self.peak_gib = metrics[-1].get("memory/peak_gib", 0.0)
        self.attention, self.num_parameters = attention, num_parameters


def train_all(names, path: str, folder) -> dict[str, Trained]:
    """Train with each of these options in a process of its own, so that none inherits another's memory."""
    trained = {}
    for name in names:
        result = os.fspath(folder / name)
        mp.spawn(measure, args=(path, name, result), nprocs=1)
        trained[name] = Trained(*torch.load(result))
    return trained


@pytest.fixture(scope="module")
def model_path(needs_gpu, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("qwen3-8-layers")
    save_random_qwen3(path, "0.6b", num_hidden_layers=8)
    return os.fspath(path)


@pytest.fixture(scope="module")
def trained(model_path, tmp_path_factory) -> dict[str, Trained]:
    return train_all(OPTIONS, model_path, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def grouped(model_path, tmp_path_factory) -> dict[str, Trained]:
    return train_all(GROUPED_OPTIONS, model_path, tmp_path_factory.mktemp("grouped"))


def assert_same_updates(mine: Trained, expected: Trained) -> None:
    """Tolerance 2 %: bfloat16 keeps 8 bits, and another kernel rounds elsewhere."""
    assert all(norm > 0 for norm in expected.grad_norms)
    assert mine.grad_norms == pytest.approx(expected.grad_norms, rel=0.02)
    assert mine.losses == pytest.approx(expected.losses, rel=0.02, abs=1e-3)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_no_option_changes_the_trace_beyond_bfloat16(trained, name):
    assert_same_updates(trained[name], trained["plain"])


def test_sequences_are_attended_without_a_mask_and_with_one_cost_more(trained):
    assert trained["plain"].attention in ("varlen", "flash_attention_2")
    assert trained["sdpa"].attention == "sdpa"
    assert trained["sdpa"].peak_gib > trained["plain"].peak_gib


@pytest.mark.parametrize("window", [(-1, 0), (4, 0)])
@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim"), [(16, 8, 128), (4, 4, 64), (8, 1, 256), (4, 2, 40)]
)
def test_the_kernel_computes_what_its_bounds_and_window_say(
    needs_gpu, heads, key_heads, head_dim, window
):
    """Forward and backward, of sequences of 1 to 300 tokens; tolerance 2 % of the largest entry, as of bfloat16."""
    torch.manual_seed(0)
    lengths = torch.tensor([0, 300, 1, 2, 129, 64, 17])
    starts, longest, total = lengths.cumsum(0).int(), int(lengths.max()), int(lengths.sum())
    bounds = (starts, starts, longest, longest)
    sizes = ((total, heads, head_dim), (total, key_heads, head_dim), (total, key_heads, head_dim))
    inputs = [torch.randn(size, dtype=torch.bfloat16) for size in sizes]
    on_gpu = [x.cuda().requires_grad_() for x in inputs]
    out = varlen_attn(
        *on_gpu, starts.cuda(), starts.cuda(), longest, longest, window_size=window, enable_gqa=True
    )
    grad = torch.randn_like(inputs[0])
    out.backward(grad.cuda())
    options = {"scale": None, "window_size": list(window)}
    expected, lse, _ = forward(*inputs, *bounds, enable_gqa=True, **options)
    is_causal = window == (-1, 0)
    gradients = backward(grad, *inputs, expected, lse, *bounds, is_causal, None, **options)
    computed = [out, *(x.grad for x in on_gpu)]
    for mine, reference in zip(computed, [expected, *gradients], strict=True):
        error = (mine.cpu().float() - reference.float()).abs().max()
        assert error <= 0.02 * reference.float().abs().max()


def test_checkpointing_and_offload_lower_the_peak(trained):
    plain = trained["plain"]
    assert trained["activations"].peak_gib < plain.peak_gib
    weights_gib = 16 * plain.num_parameters / GIB  # float32 weight, gradient and two moments
    # The gradient is not yet there, or no longer, at every peak; 12 bytes are.
    assert plain.peak_gib - trained["optimizer"].peak_gib > 0.6 * weights_gib


@pytest.mark.parametrize("name", ["share_prefix", "share_prefix_compiled"])
def test_flexattention_reads_prompts_once_and_makes_the_same_updates(grouped, name):
    shared, plain = grouped[name], grouped["grouped"]
    assert shared.attention == "flex_attention"
    assert_same_updates(shared, plain)
    for mine, expected in zip(shared.tokens_read, plain.tokens_read, strict=True):
        assert mine < expected / 3


@pytest.mark.parametrize("name", ["lora", "lora_compiled"])
def test_adapters_train_with_a_fraction_of_the_memory(grouped, name):
    adapters, plain = grouped[name], grouped["grouped"]
    assert all(norm > 0 for norm in adapters.grad_norms)
    first = plain.losses[0]
    assert adapters.losses[0] == pytest.approx(first, rel=0.02, abs=1e-3), "B is zero at first"
    # Of 16 bytes per parameter (weight, gradient, two moments) 2 are left, and activations are as they were. A margin
    # of a tenth is for what else is of the weights' size.
    assert plain.peak_gib - adapters.peak_gib > 0.9 * 14 * plain.num_parameters / GIB
