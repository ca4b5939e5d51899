"""What fits a GPU and a host: the smallest ones are the sums of all items; test_memory_of_a_step.py counts a step's."""

import functools
import math
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from plan_oracle import drawn
from qwen3_models import folder_of, shape_of
from tiny_policy import save_tiny_family
from transformers import AutoModelForCausalLM

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.gpus import Gpu
from asyncrl.cluster.placement import place
from asyncrl.config import Config
from asyncrl.plugins import last_given
from asyncrl.trainer.lora import add_adapters, named_adapters
from extras.planning.fit import PLUGIN, first_that_fits, plan_memory
from extras.planning.memory import (
    GIB,
    Sharing,
    free_host_bytes,
    step_items,
    trained_parameters,
    ways_to_fit,
)
from extras.planning.shape import read_shape

LONG = {"max_prompt_tokens": 512, "max_response_tokens": 2048}
CASES = tomllib.loads(Path(__file__).with_name("fit.toml").read_text(encoding="utf-8"))["cases"]
CONTEXT_AND_GRAPHS = 2.2 * GIB


def gpu(gib: float, used_gib: float = 0.0) -> Gpu:
    return Gpu("H200", round(gib * GIB), round(used_gib * GIB))


def without_cache(placement):
    """The placement whose engines get no bytes for keys and values."""
    workers = (replace(worker, kv_cache_bytes=None) for worker in placement.workers)
    return replace(placement, workers=tuple(workers))


# Bytes, by the formulas of the planner's page


def resident_bytes(config, shape, num_shards):
    """What a trainer holds between steps: float32 weights and two moments of what is trained, the rest in bfloat16."""
    weights = 2 * shape.num_parameters
    num_bytes = 1.2 * GIB + 2 * shape.largest_parameter + weights * (config.weight_sync != "shm")
    if "optimizer" not in config.save_memory:
        frozen = weights * bool(config.lora_rank or config.kl_coef)
        num_bytes += (12 * trained_parameters(config, shape) + frozen) / num_shards
    return num_bytes


def step_bytes(config, shape, num_shards):
    """A pass is counted by test_memory_of_a_step.py; gradients are float32, those of embedding and head in the pass."""
    items = step_items(config, shape, Sharing(4, num_shards))
    num_bytes = {item.what: item.num_bytes for item in items}
    is_whole = not config.lora_rank and "head" not in config.save_memory
    sharded = trained_parameters(config, shape) - shape.root_parameters * is_whole
    has_gradients = "optimizer" not in config.save_memory
    num_bytes["gradients"] = has_gradients * 4 * sharded / num_shards
    return sum(num_bytes.values())


