"""The value head: its gradient and the model's by their definition, however a step is split; where its weight goes."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from test_policy import AGGREGATIONS, make_config, share_of
from tiny_policy import (
    assert_same_gradient,
    first_gradient,
    load,
    random_sequences,
    random_tree,
    save_tiny_model,
)
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForCausalLM

from asyncrl.config import AdvantageOptions, OptimOptions
from asyncrl.trainer.batch import distribute
from asyncrl.trainer.checkpoint import save_weights
from asyncrl.trainer.model import ValueHead

pytestmark = pytest.mark.usefixtures("one_rank")
ARGS = AdvantageOptions(gamma=0.99, lam=0.9, value_lam=0.8, value_coef=0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)


def with_head(model, **options):
    """A policy whose head knows something: small random weights."""
    policy = load(make_config(model, **{"advantage": "gae", "advantage_options": ARGS, **options}))
    head = policy.module.value_head.weight
    with torch.no_grad():
        head.copy_(distribute_tensor(random_head(), head.device_mesh, head.placements))
    return policy


def random_head():
    return torch.randn(64, generator=torch.Generator().manual_seed(5)) / 20


def gradient_of(policy):
    """Full gradient of the first update, the head's too."""
    beta1 = policy.optimizer.defaults["betas"][0]
    of_head = policy.optimizer.state[policy.module.value_head.weight]["exp_avg"].full_tensor() / (
        1 - beta1
    )
    return first_gradient(policy) | {"value_head": of_head}


def advantages_and_returns(reward, values):
    """By ARGS: both of one sequence, token by token from its end, in float64."""
    found = []
    for lam in (0.9, 0.8):
        later, of = 0.0, [0.0] * len(values)
        for t in reversed(range(len(values))):
            gained = reward if t == len(values) - 1 else 0.99 * values[t + 1]
            of[t] = later = gained - values[t] + 0.99 * lam * later
        found.append(of)
    return found[0], [v + e for v, e in zip(values, found[1], strict=True)]


def plain_gradient(path, sequences, aggregation, max_response_tokens):
    """Metrics and gradient by the definition: one sequence at a time, unpacked, unsharded; the loss is TIS."""
    model, head = AutoModelForCausalLM.from_pretrained(path).eval(), random_head().requires_grad_()
    tokens = []
    for s in (s for s in sequences if s.num_trained):
        out = model(torch.from_numpy(s.tokens)[None], output_hidden_states=True)
        before = np.flatnonzero(s.loss_mask) - 1
        values = out.hidden_states[-1][0][before] @ head
        targets = torch.from_numpy(s.tokens[s.loss_mask])[:, None]
        logprobs = out.logits[0][before].log_softmax(dim=-1).gather(1, targets)[:, 0]
        made = advantages_and_returns(s.advantage, values.tolist())
        behavior = s.behavior_logprobs[s.loss_mask]
        tokens += zip(logprobs, behavior, values, *made, [len(before)] * len(before), strict=True)
    raw = torch.tensor([advantage for *_, advantage, _, _ in tokens], dtype=torch.float64)
    num, loss, of_values = sum(1 for s in sequences if s.num_trained), 0.0, 0.0
    for logprob, behavior, value, advantage, wanted, length in tokens:
        whitened = float((advantage - raw.mean()) / raw.std())
        error = (value - wanted) ** 2 / 2
        ratio = min(math.exp(logprob.item() - float(behavior)), 10.0)
        divisor = {
            "token_mean": len(tokens),
            "sequence_mean": num * length,
            "constant": num * max_response_tokens,
        }
        loss = loss + (-ratio * whitened * logprob + 0.3 * error) / divisor[aggregation]
        of_values += error.item() / len(tokens)
    loss.backward()
    values, returns = np.array([(value.item(), wanted) for _, _, value, _, wanted, _ in tokens]).T
    explained = 1 - np.var(returns - values) / np.var(returns)
    metrics = {"loss": loss.item(), "value/loss": of_values, "value/explained_variance": explained}
    return metrics, {n: p.grad for n, p in model.named_parameters()} | {"value_head": head.grad}


