"""Adapters: what is trained, what is published, what is saved."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from test_policy import make_config, plain_logprobs
from tiny_policy import first_gradient, load, random_sequences, save_tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from algos.sampling import Sampling
from asyncrl.config import OptimOptions
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.checkpoint import save_weights
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.lora import (
    LoraLinear,
    add_adapters,
    named_adapters,
    named_base_parameters,
    without_adapters,
)
from asyncrl.trainer.model import shard
from asyncrl.trainer.packing import bundle, pack

RANK = 3
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("tied")), tied=True)


def share_of(sequences):
    return distribute([sequences], 1, 100_000)[0]


def trained_policy(model, steps=3, **options):
    """A policy whose adapters have moved far enough for an error in them to show."""
    policy = load(
        make_config(model, lora_rank=RANK, lr=0.02, optim=OptimOptions(warmup=0), **options)
    )
    for step in range(steps):
        policy.train_step(share_of(random_sequences(12, seed=step)), policy_version=12 + step)
    return policy


def base_weights(model):
    return dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())


def test_training_begins_at_the_base_model(model):
    sequences = random_sequences(6)
    scores = load(make_config(model, lora_rank=RANK)).score([sequences], raw=True)[0]
    torch.testing.assert_close(scores, plain_logprobs(model, sequences), rtol=1e-5, atol=1e-5)


def test_every_linear_layer_of_every_block_is_adapted_and_only_adapters_have_gradient_and_state(
    model,
):
    policy = trained_policy(model)
    adapted = {
        f"model.layers.{i}.{part}.{name}.{letter}"
        for i in range(2)
        for name in LINEAR_LAYERS
        for part in ("self_attn" if name[0] in "qkvo" else "mlp",)
        for letter in ("lora_A", "lora_B")
    }
    assert {name for name, _ in named_adapters(policy.module.model)} == adapted
    assert first_gradient(policy).keys() == adapted
    assert len(policy.optimizer.state) == len(adapted)
    expected = base_weights(model)
    for name, parameter in named_base_parameters(policy.module.model):
        assert parameter.grad is None and not parameter.requires_grad
        assert torch.equal(parameter.full_tensor(), expected[name]), name


def test_gradient_of_b_is_that_of_the_weight_projected_on_a(model):
    """With B = 0 the layer is the base's, so by the chain rule dL/dB = 2·(dL/dW)·Aᵀ and dL/dA = 0."""
    sequences = random_sequences(9)
    policies = [load(make_config(model, lora_rank=rank)) for rank in (0, RANK)]
    adapters = {
        name: p.full_tensor().detach().clone()
        for name, p in named_adapters(policies[1].module.model)
    }
    for policy in policies:
        policy.train_step(share_of(sequences), policy_version=12)
    of_weights, of_adapters = map(first_gradient, policies)
    for name, gradient in of_adapters.items():
        if name.endswith("lora_A"):
            assert gradient.abs().max() == 0
            continue
        expected = (
            2
            * of_weights[name.replace("lora_B", "weight")]
            @ adapters[name.replace("lora_B", "lora_A")].T
        )
        torch.testing.assert_close(
            gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
        )


def test_what_is_published_is_base_plus_twice_b_a_and_the_trained_state_is_left_alone(model):
    policy = trained_policy(model)
    state = {
        name: p.full_tensor().detach().clone() for name, p in policy.module.model.named_parameters()
    }
    published = dict(policy.named_full_parameters())
    expected = base_weights(model)
    assert list(published) == list(expected)
    moved = 0
    for name, tensor in published.items():
        weight, a = expected[name].double(), state.get(name.replace(".weight", ".lora_A"))
        if a is not None:
            weight = weight + 2 * state[name.replace(".weight", ".lora_B")].double() @ a.double()
            moved += 1
        torch.testing.assert_close(tensor.double(), weight, rtol=1e-6, atol=1e-6)
    assert moved == 2 * len(LINEAR_LAYERS)
    for name, parameter in policy.module.model.named_parameters():
        assert torch.equal(parameter.full_tensor(), state[name])


def test_a_checkpoint_scores_as_the_policy_does_merged_or_with_its_adapter_on_the_base(
    model, tmp_path
):
    sequences = random_sequences(5)
    policy = trained_policy(model)
    save_weights(policy, str(tmp_path / "step_3"))
    scores = policy.score([sequences], raw=True)[0]
    assert not torch.allclose(plain_logprobs(model, sequences), scores, atol=1e-2), (
        "training moved nothing"
    )
    torch.testing.assert_close(
        plain_logprobs(str(tmp_path / "step_3"), sequences), scores, rtol=1e-4, atol=1e-4
    )
    add_by_peft_s_rules(model, tmp_path / "step_3" / "adapter", tmp_path / "by_hand")
    torch.testing.assert_close(
        plain_logprobs(tmp_path / "by_hand", sequences), scores, rtol=1e-4, atol=1e-4
    )


