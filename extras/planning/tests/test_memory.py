"""What fits a GPU: the smallest one is that of all items together; test_memory_of_a_step.py counts those of a step."""

import math
import random
import re
from dataclasses import replace

import pytest
from qwen3_models import shape_of
from tiny_policy import save_tiny_family
from transformers import AutoModelForCausalLM

from asyncrl.cluster.gpus import Gpu
from asyncrl.config import Config
from asyncrl.trainer.model import named_adapters
from extras.lora import add_adapters
from extras.planning.memory import (
    GIB,
    Sharing,
    can_split,
    check_engine,
    check_host,
    check_tp,
    check_trainer,
    free_host_bytes,
    microbatch_tokens,
    plan_shared,
    step_items,
    trained_parameters,
)
from extras.planning.shape import read_shape

LONG = {"max_prompt_tokens": 512, "max_response_tokens": 2048}
LESS = {"save_memory": ("activations",)}
LEAST = {"save_memory": ("head", "activations", "optimizer")}
ASLEEP = {"colocate": "sleep", "async_ratio": 0.0}
CONTEXT_AND_GRAPHS = 2.2 * GIB


def gpu(gib: float, used_gib: float = 0.0) -> Gpu:
    return Gpu("H200", round(gib * GIB), round(used_gib * GIB))


def resident_bytes(config, shape, sharing):
    """What a trainer holds between steps: float32 weights and two moments of what is trained, the rest in bfloat16."""
    weights = 2 * shape.num_parameters
    num_bytes = 1.2 * GIB + 2 * shape.largest_parameter + sharing.stages * weights
    if "optimizer" not in config.save_memory:
        frozen = weights * bool(config.lora_rank or config.kl_coef)
        num_bytes += (12 * trained_parameters(config, shape) + frozen) / sharing.num_shards
    return num_bytes


