"""The arithmetic of memory, in the shapes of Qwen3."""

import dataclasses

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl.cluster.gpus import Gpu
from asyncrl.config import Config
from asyncrl.trainer.lora import add_adapters, named_adapters
from extras.planning.memory import (
    GIB,
    Sharing,
    can_split,
    check_engine,
    check_tp,
    check_trainer,
    microbatch_tokens,
    plan_shared,
    resident_items,
    step_items,
    total,
    trained_parameters,
)
from extras.planning.shape import ModelShape
from scripts.qwen3_shapes import qwen3_config

LAYER_AND_ROOT = {"0.6b": (28, 15.73e6, 155.6e6), "1.7b": (28, 50.34e6, 311.2e6), "4b": (36, 100.9e6, 389e6),
                  "8b": (36, 192.9e6, 1244.7e6)}  # fmt: skip
WIDTHS = {
    "0.6b": (1024, 3072, 16),
    "1.7b": (2048, 6144, 16),
    "4b": (2560, 9728, 32),
    "8b": (4096, 12288, 32),
}
LONG = {"max_prompt_tokens": 512, "max_response_tokens": 2048}
LESS = {"save_memory": ("activations",)}
LEAST = {"save_memory": ("activations", "optimizer")}
ASLEEP = {"colocate": "sleep", "async_ratio": 0.0}


def shape(size: str) -> ModelShape:
    (layers, layer, root), (hidden, intermediate, heads) = LAYER_AND_ROOT[size], WIDTHS[size]
    parameters = round(layers * layer + root), round(layer), round(root), 151936 * hidden
    return ModelShape(*parameters, layers, hidden, intermediate, heads, 8, 128, 151936)


def gpu(gib: float, used_gib: float = 0.0) -> Gpu:
    return Gpu("H200", round(gib * GIB), round(used_gib * GIB))


@pytest.mark.parametrize(
    ("size", "gib", "options", "fits"),
    [
        ("0.6b", 80, {}, True),
        ("1.7b", 80, {}, False),
        ("1.7b", 80, LESS, True),
        ("4b", 80, LESS, False),
        ("4b", 80, LEAST, True),
        ("8b", 80, LEAST, True),
        ("8b", 52, LEAST, False),
        ("8b", 80, LEAST | ASLEEP, True),
        ("1.7b", 141, {}, True),
        ("4b", 141, {}, False),
        ("4b", 141, LESS, True),
        ("8b", 141, LESS, False),
        ("8b", 141, LEAST, True),
    ],
)
def test_what_fits_one_gpu(size, gib, options, fits):
    config = Config(**LONG, **options)
    if fits:
        assert 0.05 < plan_shared(config, shape(size), gpu(gib))[0] < 0.95
    else:
        with pytest.raises(
            ValueError, match=r"the model does not fit, [\d.]+ GiB are missing: try"
        ):
            plan_shared(config, shape(size), gpu(gib))


@pytest.mark.parametrize("size", ["0.6b", "1.7b", "4b"])
def test_trainer_and_engine_together_stay_below_the_whole(size):
    config, whole = Config(**LONG, **LESS), gpu(141)
    utilization, _, _ = plan_shared(config, shape(size), whole)
    trainer = total(resident_items(config, shape(size), 1, True)) + total(
        step_items(config, shape(size), 1, 1)
    )
    assert utilization * whole.total_bytes + trainer <= whole.total_bytes


def test_the_weights_are_counted_as_the_formulas_of_their_bytes():
    """float32 weight and two moments; a float32 gradient; a bfloat16 staging buffer that ranks do not divide."""
    parameters = shape("1.7b").num_parameters
    by_name = {
        item.what: item.num_bytes
        for item in resident_items(Config(kl_coef=0.1), shape("1.7b"), 4, True)
    }
    assert by_name["weights and AdamW"] == 12 * parameters / 4
    assert by_name["reference model"] == 2 * parameters / 4
    assert by_name["staging buffer"] == 2 * parameters
    gradients = {item.what: item.num_bytes for item in step_items(Config(), shape("1.7b"), 4, 4)}[
        "gradients"
    ]
    assert gradients == 4 * parameters / 4
    offloaded = resident_items(
        Config(save_memory=("optimizer",), kl_coef=0.1), shape("1.7b"), 4, False
    )
    assert [item.what for item in offloaded] == ["CUDA context", "gathering weights"]


def test_with_adapters_the_optimizer_has_theirs_alone_and_the_frozen_weights_take_two_bytes():
    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3_config("0.6b"))
        add_adapters(model, [*model.model.layers], rank=16)
    adapters = sum(parameter.numel() for _, parameter in named_adapters(model))
    config, of_model = Config(lora_rank=16, kl_coef=0.1), shape("0.6b")
    assert trained_parameters(config, of_model) == adapters
    by_name = {item.what: item.num_bytes for item in resident_items(config, of_model, 2, True)}
    assert by_name["weights and AdamW"] == 6 * adapters and "reference model" not in by_name
    assert by_name["frozen weights"] == of_model.num_parameters
    assert total(step_items(config, of_model, 2, 2)) < total(step_items(Config(), of_model, 2, 2))