def engine_bytes(config, shape):
    """What an engine has on each GPU beside its cache, and a sequence in it."""
    tp = config.rollout_tp
    step = 2 * 8192 * (4 * shape.intermediate_size // tp + 8 * shape.hidden_size)
    logits = 16 * config.max_running_requests * shape.vocab_size
    update = 4 * shape.largest_parameter + GIB
    num_bytes = CONTEXT_AND_GRAPHS + 2 * shape.num_parameters / tp + step + logits + update
    token = 2 * 2 * shape.num_layers * math.ceil(8 / tp) * 128
    return num_bytes, config.max_sequence_tokens * token


def host_bytes(config, shape, ranks_here, num_shards):
    """What stays in a host's memory; of what is sharded it has the part of its ranks."""
    weights, offloads = 2 * shape.num_parameters, "optimizer" in config.save_memory
    saves_all = config.save == "all"
    sharded = (12 * saves_all + 16 * offloads) * trained_parameters(config, shape)
    sharded += offloads * bool(config.lora_rank or config.kl_coef) * weights
    copies = 1 + saves_all + 2 * (config.weight_sync == "shm") + bool(config.lora_rank)
    copies += config.publish_delay + bool(config.publish_delay) + 5 * bool(config.listen)
    return copies * weights + sharded * ranks_here / num_shards


def smallest_gib(config, shape, placed, sharing, used_gib):
    """The smallest GPU of a case, if others hold so much of each: 4 % are left, and 10 % by an engine."""
    num_ranks = len(placed.trainer_gpus)
    resident = resident_bytes(config, shape, sharing.num_shards)
    step = step_bytes(config, shape, sharing.num_shards)
    engine, sequence = engine_bytes(config, shape)
    if len(used_gib) == 1:
        engine += sequence * (config.max_running_requests // 4 if sharing.is_strict else 1)
        both = resident + step + engine
        if config.colocate == "sleep":
            both = resident + max(step + CONTEXT_AND_GRAPHS, engine)
        return (both / GIB + used_gib[0]) / 0.96
    resident += 2 * GIB * (config.weight_sync != "shm")  # NCCL's groups
    trainer = resident + step
    if not sharing.is_strict:  # a quarter may be an error of the estimate
        trainer = max(resident, trainer / 1.25)
    trainer_gib, engine_gib = trainer / GIB, (engine + sequence) / GIB
    engine_gib = max(engine_gib / 0.9, (engine_gib + max(used_gib[num_ranks:])) / 0.96)
    return max((trainer_gib + max(used_gib[:num_ranks])) / 0.96, engine_gib)


OPTIONS = {
    "save_memory": ((), ("activations",), ("layers", "head", "activations", "optimizer")),
    "max_running_requests": (8, 64),
    "lora_rank": (0, 0, 16),
    "kl_coef": (0.0, 0.0, 0.1),
    "publish_delay": (0, 2),
    "listen": (None, "0.0.0.0:29600"),
    "weight_sync": ("auto", "auto", "shm"),
    "save": ("all", "all", "weights"),
}


def draw_case(seed):
    """A node's options, model, placement, how its ranks share the model, and GiB that others hold of each GPU.

    Every second node has one GPU, which trainer and engine share.
    """
    draw, is_shared = random.Random(seed), seed % 2 == 0
    more = {"colocate": ("share", "sleep")} if is_shared else {"rollout_tp": (1, 2, 16)}
    config = Config(**LONG, async_ratio=0.0, **drawn(draw, OPTIONS | more))
    num_ranks, num_gpus = (1, 1) if is_shared else (2, 2 + config.rollout_tp)
    used_gib = [0.0] * num_gpus
    used_gib[draw.randrange(num_gpus)] = draw.choice([0.0, 30.0])
    sharing = Sharing(4, draw.choice([1, 2, 4]), is_strict=draw.random() < 0.5)
    placed = place(config, num_gpus, 64, num_ranks)
    return config, shape_of(draw.choice(["0.6b", "8b"])), placed, sharing, used_gib


def planned(case, gib, limits, **options):
    """What comes of a case on GPUs of so many GiB, with other limits and options."""
    config, shape, placed, sharing, used_gib = case
    gpus = [gpu(gib, used) for used in used_gib]
    config, sharing = replace(config, **options), replace(sharing, **limits)
    return plan_memory(config, placed, shape, gpus, sharing)


@pytest.mark.parametrize("seed", range(60))
def test_a_node_is_refused_from_just_below_the_sum_of_all_items(seed):
    case = config, shape, placed, sharing, used_gib = draw_case(seed)
    needed = host_bytes(config, shape, len(placed.trainer_gpus), sharing.num_shards)
    smallest = smallest_gib(*case)
    placement, arithmetic = planned(case, smallest + 0.01, {"host_bytes": needed + 1})
    assert len(used_gib) == 1 or without_cache(placement) == placed
    assert ("staging" in arithmetic) == (config.weight_sync != "shm")
    with pytest.raises(ValueError, match=r"^the host has [\d.]+ GiB free"):
        planned(case, smallest + 0.01, {"host_bytes": needed - 1})
    for too_small in (0.01, 1.0):
        with pytest.raises(ValueError) as refused:
            planned(case, smallest - too_small, {})
        missing = float(re.search(r"fit, ([\d.]+) GiB are missing: ", str(refused.value))[1])
        assert missing == pytest.approx(0.93 * too_small, abs=0.09)


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_an_engine_that_shares_a_gpu_gets_its_cache_or_what_is_left_and_no_more(seed):
    case = config, shape, _, sharing, (used,) = draw_case(seed)
    gib = smallest_gib(*case) + random.Random(seed).uniform(0.1, 30)

    def plan(**options):
        placement, text = planned(case, gib, {}, **options)
        (worker,) = placement.workers
        return worker.gpu_memory_utilization, worker.kv_cache_bytes, text

    share, cache, text = plan()
    free = (0.96 * gib - used) * GIB - resident_bytes(config, shape, sharing.num_shards)
    step = step_bytes(config, shape, sharing.num_shards)
    engine, sequence = engine_bytes(config, shape)
    sleeps = config.colocate == "sleep"
    room = free - engine - step * (not sleeps)
    num_sequences = min(config.max_running_requests, int(room // sequence))
    assert cache == num_sequences * sequence
    assert f"{num_sequences} of {config.max_running_requests} sequences" in text
    spare = min(0.05 * gib * GIB, room - cache)
    if sleeps:
        spare = min(spare, free - step - CONTEXT_AND_GRAPHS)
    assert share == pytest.approx((engine + cache + spare) / gib / GIB, abs=0.002)
    for asked, warns in ((share - 0.002, False), (1.0, True)):
        *settings, text = plan(gpu_memory_utilization=asked)
        assert settings == [asked, None] and ("warning" in text) == warns


@pytest.mark.parametrize(("gib", "size"), [(24, "0.6b"), (48, "8b"), (80, "8b"), (200, "8b")])
def test_an_engine_on_its_own_gpus_leaves_room_for_an_update_of_its_weights(gib, size):
    config, placed = Config(**LONG), place(Config(**LONG), 8, 64, 4)
    plan = functools.partial(plan_memory, placement=placed, shape=shape_of(size))
    given = {"gpus": [gpu(500)] * 4 + [gpu(gib)] * 4, "sharing": Sharing(4, 4)}
    placement, text = plan(config, **given)
    engine, sequence = engine_bytes(config, shape_of(size))
    for worker in placement.workers:
        room = min(0.9 * gib * GIB - engine, config.max_running_requests * sequence)
        assert worker.kv_cache_bytes == pytest.approx(room, abs=1)
        assert worker.kv_cache_bytes >= sequence
    of_all = f"for each of {config.max_running_requests} sequences"
    number = of_all if gib == 200 else "a sequence"
    assert f"KV cache {room / GIB:.2f} GiB, {sequence / GIB:.2f} {number}\n" in text
    placement, _ = plan(replace(config, gpu_memory_utilization=0.9), **given)
    assert {worker.kv_cache_bytes for worker in placement.workers} == {None}, "vLLM decides"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_is_saved_as_far_as_it_must_be_by_smaller_passes_first(case):
    config = Config.from_dict(LONG | case.get("options", {}))
    ways, placed = ways_to_fit(config), place(config, 8, 64, case["ranks"])
    host_bytes = case.get("host_gib", 1000) * GIB
    sharing = Sharing(case["ranks"], case["ranks"], host_bytes=host_bytes)
    gpus = [gpu(case["gib"])] * 8
    fitted = ways[first_that_fits(ways, placed, shape_of(case["size"]), gpus, sharing)]
    assert fitted == Config.from_dict(config.as_dict() | case["fitted"])


def test_a_run_fits_itself_into_what_it_sees_and_prints_the_arithmetic(monkeypatch, capsys):
    config, cluster = Config(**LONG), Cluster(ranks_of_nodes=((0, 1, 2, 3),))
    monkeypatch.setattr("extras.planning.fit.visible_gpus", lambda: [gpu(79.6)] * 8)
    monkeypatch.setattr("extras.planning.fit.free_host_bytes", lambda: 200 * GIB)
    placed = place(config, 8, 64, 4)
    given = (config, placed, folder_of("8b"), cluster)
    fitted, placement = last_given((plugin.fit_memory(*given) for plugin in config.plugins), None)
    assert (fitted.save_memory, fitted.max_tokens_per_microbatch) == (("layers", "head"), 4096)
    assert without_cache(placement) == placed
    assert "host memory of a machine: 122.05 GiB" in capsys.readouterr().out
    monkeypatch.setattr("extras.planning.fit.free_host_bytes", lambda: 100 * GIB)
    with pytest.raises(ValueError, match=r"the host has 100\.0 GiB free"):
        PLUGIN.fit_memory(*given)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_with_adapters_the_optimizer_has_theirs_alone(family, tmp_path):
    """Experts have none."""
    path = save_tiny_family(family, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(path)
    add_adapters(model, [*model.model.layers], rank=16)
    adapters = sum(parameter.numel() for _, parameter in named_adapters(model))
    assert trained_parameters(Config(lora_rank=16), read_shape(path)) == adapters


def test_a_containers_limit_counts_as_what_the_host_has(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("extras.planning.memory.CGROUP_LIMIT", limit)
    without = free_host_bytes()
    limit.write_text("max\n")
    assert abs(free_host_bytes() - without) < 2 * GIB
    limit.write_text("1048576\n")
    assert free_host_bytes() == 1048576


def test_an_engine_is_split_where_heads_divide_evenly():
    config, plenty = Config(rollout_tp=3), [gpu(141)] * 4
    refusal = r"16 attention heads and 8 key-value heads evenly; use one of \[1, 2, 4, 8, 16\]"
    with pytest.raises(ValueError, match=refusal):
        plan_memory(config, place(config, 4, 64, 1), shape_of("0.6b"), plenty, Sharing())