def engine_bytes(config, shape, tp):
    """What an engine has on each GPU beside its cache, and a sequence in it."""
    step = 2 * 8192 * (4 * shape.intermediate_size // tp + 8 * shape.hidden_size)
    logits = 16 * config.max_running_requests * shape.vocab_size
    update = 4 * shape.largest_parameter + GIB
    num_bytes = CONTEXT_AND_GRAPHS + 2 * shape.num_parameters / tp + step + logits + update
    return num_bytes, config.max_sequence_tokens * 2 * 2 * shape.num_layers * math.ceil(
        8 / tp
    ) * 128


def step_bytes(config, shape, sharing):
    """A pass is counted by test_memory_of_a_step.py; gradients are float32, those of embedding and head in the pass."""
    items = step_items(config, shape, sharing.num_ranks, sharing.num_shards)
    num_bytes = {item.what: item.num_bytes for item in items}
    sharded = trained_parameters(config, shape) - shape.root_parameters * (not config.lora_rank)
    has_gradients = "optimizer" not in config.save_memory
    num_bytes["gradients"] = has_gradients * 4 * sharded / sharing.num_shards
    return sum(num_bytes.values())


def smallest_gib(kind, config, shape, sharing):
    """The smallest GPU that a trainer, an engine, or both fit: 4 % of it stay free, an engine alone has 90 %."""
    resident = resident_bytes(config, shape, sharing)
    step = step_bytes(config, shape, sharing)
    engine = sum(engine_bytes(config, shape, config.rollout_tp if kind == "engine" else 1))
    if kind == "engine":
        return engine / 0.9 / GIB
    if kind == "trainer":
        resident += 2 * GIB * sharing.stages  # NCCL's groups
        # a quarter may be an error of the estimate
        needed = resident + step if sharing.is_strict else max(resident, (resident + step) / 1.25)
        return needed / 0.96 / GIB
    if config.colocate == "sleep":
        return (resident + max(step + CONTEXT_AND_GRAPHS, engine)) / 0.96 / GIB
    return (resident + step + engine) / 0.96 / GIB


def draw_case(seed):
    """What shares a GPU or has one, and its options."""
    draw = random.Random(seed)
    kind = draw.choice(["trainer", "engine", "shared", "shared"])
    options = dict(draw.choice([{}, LESS, LEAST])) | draw.choice([{}, ASLEEP])
    options |= draw.choice([{}, {"lora_rank": 16}, {"kl_coef": 0.1}])
    options |= {"max_running_requests": draw.choice([8, 64]), "rollout_tp": draw.choice([1, 2, 16])}
    shards = draw.choice([1, 2, 4])
    is_strict = kind == "trainer" and draw.random() < 0.5
    sharing = Sharing(4, shards, stages=draw.random() < 0.5, is_strict=is_strict)
    return kind, Config(**LONG, **options), shape_of(draw.choice(["0.6b", "8b"])), sharing


@pytest.mark.parametrize("seed", range(40))
def test_a_gpu_is_refused_from_just_below_the_sum_of_all_items_and_by_what_is_missing(seed):
    kind, config, shape, sharing = draw_case(seed)
    check = {
        "trainer": lambda gib: check_trainer(config, shape, gpu(gib), sharing),
        "engine": lambda gib: check_engine(config, shape, gpu(gib)),
        "shared": lambda gib: plan_shared(config, shape, gpu(gib), sharing),
    }[kind]
    smallest = smallest_gib(kind, config, shape, sharing)
    check(smallest + 0.01)
    with pytest.raises(ValueError, match=r"the model does not fit, 0\.0 GiB are missing: try"):
        check(smallest - 0.01)
    with pytest.raises(ValueError) as refused:
        check(smallest - 1)
    missing = float(re.search(r"([\d.]+) GiB are missing", str(refused.value))[1])
    assert missing == pytest.approx(0.9 if kind == "engine" else 0.96, abs=0.06)


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_shares_a_gpu_gets_its_cache_or_what_is_left_and_no_more(seed):
    _, config, shape, sharing = draw_case(seed)
    sharing = replace(sharing, is_strict=False)
    gib = smallest_gib("shared", config, shape, sharing) + random.Random(seed).uniform(0.1, 30)
    share, kv_bytes, text = plan_shared(config, shape, gpu(gib), sharing)
    trainer = resident_bytes(config, shape, sharing)
    if config.colocate != "sleep":
        trainer += step_bytes(config, shape, sharing)
    engine, sequence = engine_bytes(config, shape, 1)
    room = int((0.96 * gib * GIB - trainer - engine) // sequence)
    num_sequences = min(config.max_running_requests, room)
    assert kv_bytes == num_sequences * sequence
    assert f"{num_sequences} of {config.max_running_requests} sequences" in text
    given = share - (engine + kv_bytes) / gib / GIB
    assert 0 <= given <= 0.051, "a twentieth of the GPU beyond what it needs, if that is left"
    assert share + trainer / gib / GIB <= 0.962
    is_full = share + trainer / gib / GIB > 0.958
    assert given > 0.049 or is_full or config.colocate == "sleep"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_with_adapters_the_optimizer_has_theirs_alone(family, tmp_path):
    """Experts have none."""
    path = save_tiny_family(family, str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(path)
    add_adapters(model, [*model.model.layers], rank=16)
    adapters = sum(parameter.numel() for _, parameter in named_adapters(model))
    assert trained_parameters(Config(lora_rank=16), read_shape(path)) == adapters


@pytest.mark.parametrize(
    ("ranks", "budget", "tokens"), [(1, 16384, 400), (4, 16384, 100), (1, 128, 128)]
)
def test_a_pass_is_never_longer_than_what_there_is_to_train_on(ranks, budget, tokens):
    lengths = {"max_prompt_tokens": 10, "max_response_tokens": 90}
    config = Config(groups_per_step=2, group_size=2, max_tokens_per_microbatch=budget, **lengths)
    assert microbatch_tokens(config, ranks) == tokens


@pytest.mark.parametrize(
    ("share", "size", "options", "warns"),
    [(0.3, "0.6b", LESS, False), (0.9, "0.6b", LESS, True), (0.5, "8b", {}, True)],
)
def test_a_share_that_is_asked_for_is_taken_with_a_warning_where_it_leaves_too_little(
    share, size, options, warns
):
    config = Config(gpu_memory_utilization=share, **LONG, **options)
    utilization, kv_bytes, text = plan_shared(config, shape_of(size), gpu(80))
    assert (utilization, kv_bytes, "warning" in text) == (share, None, warns)


@pytest.mark.parametrize(
    ("options", "transport", "per_trained", "per_parameter", "per_shard"),
    [
        ({}, "nccl", 12, 4, 0),
        ({}, "shm", 12, 4 + 2 * 2, 0),
        (LEAST | {"publish_delay": 2}, "ipc", 12 + 16, 4 + 3 * 2, 0),
        ({"listen": "0.0.0.0:29600"}, "pull", 12, 4 + 5 * 2, 0),
        ({"kl_coef": 0.1}, "nccl", 12, 4, 0),
        (LEAST | {"kl_coef": 0.1}, "nccl", 12 + 16, 4, 2),
        ({"lora_rank": 8}, "nccl", 12, 4 + 2, 0),
        (LEAST | {"lora_rank": 8, "kl_coef": 0.1}, "nccl", 12 + 16, 4 + 2, 2),
    ],
)
def test_a_host_is_refused_from_just_below_the_sum_of_what_stays_in_its_memory(
    options, transport, per_trained, per_parameter, per_shard
):
    """All ranks of the model are on one machine; of two machines each has half of what is sharded."""
    config, shape = Config(**options), shape_of("8b")
    sharded = per_trained * trained_parameters(config, shape) + per_shard * shape.num_parameters
    needed = per_parameter * shape.num_parameters + sharded
    sharing = Sharing(4, 4, host_bytes=needed)
    check_host(config, shape, sharing, 4, transport)
    with pytest.raises(ValueError, match=r"the host has [\d.]+ GiB free"):
        check_host(config, shape, replace(sharing, host_bytes=needed - 1), 4, transport)
    less = needed - sharded / 2
    check_host(config, shape, replace(sharing, num_shards=8, host_bytes=less), 4, transport)


def test_a_containers_limit_counts_as_what_the_host_has(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("extras.planning.memory.CGROUP_LIMIT", limit)
    without = free_host_bytes()
    limit.write_text("max\n")
    assert abs(free_host_bytes() - without) < 2 * GIB
    limit.write_text("1048576\n")
    assert free_host_bytes() == 1048576


def test_an_engine_is_split_where_heads_divide_evenly():
    assert [tp for tp in (1, 2, 3, 8, 16, 32) if can_split(shape_of("0.6b"), tp)] == [1, 2, 8, 16]
    refusal = r"16 attention heads and 8 key-value heads evenly; use one of \[1, 2, 4, 8, 16\]"
    with pytest.raises(ValueError, match=refusal):
        check_tp(shape_of("0.6b"), 3)
