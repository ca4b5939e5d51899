import math
import random
import re
from dataclasses import dataclass

import pytest
import torch

from algos.advantages import EPS
from algos.gae import estimate_step, gae
from asyncrl.config import AdvantageOptions, Config


def oracle(reward, values, gamma, lam):
    """Advantages of one sequence, each as the sum over all later tokens of (γλ)^k·δ, in float64."""
    deltas = [
        (reward if t == len(values) - 1 else gamma * values[t + 1]) - value for t, value in enumerate(values)
    ]  # fmt: skip
    return [
        math.fsum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(values)))
        for t in range(len(values))
    ]


def random_tokens(seed, num=5):
    """(reward, values) of sequences of several lengths."""
    rng = random.Random(seed)
    lengths = [1, *(rng.randint(1, 30) for _ in range(num - 1))]
    return [(rng.gauss(0, 1), [rng.gauss(0, 1) for _ in range(length)]) for length in lengths]


def columns(sequences):
    """Rewards, values and sequence_ids [N]."""
    lengths = torch.tensor([len(values) for _, values in sequences], dtype=torch.int64)
    rewards = torch.tensor(
        [reward for reward, _ in sequences], dtype=torch.float64
    ).repeat_interleave(lengths)
    values = torch.tensor([v for _, values in sequences for v in values], dtype=torch.float64)
    return rewards, values, torch.arange(len(sequences)).repeat_interleave(lengths)


@dataclass(frozen=True)
class Batch:
    advantages: torch.Tensor
    sequence_ids: torch.Tensor
    returns: torch.Tensor | None = None


DEFAULTS = {"gamma": 1.0, "lam": 1.0, "value_lam": 1.0, "whiten": True}


def made(sequences, split, **options):
    """What `estimate_step` makes of sequences in micro-batches [:split] and [split:]: advantages, returns, metrics."""
    parts = [columns(part) for part in (sequences[:split], sequences[split:])]
    batches = [[Batch(rewards, ids) for rewards, _, ids in parts]]
    values = [[values for _, values, _ in parts]]
    found, said = estimate_step(batches, values, lambda tensor: tensor, **(DEFAULTS | options))
    assert [len(update) for update in found] == [2]
    return *(
        torch.cat([getattr(batch, name) for batch in found[0]])
        for name in ("advantages", "returns")
    ), said


@pytest.mark.parametrize(
    ("gamma", "lam"), [(1, 1), (1, 0.95), (0.9, 0.8), (0.99, 0), (1, 0), (0, 1)]
)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_the_discounted_sums_of_all_later_errors(gamma, lam, seed):
    sequences = random_tokens(seed)
    expected = [a for reward, values in sequences for a in oracle(reward, values, gamma, lam)]
    assert gae(*columns(sequences), gamma, lam).tolist() == pytest.approx(
        expected, rel=1e-12, abs=1e-12
    )


def test_without_values_and_discount_every_token_has_the_reward_of_its_sequence():
    rewards, values, ids = columns(random_tokens(0))
    assert torch.equal(gae(rewards, torch.zeros_like(values), ids, 1.0, 1.0), rewards)


def test_advantages_are_those_of_roll():
    # ROLL, tests/utils/test_functionals.py, test_compute_advantage_masks_values_before_gae_bootstrap.
    ones, zeros = torch.ones(2), torch.zeros(2)
    assert gae(ones, zeros, zeros.long(), gamma=1.0, lam=0.95).tolist() == pytest.approx(
        [0.95, 1.0], abs=1e-5
    )


def test_nothing_is_made_of_nothing():
    none = torch.zeros(0)
    assert gae(none, none, none.long(), 1.0, 1.0).shape == (0,)


@pytest.mark.parametrize("split", [0, 2, 5])
def test_a_step_is_whitened_over_all_of_its_tokens_and_returns_have_a_lambda_of_their_own(split):
    sequences = random_tokens(1)
    advantages, returns, said = made(sequences, split, lam=0.9, value_lam=0.7, gamma=0.99)
    raw = [a for reward, values in sequences for a in oracle(reward, values, 0.99, 0.9)]
    mean = math.fsum(raw) / len(raw)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in raw) / (len(raw) - 1))
    assert advantages.tolist() == pytest.approx(
        [(a - mean) / (std + EPS) for a in raw], rel=1e-5, abs=1e-6
    )
    errors = [a for reward, values in sequences for a in oracle(reward, values, 0.99, 0.7)]
    wanted = [
        v + e for v, e in zip((v for _, values in sequences for v in values), errors, strict=True)
    ]
    assert returns.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    errors, wanted = (
        torch.tensor(errors, dtype=torch.float64),
        torch.tensor(wanted, dtype=torch.float64),
    )
    assert said == {
        "value/explained_variance": pytest.approx(float(1 - errors.var() / wanted.var()), rel=1e-6)
    }
    unwhitened = made(sequences, split, lam=0.9, value_lam=0.7, gamma=0.99, whiten=False)
    assert unwhitened[0].tolist() == pytest.approx(raw, rel=1e-5, abs=1e-6) and torch.equal(
        unwhitened[1], returns
    )


def test_right_values_explain_all_constant_ones_nothing_and_equal_returns_cannot_be_explained():
    right = [(reward, [reward] * 4) for reward in (0.0, 1.0, 3.0)]
    assert made(right, 1)[2] == {"value/explained_variance": pytest.approx(1.0)}
    assert made([(reward, [2.0] * 4) for reward, _ in right], 1)[2] == {
        "value/explained_variance": pytest.approx(0.0)
    }
    assert made([(1.0, [0.1, 0.2]), (1.0, [0.3])], 1)[2] == {}


def test_equal_advantages_are_whitened_to_zero():
    advantages, _, _ = made([(1e3 + 0.1, [0.0] * 7)] * 3, 1)
    assert advantages.abs().max() < 1e-5


@pytest.mark.parametrize(
    ("advantage", "options", "said"),
    [
        (
            "grpo",
            {"lam": 0.9},
            "--advantage grpo, which has no values as gae has, does not go with",
        ),
        ("gae", {"gamma": 1.1}, "--advantage.gamma must be at least 0 and at most 1, got 1.1"),
        (
            "gae",
            {"value_lr": 0},
            "--advantage.value-lr must be above 0 and at most 1,000,000,000, got 0",
        ),
        (
            "grpo",
            {"overlong": -1},
            "--advantage.overlong must be at least 0 and at most 1,000,000,000, got -1",
        ),
        (
            "grpo",
            {"overlong": 48},
            "--advantage.overlong 48 must be below --max-response-tokens 48",
        ),
    ],
)
def test_what_an_estimator_does_not_take_is_one_line(advantage, options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        Config(advantage=advantage, advantage_options=AdvantageOptions(**options)).checked()
    assert "\n" not in str(caught.value)