def test_a_pass_is_never_longer_than_what_there_is_to_train_on():
    config = Config(groups_per_step=2, group_size=2, max_prompt_tokens=10, max_response_tokens=90)
    assert microbatch_tokens(config, 1) == 400
    assert microbatch_tokens(config, 4) == 100
    assert microbatch_tokens(dataclasses.replace(config, max_tokens_per_microbatch=128), 1) == 128


def test_the_kv_cache_shrinks_to_what_is_left_but_not_below_one_sequence():
    many = Config(max_running_requests=4096, **LONG, **LESS)
    few = dataclasses.replace(many, max_running_requests=8)
    assert "of 4096 sequences" in plan_shared(many, shape("0.6b"), gpu(80))[2]
    assert "8 of 8 sequences" in plan_shared(few, shape("0.6b"), gpu(80))[2]
    assert (
        plan_shared(few, shape("0.6b"), gpu(80))[0] < plan_shared(many, shape("0.6b"), gpu(80))[0]
    )


def test_host_memory_takes_the_staging_buffers_where_the_gpu_has_no_room():
    config = Config(**LONG, **LEAST)
    with pytest.raises(ValueError, match="--weight-sync shm"):
        plan_shared(config, shape("8b"), gpu(48))
    assert "staging" not in plan_shared(config, shape("8b"), gpu(48), Sharing(stages=False))[2]


def test_more_ranks_make_a_model_fit_and_a_step_that_may_not_is_only_warned_of():
    config = Config(**LONG)
    with pytest.raises(ValueError, match="AdamW"):
        check_trainer(config, shape("8b"), gpu(80), Sharing(1, 1, True))
    with pytest.raises(ValueError, match=r"activations 118\."):
        check_trainer(config, shape("8b"), gpu(80), Sharing(4, 4, True))
    smaller = dataclasses.replace(config, max_tokens_per_microbatch=4096)
    text = check_trainer(smaller, shape("8b"), gpu(80), Sharing(4, 4, True))
    assert "warning: a step may not fit" in text
    with pytest.raises(ValueError, match="the model does not fit"):
        check_trainer(smaller, shape("8b"), gpu(80), Sharing(4, 4, True, is_strict=True))
    config = Config(**LONG, **LESS)
    assert "warning" not in check_trainer(config, shape("8b"), gpu(80), Sharing(8, 8, True))


def test_replicas_hold_more_and_several_nodes_less_of_the_model_per_rank():
    config = Config(**LONG, **LESS)
    of_node = {n: total(resident_items(config, shape("8b"), n, False)) for n in (4, 8, 16)}
    assert of_node[4] - of_node[8] == pytest.approx(2 * (of_node[8] - of_node[16]), rel=1e-6)
    with pytest.raises(ValueError, match="8189 M parameters / 2 ranks"):
        check_trainer(config, shape("8b"), gpu(40), Sharing(4, 2, False))
    text = check_trainer(config, shape("8b"), gpu(40), Sharing(4, 8, False))
    assert "8189 M parameters / 8 ranks" in text


def test_an_engine_without_room_for_one_sequence_is_refused_until_it_is_split():
    long = Config(max_response_tokens=2**17, max_tokens_per_microbatch=2**18)
    with pytest.raises(ValueError, match="the model does not fit"):
        check_engine(long, shape("8b"), gpu(32))
    split = dataclasses.replace(long, rollout_tp=4)
    assert "engine, 90%" in check_engine(split, shape("8b"), gpu(32))


@pytest.mark.parametrize(
    ("share", "size", "options", "warns"),
    [(0.3, "0.6b", LESS, False), (0.9, "0.6b", LESS, True), (0.5, "8b", {}, True)],
)
def test_a_share_that_is_asked_for_is_taken_with_a_warning_where_it_leaves_too_little(
    share, size, options, warns
):
    config = Config(gpu_memory_utilization=share, **LONG, **options)
    utilization, _, text = plan_shared(config, shape(size), gpu(80))
    assert utilization == share and ("warning" in text) == warns


def test_an_engine_is_split_where_heads_divide_evenly():
    allowed = [tp for tp in (1, 2, 3, 8, 16, 32) if can_split(shape("0.6b"), tp)]
    assert allowed == [1, 2, 8, 16]
    refusal = r"16 attention heads and 8 key-value heads evenly; use one of \[1, 2, 4, 8"
    with pytest.raises(ValueError, match=refusal):
        check_tp(shape("0.6b"), 3)