@pytest.mark.parametrize("budget", [24, 75, 100_000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_those_of_the_definition_for_any_micro_batches(model, aggregation, budget):
    sequences = random_sequences(17, seed=3)
    policy = with_head(model, loss_aggregation=aggregation)
    stats = policy.train_step(share_of(sequences, budget), policy_version=12)
    wanted, gradient = plain_gradient(
        model, sequences, aggregation, policy.config.max_response_tokens
    )
    assert {name: stats[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    found = gradient_of(policy)
    assert_same_gradient(found, gradient)
    norm = math.sqrt(
        sum(float(g.square().sum()) for name, g in found.items() if name != "value_head")
    )
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-4), "that of the model alone"


@pytest.mark.parametrize(
    ("aggregation", "budget"), zip(AGGREGATIONS, (35, 60, 100_000), strict=True)
)
def test_random_trees_have_the_gradient_of_the_definition(model, aggregation, budget):
    """Values too are of a prefix, and what they are to foretell is of its branches. Tolerance 1e-5."""
    sequences = random_tree(12, seed=len(aggregation))
    for sharing in ("prompt", "tree"):
        policy = with_head(model, loss_aggregation=aggregation, share_prefix=sharing)
        stats = policy.train_step(distribute([sequences], 1, budget, sharing)[0], policy_version=12)
        wanted, gradient = plain_gradient(
            model, sequences, aggregation, policy.config.max_response_tokens
        )
        assert {name: stats[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
        assert_same_gradient(gradient_of(policy), gradient)
    assert stats["tokens/saved_share"] > 0.15


def updates_of(step):
    return [random_sequences(3, seed=10 * step + i) for i in range(2)]


def train_with_values(rank, folder, configs, num_ranks):
    """Body of a rank: two steps of two updates."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store {num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found = {}
    for name, config in configs.items():
        policy = load(config)
        for step in range(2):
            share = distribute(updates_of(step), num_ranks, 24)[rank]
            stats = policy.train_step(share, policy_version=12)
        found[name] = (
            stats,
            gradient_of(policy),
            policy.module.value_head.weight.full_tensor().clone(),
        )
    if rank == 0:
        torch.save(found, os.path.join(folder, f"found {num_ranks}.pt"))
    dist.destroy_process_group()


def test_two_ranks_train_the_head_as_one_does(model, tmp_path):
    """Now and then one has nothing. Tolerance 1e-2: AdamW's first steps are near ±lr whatever the gradient's size, and
    amplify rounding."""
    first_rank, second_rank = distribute(updates_of(1), 2, 24)
    counts = [
        (len(ours), len(theirs)) for ours, theirs in zip(first_rank, second_rank, strict=True)
    ]
    assert any(ours != theirs for ours, theirs in counts), "a rank gets an empty micro-batch"
    options = {"advantage": "gae", "lr": 1e-3, "minibatches": 2, "advantage_options": ARGS}
    variants = {
        "whole": {},
        "lora": {"lora_rank": 2, "kl_coef": 0.1},
        "offloaded": {"save_memory": ("optimizer",)},
    }
    configs = {name: make_config(model, **options, **of) for name, of in variants.items()}
    for num_ranks in (1, 2):
        assert (
            run_ranks(train_with_values, num_ranks, str(tmp_path), configs, num_ranks)
            == [0] * num_ranks
        )
    one, two = (torch.load(tmp_path / f"found {num_ranks}.pt") for num_ranks in (1, 2))
    for name in configs:
        assert two[name][0] == pytest.approx(one[name][0], rel=1e-2, abs=1e-4)
        assert_same_gradient(two[name][1], one[name][1], relative=1e-2)
        torch.testing.assert_close(two[name][2], one[name][2], rtol=1e-2, atol=1e-4)
        assert one[name][2].abs().min() > 0


def test_before_values_know_anything_advantages_are_the_whitened_rewards(model):
    """As REINFORCE++ has them over sequences, here of one length."""
    sequences = [
        replace(s, reward=s.advantage) for s in random_sequences(9, min_tokens=8, max_tokens=8)
    ]
    rewards = np.array([s.reward for s in sequences])
    whitened = (rewards - rewards.mean()) / rewards.repeat(6).std(ddof=1)
    plain = [replace(s, advantage=a) for s, a in zip(sequences, whitened, strict=True)]
    with_values, without = load(make_config(model, advantage="gae")), load(make_config(model))
    stats = with_values.train_step(share_of(sequences), policy_version=12)
    without.train_step(share_of(plain), policy_version=12)
    assert_same_gradient(first_gradient(with_values), first_gradient(without))
    assert stats["value/explained_variance"] == pytest.approx(0.0, abs=1e-12)


def test_values_learn_to_foretell_rewards(model):
    sequences = random_sequences(8, seed=2)
    options = {
        "advantage_options": AdvantageOptions(value_coef=1),
        "optim": OptimOptions(warmup=0),
        "lr": 1e-3,
    }
    policy = load(make_config(model, advantage="gae", **options))
    found = [policy.train_step(share_of(sequences), 12) for _ in range(30)]
    assert (
        found[-1]["value/explained_variance"] > 0.9
        and found[-1]["value/loss"] < 0.1 * found[0]["value/loss"]
    )


def test_the_head_has_its_own_learning_rate_and_its_gradient_is_clipped_by_itself(model):
    options = {
        "advantage": "gae",
        "advantage_options": AdvantageOptions(value_lr=4),
        "lr": 0.01,
        "max_grad_norm": 1e-3,
    }
    options["optim"] = OptimOptions(warmup=0)
    policy = load(make_config(model, **options))
    policy.train_step(share_of(random_sequences(5)), 12)
    *others, of_head = gradient_of(policy).values()
    assert math.sqrt(sum(float(g.square().sum()) for g in others)) == pytest.approx(1e-3, rel=1e-2)
    assert float(of_head.norm()) == pytest.approx(1e-3, rel=1e-2)
    moved = policy.module.value_head.weight.full_tensor().abs()
    assert moved.max().item() == pytest.approx(0.04, rel=1e-2)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_no_engine_is_sent_the_head_and_a_saved_model_is_a_plain_one_with_the_head_beside_it(
    model, tmp_path, lora_rank
):
    policy = with_head(model, lora_rank=lora_rank)
    plain = AutoModelForCausalLM.from_pretrained(model)
    assert {spec.name for spec in policy.sent_specs()} == {
        name for name, _ in plain.named_parameters()
    }
    assert [name for name, _ in policy.sent_parameters()] == [
        spec.name for spec in policy.sent_specs()
    ]
    save_weights(policy, str(tmp_path / "saved"))
    (weights,) = (tmp_path / "saved").glob("*.safetensors")
    assert load_file(weights).keys() == plain.state_dict().keys()
    assert torch.equal(
        load_file(tmp_path / "saved/value_head/value_head.safetensors")["value_head.weight"],
        random_head(),
    )


def test_the_head_computes_in_float32_above_a_model_in_bfloat16(model):
    policy, seen = with_head(model, dtype="bfloat16"), []
    policy.module.value_head.register_forward_hook(
        lambda _, given, values: seen.append((*given, values))
    )
    policy.score([random_sequences(2)])
    ((hidden, values),) = seen
    assert hidden.dtype == torch.bfloat16 and values.dtype == torch.float32
    assert torch.equal(values, hidden.float() @ random_head())


def test_the_backward_pass_keeps_no_float32_copy_of_hidden_states():
    head, kept = ValueHead(8).to_empty(device="cpu"), []
    torch.nn.init.ones_(head.weight)
    hidden = torch.ones(5, 8, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        head(hidden).sum().backward()
    assert not [
        tensor for tensor in kept if tensor.dtype == torch.float32 and tensor.shape == hidden.shape
    ]
    assert torch.equal(hidden.grad, torch.ones_like(hidden)) and torch.equal(
        head.weight.grad, torch.full((8,), 5.0)
    )


def test_without_gae_nothing_has_a_head(model):
    policy = load(make_config(model))
    assert policy.module.value_head is None and len(policy.optimizer.param_groups) == 1
    assert not [
        name
        for name in policy.train_step(share_of(random_sequences(2)), 12)
        if name.startswith("value/")
    ]
