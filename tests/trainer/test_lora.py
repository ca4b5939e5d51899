"""Adapters: where they are, how they begin, and what is published and saved. test_policy.py trains them."""

import json

import pytest
import torch
from plain_trainer import randomize
from safetensors.torch import load_file
from tiny_policy import load, make_config, random_sequences
from transformers import AutoModelForCausalLM

from asyncrl.trainer.checkpoint import save_weights
from asyncrl.trainer.model import named_adapters
from extras.lora import add_adapters

RANK = 3
LINEAR_LAYERS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}

pytestmark = pytest.mark.usefixtures("one_rank")


def adapters_of(policy):
    return {
        name: p.full_tensor().detach().clone() for name, p in named_adapters(policy.module.model)
    }


def test_every_linear_layer_of_every_block_has_an_adapter_that_begins_at_zero(model):
    """A is random, by the seed, and B is zero."""
    policies = [load(make_config(model, lora_rank=RANK, seed=seed)) for seed in (0, 0, 1)]
    first, same, other = map(adapters_of, policies)
    assert first.keys() == {
        f"model.layers.{layer}.{part}.{name}.{letter}"
        for layer in range(2)
        for part, names in LINEAR_LAYERS.items()
        for name in names
        for letter in ("lora_A", "lora_B")
    }
    for name, adapter in first.items():
        is_zero = name.endswith("lora_B")
        bound = 0 if is_zero else adapter.shape[1] ** -0.5
        assert 0.9 * bound <= adapter.abs().max() <= bound
        assert torch.equal(adapter, same[name])
        assert torch.equal(adapter, other[name]) == is_zero


def test_a_checkpoint_scores_as_the_policy_does_merged_or_with_its_adapter_on_the_base(
    model, tmp_path
):
    """What is sent is the merged model, and sending it leaves the adapters alone."""
    sequences = random_sequences(5)
    policy = load(make_config(model, lora_rank=RANK))
    base = policy.score([sequences], raw=True)[0]
    randomize(policy)
    adapters, merged = adapters_of(policy), dict(policy.named_full_parameters())
    save_weights(policy, str(tmp_path / "saved"))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert list(merged) == [name for name, _ in saved.named_parameters()]
    for name, weight in saved.named_parameters():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-6)
    for name, adapter in adapters_of(policy).items():
        assert torch.equal(adapter, adapters[name])
    scores = policy.score([sequences], raw=True)[0]
    assert not torch.allclose(base, scores, atol=1e-2)
    add_by_the_rules_of_peft(model, tmp_path / "saved" / "adapter", tmp_path / "by_hand")
    for folder in ("saved", "by_hand"):
        found = load(make_config(str(tmp_path / folder))).score([sequences], raw=True)[0]
        torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-4)


def add_by_the_rules_of_peft(base, adapter, path):
    """Add the adapter in the two files of peft to the base model, and save that."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    expected = {"peft_type": "LORA", "r": RANK, "base_model_name_or_path": base}
    assert expected.items() <= config.items()
    assert config["target_modules"] == sorted(sum(LINEAR_LAYERS.values(), ()))
    full = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, module in full.named_modules():
            if name.split(".")[-1] in config["target_modules"]:
                prefix = f"base_model.model.{name}"
                a, b = (tensors.pop(f"{prefix}.lora_{letter}.weight") for letter in "AB")
                assert a.shape[0] == b.shape[1] == config["r"]
                module.weight += config["lora_alpha"] / config["r"] * b @ a
    assert not tensors, "tensors that belong to no target module"
    full.save_pretrained(path)


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="--lora-rank 2: no linear layer to adapt in Sequential"):
        add_adapters(torch.nn.Sequential(torch.nn.Embedding(2, 2)), [torch.nn.Embedding(2, 2)], 2)
