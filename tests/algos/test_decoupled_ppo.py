import functools
import math

import pytest
import torch
from loss_checks import (
    check_stats,
    check_values_and_gradients,
    clip,
    each,
    gradient,
    one_token,
    random_inputs,
)

from algos import LOSSES

loss = LOSSES["decoupled_ppo"]


def oracle(token, clip_low=0.2, clip_high=0.2, behavior_weight_cap=5.0, action="mask"):
    u = math.exp(token.logprob - token.proximal)
    w = math.exp(token.proximal - token.behavior)
    if w > behavior_weight_cap:
        w = 0.0 if action == "mask" else behavior_weight_cap
    return -w * min(u * token.advantage, clip(u, 1 - clip_low, 1 + clip_high) * token.advantage)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.4},
        {"behavior_weight_cap": 1.2},
        {"behavior_weight_cap": 1.2, "action": "truncate"},
    ],
    ids=str,
)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=0.6),
    )


@pytest.mark.parametrize(
    ("moved", "advantage", "is_clipped"),
    [
        (1.19, 1.0, False),
        (1.21, 1.0, True),
        (0.5, 1.0, False),
        (0.81, -1.0, False),
        (0.79, -1.0, True),
    ],
)
def test_the_clip_is_anchored_at_the_proximal_policy_whatever_the_staleness(
    moved, advantage, is_clipped
):
    stale = math.log(3.0)
    inputs = one_token(stale + math.log(moved), advantage, proximal=stale)
    assert loss(inputs)[1]["clipped"].item() == is_clipped
    expected = 0.0 if is_clipped else -3.0 * moved * advantage
    assert gradient(loss, inputs).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("stale", "action", "weight"),
    [(4.99, "mask", 4.99), (5.01, "mask", 0.0), (4.99, "truncate", 4.99), (5.01, "truncate", 5.0)],
)
def test_a_weight_above_the_cap_is_masked_or_truncated(stale, action, weight):
    inputs = one_token(math.log(stale), 1.0, proximal=math.log(stale))
    _, stats = loss(inputs, action=action)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (stale > 5)
    assert gradient(functools.partial(loss, action=action), inputs).item() == pytest.approx(-weight)


def test_where_proximal_and_current_policy_agree_it_is_importance_weighted_policy_gradient():
    for log_ratio in (-2.0, 0.3, 1.5):
        inputs = one_token(log_ratio, 0.7, proximal=log_ratio)
        assert gradient(loss, inputs).item() == pytest.approx(-0.7 * math.exp(log_ratio))


def test_another_action_is_an_error_naming_both():
    with pytest.raises(ValueError, match="mask or truncate, got 'drop'"):
        loss(random_inputs(), action="drop")


def test_stats_are_detached_and_per_token():
    inputs = random_inputs()
    stats = loss(inputs)[1]
    check_stats(stats, {"ratio", "proximal_ratio", "weight", "clipped"}, 60)
    torch.testing.assert_close(
        stats["ratio"], (inputs.logprobs.detach() - inputs.behavior_logprobs).exp()
    )
    torch.testing.assert_close(
        stats["proximal_ratio"], (inputs.logprobs.detach() - inputs.proximal_logprobs).exp()
    )