def add_by_peft_s_rules(base, adapter, path):
    """Add the adapter that peft's two files describe to the base model, and save that."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == (
        "LORA",
        RANK,
        base,
    )
    assert config["target_modules"] == sorted(LINEAR_LAYERS)
    full = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, module in full.named_modules():
            if name.split(".")[-1] in config["target_modules"]:
                a, b = (
                    tensors.pop(f"base_model.model.{name}.lora_{letter}.weight") for letter in "AB"
                )
                assert a.shape[0] == b.shape[1] == config["r"]
                module.weight += config["lora_alpha"] / config["r"] * b @ a
    assert not tensors, "tensors that belong to no target module"
    full.save_pretrained(path)


def test_a_run_lowers_its_loss_and_the_reference_is_the_base_model(model):
    sequences = random_sequences(8)
    policy = load(
        make_config(
            model,
            lora_rank=RANK,
            algo="reinforce",
            algo_args=(),
            lr=0.01,
            optim=OptimOptions(warmup=0),
            kl_coef=0.01,
        )
    )
    assert policy.reference is policy.module
    base = plain_logprobs(model, sequences).detach()
    steps = []
    for _ in range(10):
        current = policy.score([sequences], raw=True)[0]
        gap = base - current
        steps.append(policy.train_step([[bundle(sequences)]], policy_version=12))
        assert steps[-1]["kl_ref"] == pytest.approx(
            float((gap.exp() - 1 - gap).mean()), rel=1e-2, abs=1e-5
        )
    assert abs(steps[0]["kl_ref"]) < 1e-6 < steps[-1]["kl_ref"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.1
    for module in policy.module.modules():
        assert not isinstance(module, LoraLinear) or module.is_adapted


@pytest.mark.parametrize(
    "changed",
    [{"save_memory": ("activations",)}, {"save_memory": ("optimizer",)}, {"share_prefix": "tree"}],
)
def test_memory_options_change_no_published_weight(model, changed):
    plain, other = (
        dict(trained_policy(model, **options).named_full_parameters()) for options in ({}, changed)
    )
    for name, tensor in plain.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_frozen_bfloat16_base_with_float32_adapters_trains_and_merges_in_float32(model):
    """What a GPU rank does, on the CPU."""
    inner = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    add_adapters(inner, list(inner.model.layers), RANK)
    module = TokenLogprobs(inner)
    with torch.no_grad():
        for name, parameter in named_adapters(inner):
            parameter.normal_(std=0.1 if name.endswith("A") else 0.01)
    shard(
        [*inner.model.layers, module], init_device_mesh("cpu", (1,)), torch.bfloat16, offload=False
    )
    batch = pack(bundle(random_sequences(12)), one_row=False)
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    logprobs, *_ = module(*inputs)
    with torch.no_grad(), without_adapters(module):
        assert (module(*inputs)[0] - logprobs).abs().max() > 0.01
    logprobs.sum().backward()
    for _, parameter in named_adapters(inner):
        assert parameter.dtype == parameter.grad.dtype == torch.float32
        assert (
            math.isfinite(parameter.grad.full_tensor().abs().sum())
            and parameter.grad.full_tensor().abs().max() > 0
        )
    for _, parameter in named_base_parameters(inner):
        assert parameter.dtype == torch.bfloat16 and parameter.grad is None


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="--lora-rank 2: no linear layer to adapt in Sequential"):
        add_adapters(torch.nn.Sequential(torch.nn.Embedding(2, 2)), [torch.nn.Embedding(2, 2)], 2)


def test_two_adapters_of_one_seed_are_equal_and_of_another_differ(model):
    first, same, other = (
        dict(named_adapters(load(make_config(model, lora_rank=RANK, seed=seed)).module.model))
        for seed in (0, 0, 1)
    )
    for name, parameter in first.items():
        assert torch.equal(parameter.full_tensor(), same[name].full_tensor())
        is_zero = name.endswith("lora_B")
        assert torch.equal(parameter.full_tensor(), other[name].full_tensor()) == is_zero
        assert (parameter.full_tensor().abs().max() == 0) == is_zero
