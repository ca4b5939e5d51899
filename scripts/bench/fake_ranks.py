"""The GPU bench's part of one trainer rank of several on one GPU: its memory beside the plan, and its time.

In torch's fake process group ranks do not exchange data. So this rank has the shards, buffers and kernels of a rank of
several. In place of other ranks' weights it has garbage, and losses have no meaning.
"""

import functools
import math
import types
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import asyncrl.trainer.lag_stats
import asyncrl.trainer.model
import asyncrl.trainer.policy
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.trainer.policy import load_policy
from asyncrl.trainer.splitting import distribute
from asyncrl.weights.packed import Packed
from extras.planning.dry_run import read_pool
from extras.planning.fit import first_that_fits
from extras.planning.memory import (
    CONTEXT_BYTES,
    GIB,
    Sharing,
    resident_items,
    step_items,
    total,
    ways_to_fit,
)
from extras.planning.shape import ModelShape, read_shape
from scripts.bench.trainer_alone import TRAIN_STEPS, Setup, peak_memory, synthetic, timed
from scripts.qwen3_shapes import qwen3_config

PLANNED_GPUS = "8xH100"
"""GPUs that the plan is for. The allocator is limited to the memory of one."""
LONG = {"max_prompt_tokens": 512, "max_response_tokens": 2048, "async_ratio": 2.0}
"""Lengths of the 8B command of the README."""


def rank_of(setup: Setup, num_ranks: int) -> dict:
    """Train as rank 0 of several. Return its memory, and the memory that the plan has for its tensors."""
    setup = replace(setup, models=setup.models / "empty")
    config, shape, planned_bytes = plan(setup, num_ranks)
    steps_s = train(setup, config, shape, num_ranks)
    return {
        "save_memory": " and ".join(config.save_memory) or "nothing",
        "budget": config.max_tokens_per_microbatch,
        "planned_gib": planned_bytes / GIB,
        "step_s": float(np.median(steps_s[1:])),
        "steps": len(steps_s) - 1,
        **peak_memory(setup.device),
        **memory_outside(setup.device),
    }


def plan(setup: Setup, num_ranks: int) -> tuple[Config, ModelShape, float]:
    """Return the options of a run on PLANNED_GPUS with the savings of --save-memory auto, and the bytes of its tensors.

    It makes the model's config.json, and no weights.
    """
    folder = setup.models / setup.size
    if not folder.exists():
        qwen3_config(setup.size).save_pretrained(folder)
    shape = read_shape(str(folder))
    config = setup.config(algo="tis", **LONG if setup.size != "tiny" else {})
    pool, sharing = read_pool(PLANNED_GPUS), Sharing(num_ranks, num_ranks)
    placement = place(config, pool.gpus, 64, num_ranks)
    ways = ways_to_fit(config)
    config = ways[first_that_fits(ways, placement, shape, [pool.device] * pool.gpus, sharing)]
    items = [
        *resident_items(config, shape, sharing),
        *step_items(config, shape, sharing),
    ]
    return config, shape, total(items) - CONTEXT_BYTES


def train(setup: Setup, config: Config, shape: ModelShape, num_ranks: int) -> list[float]:
    """Return the seconds of some steps of rank 0, in this process. The process must then end."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = torch.device(setup.device)
    if setup.device == "cuda":
        # as in a run on several GPUs
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        memory = torch.cuda.get_device_properties(0).total_memory
        share = read_pool(PLANNED_GPUS).device.total_bytes / memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    # A gather of values would return what was in memory, and weights of other ranks need not be finite.
    asyncrl.trainer.lag_stats.gather_from_ranks = lambda value: [value]
    asyncrl.trainer.policy.math = types.SimpleNamespace(**vars(math) | {"isfinite": lambda _: True})
    # 8B would need 16 GB of disk, and minutes
    asyncrl.trainer.model._fill_from_rank_0 = fill
    policy = load_policy(config, setup.model_path, device)
    staging = Packed(policy.sent_specs(), device)
    rng = np.random.default_rng(0)
    num_responses = config.groups_per_step * config.group_size // num_ranks
    tokens = rng.lognormal(6.2, 0.8, num_responses) + config.max_prompt_tokens
    lengths = tokens.clip(2, config.max_sequence_tokens).astype(int).tolist()
    sequences = synthetic(lengths, shape.vocab_size)
    share = distribute([sequences], 1, config.max_tokens_per_microbatch)[0]
    step = functools.partial(policy.train_step, share, policy_version=0)
    steps_s = [timed(step, setup.device)[0] for _ in range(TRAIN_STEPS)]
    del staging
    return steps_s


def fill(model: nn.Module, path: str, dtype: torch.dtype, adapters: dict) -> None:
    """Make random shards in place of reading them."""
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.02)
    for buffer in model.buffers():
        nn.init.ones_(buffer)


def memory_outside(device: str) -> dict[str, float]:
    """Return the GPU's memory that torch's allocator does not have, GiB: contexts, kernels, and other processes."""
    if device != "cuda":
        return {}
    free, memory = torch.cuda.mem_get_info()
    return {"outside_gib": (memory - free - torch.cuda.memory_reserved()) / GIB}


FUNCTIONS = {"rank-of-4": functools.partial(rank_of, num_ranks=4)}
"""Name of a part -> its function."""
