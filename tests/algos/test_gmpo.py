import functools
import math
from dataclasses import replace

import pytest
import torch
from loss_checks import check_stats, check_values_and_gradients, gradient, one_token, random_inputs

from algos import LOSSES

loss = LOSSES["gmpo"]


def oracle(tokens, clip_low=0.4, clip_high=0.4):
    """The formula of the paper, with min and sgn: (Π min(r^s, clip(r, e^−low, e^high)^s)^s)^(1/T)·A, s = sgn A."""
    product = 1.0
    for token in tokens:
        sign = math.copysign(1, token.advantage)
        ratio = math.exp(token.logprob - token.behavior)
        clipped = min(max(ratio, math.exp(-clip_low)), math.exp(clip_high))
        product *= min(ratio**sign, clipped**sign) ** sign
    return [-(product ** (1 / len(tokens))) * token.advantage for token in tokens]


@pytest.mark.parametrize(
    "options", [{}, {"clip_low": 0.1, "clip_high": 0.8}, {"clip_high": 0.05}], ids=str
)
@pytest.mark.parametrize("tokens_per_sequence", [1, 7, 60])
def test_values_and_gradients_equal_the_formula(options, tokens_per_sequence):
    chosen = functools.partial(loss, **options)
    inputs = random_inputs(spread=0.6, tokens_per_sequence=tokens_per_sequence)
    check_values_and_gradients(chosen, functools.partial(oracle, **options), inputs)
    assert 0 < chosen(inputs)[1]["clipped"].sum() < 60


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "is_clipped"),
    [
        (0.39, 1.0, False),
        (0.41, 1.0, True),
        (-3.0, 1.0, False),
        (-0.39, -1.0, False),
        (-0.41, -1.0, True),
        (3.0, -1.0, False),
    ],
)
def test_clip_boundaries_of_a_sequence_of_one_token_are_in_nats(log_ratio, advantage, is_clipped):
    inputs = one_token(log_ratio, advantage)
    assert loss(inputs)[1]["clipped"].item() == is_clipped
    expected = 0.0 if is_clipped else -math.exp(log_ratio) * advantage
    assert gradient(loss, inputs).item() == pytest.approx(expected, abs=1e-12)


def test_a_clipped_token_counts_as_the_bound_and_the_others_keep_their_gradient():
    inputs = random_inputs(2, tokens_per_sequence=2)
    moved = torch.tensor([2.0, 0.2], dtype=torch.float64)
    inputs = replace(
        inputs,
        logprobs=(inputs.behavior_logprobs + moved).requires_grad_(),
        advantages=torch.ones(2, dtype=torch.float64),
    )
    losses, stats = loss(inputs)
    mean_ratio = math.exp((0.4 + 0.2) / 2)
    assert losses.tolist() == pytest.approx([-mean_ratio] * 2)
    assert stats["clipped"].tolist() == [1.0, 0.0] and stats["weight"].tolist() == pytest.approx(
        [0.0, mean_ratio]
    )
    assert gradient(loss, inputs).tolist() == pytest.approx([0.0, -mean_ratio])


def test_a_wide_clip_makes_it_gspo_without_a_clip():
    inputs = random_inputs(spread=0.6)
    losses, _ = loss(inputs, clip_low=100.0, clip_high=100.0)
    expected, _ = LOSSES["gspo"](inputs, clip_low=1.0, clip_high=1e9)
    torch.testing.assert_close(losses, expected)


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
