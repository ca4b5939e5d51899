import functools
import math
from dataclasses import replace

import pytest
import torch
from loss_checks import (
    check_stats,
    check_values_and_gradients,
    each,
    gradient,
    one_token,
    random_inputs,
)

from algos import LOSSES

loss = LOSSES["dppo"]


def binary_kl(b, p):
    return b * math.log(b / p) + (1 - b) * math.log((1 - b) / (1 - p))


def oracle(token, divergence="tv", delta_low=None, delta_high=None, cap=20.0):
    p, b = math.exp(token.held), math.exp(token.behavior)
    default, distance = (0.15, abs(p - b)) if divergence == "tv" else (0.05, binary_kl(b, p))
    weight = min(p / b, cap)
    if token.advantage > 0 and p > b and distance > (default if delta_high is None else delta_high):
        weight = 0.0
    if token.advantage < 0 and p < b and distance > (default if delta_low is None else delta_low):
        weight = 0.0
    return -weight * token.advantage * token.logprob


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"delta_low": 0.02, "delta_high": 0.3},
        {"cap": 1.2},
        {"divergence": "kl"},
        {"divergence": "kl", "delta_low": 0.005, "delta_high": 0.1, "cap": 1.5},
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_formula(options):
    inputs = random_inputs(num_tokens=200, spread=0.6)
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().clamp(max=-0.05).requires_grad_())
    chosen = functools.partial(loss, **options)
    check_values_and_gradients(chosen, each(functools.partial(oracle, **options)), inputs)
    assert 0 < chosen(inputs)[1]["clipped"].sum() < 100


@pytest.mark.parametrize(
    ("behavior", "prob", "advantage", "is_left_out"),
    [
        (0.50, 0.64, 1.0, False),
        (0.50, 0.66, 1.0, True),
        (0.50, 0.66, -1.0, False),  # a bad token that became likelier comes back
        (0.50, 0.36, -1.0, False),
        (0.50, 0.34, -1.0, True),
        (0.50, 0.34, 1.0, False),
        (0.01, 0.15, 1.0, False),  # fifteen times as likely, and only 0.14 of the mass
        # by a sixth less likely, which PPO's clip allows, and 0.16 of the mass
        (0.95, 0.79, -1.0, True),
    ],
)
def test_a_token_is_left_out_past_delta_of_its_probability_in_the_direction_of_the_advantage(
    behavior, prob, advantage, is_left_out
):
    inputs = probabilities([prob], [behavior], [advantage])
    assert loss(inputs)[1]["clipped"].item() == is_left_out
    assert gradient(loss, inputs).item() == pytest.approx(
        0.0 if is_left_out else -prob / behavior * advantage
    )


def test_above_the_cap_the_gradient_is_bounded_and_not_cut():
    inputs = probabilities([0.14], [0.001], [1.0])
    assert gradient(loss, inputs).item() == pytest.approx(-20.0)
    assert gradient(functools.partial(loss, cap=1000.0), inputs).item() == pytest.approx(-140.0)


@pytest.mark.parametrize(
    ("logprob", "behavior", "is_left_out"), [(0.0, 0.0, 0), (0.0, -1.0, 1), (-1.0, 0.0, 0)]
)
def test_kl_of_a_token_that_a_policy_is_sure_of_is_zero_or_infinite_and_never_nan(
    logprob, behavior, is_left_out
):
    inputs = replace(
        one_token(0.0, 1.0),
        logprobs=torch.tensor([logprob], dtype=torch.float64, requires_grad=True),
        behavior_logprobs=torch.tensor([behavior], dtype=torch.float64),
    )
    _, stats = loss(inputs, divergence="kl")
    assert stats["clipped"].item() == is_left_out


@pytest.mark.parametrize(
    ("divergence", "delta", "behavior", "logprobs", "advantages", "kept"),
    [
        ("tv", 0.2, [-1.0, -1.0, -1.0], [-0.3, -2.0, -0.9], [1.0, -1.0, 1.0], [0, 0, 1]),
        ("tv", 0.2, [-1.0, -1.0], [-2.0, -0.3], [1.0, -1.0], [1, 1]),
        ("kl", 0.05, [-1.0, -1.0], [-0.1, -0.95], [1.0, 1.0], [0, 1]),
        ("kl", 0.5, [-1.0, -1.0], [-1.01, -0.99], [1.0, -1.0], [1, 1]),
        ("tv", 0.2, [math.log(0.5)] * 2, [math.log(0.9), math.log(0.52)], [1.0, 1.0], [0, 1]),
    ],
)
def test_masks_and_gradients_are_those_of_other_projects(
    divergence, delta, behavior, logprobs, advantages, kept
):
    # SkyRL, tests/train/algorithms/test_losses.py, test_dppo_policy_loss; the last row is rLLM's test of its DPPO-TV.
    # SkyRL's loss is −ratio·A with gradient, which below the cap has the gradient of ours. Of the third row SkyRL says
    # only that a token is left out (its `clip_ratio` is above 0); that it is the first one is by hand.
    inputs = probabilities(
        [math.exp(x) for x in logprobs], [math.exp(x) for x in behavior], advantages
    )
    chosen = functools.partial(loss, divergence=divergence, delta_low=delta, delta_high=delta)
    expected = [
        -math.exp(x - b) * a * keep
        for x, b, a, keep in zip(logprobs, behavior, advantages, kept, strict=True)
    ]
    assert gradient(chosen, inputs).tolist() == pytest.approx(expected, abs=1e-5)


def test_another_divergence_is_an_error_naming_both():
    with pytest.raises(ValueError, match="tv or kl, got 'js'"):
        loss(random_inputs(), divergence="js")


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)


def probabilities(current, behavior, advantages):
    """Tokens with these probabilities under the current and the behavior policy, one sequence each."""
    logs = torch.tensor([current, behavior], dtype=torch.float64).log()
    return replace(
        random_inputs(len(current), tokens_per_sequence=1),
        logprobs=logs[0].requires_grad_(),
        behavior_logprobs=logs[1],
        proximal_logprobs=logs[1],
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )
