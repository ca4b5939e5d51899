"""Mixtures of experts: the loss that balances them and what is said of their routers, by loops over single tokens."""

import collections
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain_trainer import check_step, randomize, record_gradients
from tiny_policy import (
    assert_same_gradient,
    load,
    make_config,
    random_sequences,
    save_tiny_family,
)
from transformers import AutoModelForCausalLM

from asyncrl.config import OptimOptions
from asyncrl.job.node import _check_model
from asyncrl.trainer.checkpoint import save_weights
from asyncrl.trainer.dealing import distribute
from asyncrl.trainer.model import named_adapters

pytestmark = pytest.mark.usefixtures("one_rank")
TOP_K = 2
BALANCE = OptimOptions(balance=0.7)
FAMILY_OPTIONS = {
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": TOP_K,
        "moe_intermediate_size": 32,
    },
    "hunyuan_v1_moe": {"num_experts_per_tok": [2, 1], "moe_intermediate_size": [192, 192]},
}
"""As the published models of these families have their experts: other names, and sizes by layer."""


@pytest.mark.parametrize(
    ("family", "save_memory"),
    [
        ("qwen3_moe", ()),
        ("mixtral", ("activations",)),
        ("gpt_oss", ()),
        ("qwen3_next", ("activations",)),
        *itertools.product(FAMILY_OPTIONS, [()]),
    ],
)
def test_the_balance_loss_is_that_of_the_definition_however_sequences_are_packed(
    family, save_memory, tmp_path
):
    path = save_tiny_family(family, str(tmp_path), **FAMILY_OPTIONS.get(family, {}))
    _check_model(make_config(path, optim=BALANCE, dtype="bfloat16"), path, "cpu")
    sequences = random_sequences(9)
    expected, expected_metrics = by_loops(path, sequences)
    (untrained,) = random_sequences(1, seed=1)
    untrained = replace(untrained, loss_mask=np.zeros_like(untrained.loss_mask))
    sequences.append(untrained)  # it counts nowhere, whatever it is packed with
    for budget in (40, 100_000):
        gradients = []
        for optim in (OptimOptions(), BALANCE):
            policy = load(make_config(path, optim=optim, save_memory=save_memory))
            recorded = record_gradients(policy)
            shares = distribute([sequences], 1, budget, layout=policy.module.layout)[0]
            metrics = policy.train_step(shares, 11)
            gradients += recorded
            found = {name: value for name, value in metrics.items() if name.startswith("experts/")}
            assert found == pytest.approx(expected_metrics, rel=1e-4)
        without, with_balance = gradients
        found = {name: with_balance[name] - gradient for name, gradient in without.items()}
        trained = {name: gradient for name, gradient in expected.items() if gradient is not None}
        assert_same_gradient({name: found[name] for name in trained}, trained, relative=1e-3)


def by_loops(path, sequences):
    """The gradient of the balance loss by parameter, and the metrics, each token and expert by itself in float64."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    losses, entropies = [], []
    loads = collections.defaultdict(collections.Counter)
    gives_chances = model.config.model_type == "gemma4_text"
    top_k = getattr(model.config, "moe_topk", [TOP_K] * model.config.num_hidden_layers)
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.tokens)[None]
        layers = model(tokens, output_router_logits=True).router_logits
        for layer, logits in enumerate(layers):
            chances = logits.double() if gives_chances else logits.double().softmax(dim=-1)
            num_experts = chances.shape[-1]
            shares = collections.Counter()
            for row in chances:
                likeliest = sorted(range(num_experts), key=lambda expert: -row[expert].item())
                shares.update(likeliest[: top_k[layer]])
                entropies.append(-sum(p * math.log(p) for p in row.tolist()))
            loads[layer].update(shares)
            per_expert = [
                num_experts * shares[e] / (top_k[layer] * len(chances)) * chances[:, e].mean()
                for e in range(num_experts)
            ]
            losses.append(sum(per_expert))
    mean = sum(losses) / len(losses)
    (BALANCE.balance * mean).backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    busiest = [max(load.values()) * num_experts / load.total() for load in loads.values()]
    unused = [num_experts - len(load) for load in loads.values()]
    return gradient, {
        "experts/balance": mean.item(),
        "experts/entropy": sum(entropies) / len(entropies),
        "experts/load_max": sum(busiest) / len(busiest),
        "experts/unused": sum(unused) / (num_experts * len(unused)),
    }


@pytest.mark.parametrize(("family", "lora_rank"), [("qwen3_moe", 0), ("mixtral", 3)])
def test_a_mixture_is_trained_and_saved_as_transformers_has_it(family, lora_rank, tmp_path):
    """Adapters are on the attention, and none on experts or routers."""
    path = save_tiny_family(family, str(tmp_path / "model"))
    policy = load(make_config(path, lora_rank=lora_rank))
    randomize(policy)
    updates = [random_sequences(9)]
    check_step(policy, updates, 40, 11)
    adapted = {name.split(".")[-2] for name, _ in named_adapters(policy.module.model)}
    assert adapted == ({"q_proj", "k_proj", "v_proj", "o_proj"} if lora_rank else set())
    save_weights(policy, str(tmp_path / "saved"))
    again = load(make_config(str(tmp_path / "saved")))
    scores = [each.score(updates, raw=True)[0] for each in (policy, again)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


def test_a_model_without_experts_says_nothing_of_them_and_has_none_to_balance(model):
    policy = load(make_config(model))
    metrics = policy.train_step(distribute([random_sequences(2)], 1, 1000)[0], 11)
    assert not [name for name in metrics if name.startswith("experts/")]
    with pytest.raises(ValueError, match=r"^--optim.balance 0.7 balances experts, and a qwen3 has"):
        _check_model(make_config(model, optim=BALANCE), model, "cpu")
