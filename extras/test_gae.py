import math
import random
from dataclasses import dataclass
from statistics import mean, stdev, variance
from types import SimpleNamespace

import pytest
import torch

from algos.advantages import EPS
from extras.gae import ValueHead, estimate_step


@dataclass(frozen=True)
class Batch:
    advantages: torch.Tensor
    values: torch.Tensor
    sequence_ids: torch.Tensor
    returns: torch.Tensor | None = None


def oracle(sequences, gamma, lam):
    """Advantages of all tokens, each as the sum over the later tokens of its sequence of (γλ)^k·δ."""
    advantages = []
    for reward, values in sequences:
        following = [gamma * value for value in values[1:]] + [reward]
        deltas = [after - value for after, value in zip(following, values, strict=True)]
        for t in range(len(values)):
            terms = [(gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])]
            advantages.append(math.fsum(terms))
    return advantages


def random_sequences(seed, scale=1.0):
    """(reward, values) of five sequences of several lengths; `scale` is the std of both."""
    rng = random.Random(seed)
    lengths = [1, *(rng.randint(1, 30) for _ in range(4))]
    return [(rng.gauss(0, scale), [rng.gauss(0, scale) for _ in range(n)]) for n in lengths]


def columns(sequences):
    """Rewards, values and sequence_ids [N]."""
    lengths = torch.tensor([len(values) for _, values in sequences], dtype=torch.int64)
    rewards = torch.tensor([reward for reward, _ in sequences], dtype=torch.float64)
    values = torch.tensor([v for _, values in sequences for v in values], dtype=torch.float64)
    ids = torch.arange(len(sequences)).repeat_interleave(lengths)
    return rewards.repeat_interleave(lengths), values, ids


def estimate(sequences, split=1, lam=1.0, value_lam=1.0, gamma=1.0, whiten=True):
    """Advantages, returns and metrics of a step of two updates: of sequences [:split], and of the others."""
    parts = [columns(part) for part in (sequences[:split], sequences[split:])]
    options = SimpleNamespace(gamma=gamma, lam=lam, value_lam=value_lam, whiten=whiten)
    updates, metrics = estimate_step(
        [[Batch(rewards.float(), values, ids)] for rewards, values, ids in parts],
        lambda tensor: tensor,
        options,
    )
    batches = [batch for (batch,) in updates]
    assert [len(batch.returns) for batch in batches] == [len(ids) for _, _, ids in parts]
    advantages = torch.cat([batch.advantages for batch in batches])
    returns = torch.cat([batch.returns for batch in batches])
    assert advantages.dtype == returns.dtype == torch.float32
    return advantages, returns, metrics


@pytest.mark.parametrize(
    ("gamma", "lam", "value_lam"), [(0.99, 0.9, 0.7), (1, 1, 0), (0.9, 0, 1), (0, 1, 0.95)]
)
@pytest.mark.parametrize("split", [0, 2, 5])
@pytest.mark.parametrize(
    "sequences",
    [random_sequences(1), random_sequences(1, scale=1e-5), [(0.0, [1.0]), (2.0, [0.5])]],
    ids=["random", "small", "two tokens"],
)
def test_a_step_is_whitened_over_all_of_its_tokens_and_returns_have_a_lambda_of_their_own(
    sequences, split, gamma, lam, value_lam
):
    options = {"split": split, "lam": lam, "value_lam": value_lam, "gamma": gamma}
    advantages, returns, metrics = estimate(sequences, **options)
    raw = oracle(sequences, gamma, lam)
    whitened = [(advantage - mean(raw)) / (stdev(raw) + EPS) for advantage in raw]
    assert advantages.tolist() == pytest.approx(whitened, rel=1e-5, abs=1e-6)
    errors = oracle(sequences, gamma, value_lam)
    values = [value for _, values in sequences for value in values]
    expected = [value + error for value, error in zip(values, errors, strict=True)]
    assert returns.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
    explained = 1 - variance(errors) / variance(expected)
    assert metrics == {"value/explained_variance": pytest.approx(explained, rel=1e-6)}
    raw_advantages, raw_returns, _ = estimate(sequences, **options, whiten=False)
    assert raw_advantages.tolist() == pytest.approx(raw, rel=1e-5, abs=1e-6)
    assert torch.equal(raw_returns, returns)


@pytest.mark.parametrize(
    ("sequences", "metrics"),
    [
        ([(reward, [reward] * 4) for reward in (0.0, 1.0, 3.0)], {"value/explained_variance": 1.0}),
        ([(reward, [2.0] * 4) for reward in (0.0, 1.0, 3.0)], {"value/explained_variance": 0.0}),
        ([(1.0, [0.1, 0.2]), (1.0, [0.3])], {}),
        ([(reward, [0.0]) for reward in (0.0, 1e-8, 3e-8)], {}),
    ],
    ids=["right values", "constant values", "equal returns", "returns that rounding tells apart"],
)
def test_what_the_values_explain_of_the_returns(sequences, metrics):
    assert estimate(sequences)[2] == pytest.approx(metrics)


def test_equal_advantages_are_whitened_to_zero():
    advantages, _, _ = estimate([(1e3 + 0.1, [0.0] * 7)] * 3)
    assert advantages.abs().max() < 1e-5


def test_the_backward_pass_of_the_head_keeps_no_float32_copy_of_hidden_states():
    head, kept = ValueHead(8).to_empty(device="cpu"), []
    torch.nn.init.ones_(head.weight)
    hidden = torch.ones(5, 8, dtype=torch.bfloat16, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks:
        head(hidden).sum().backward()
    assert (torch.float32, hidden.shape) not in [(tensor.dtype, tensor.shape) for tensor in kept]
    assert torch.equal(hidden.grad, torch.ones_like(hidden))
    assert torch.equal(head.weight.grad, torch.full((8,), 5.0))
