import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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

loss = LOSSES["grpo"]


def oracle(token, clip_low=0.2, clip_high=0.2, dual_clip=None):
    ratio = math.exp(token.logprob - token.behavior)
    objective = min(
        ratio * token.advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * token.advantage
    )
    if dual_clip is not None and token.advantage < 0:
        objective = max(objective, dual_clip * token.advantage)
    return -objective


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.1, "clip_high": 0.4},
        {"dual_clip": 1.4},
        {"clip_high": 0.5, "dual_clip": 3.0},
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
    ("ratio", "advantage", "is_clipped"),
    [
        (1.19, 1.0, False),
        (1.21, 1.0, True),
        (0.5, 1.0, False),  # a good token that became rare keeps its gradient
        (0.81, -1.0, False),
        (0.79, -1.0, True),
        (9.0, -1.0, False),  # a bad token that became likely keeps its gradient, whatever the ratio
        (9.0, 0.0, False),
    ],
)
def test_gradient_is_cut_only_past_the_clip_in_the_direction_of_the_advantage(
    ratio, advantage, is_clipped
):
    inputs = one_token(math.log(ratio), advantage)
    _, stats = loss(inputs)
    assert stats["clipped"].item() == is_clipped
    expected = 0.0 if is_clipped else -ratio * advantage
    assert gradient(loss, inputs).item() == pytest.approx(expected, abs=1e-12)


def test_clip_higher_widens_only_the_upper_side():
    wide = functools.partial(loss, clip_low=0.2, clip_high=0.5)
    assert gradient(wide, one_token(math.log(1.4), 1.0)).item() == pytest.approx(-1.4)
    assert gradient(wide, one_token(math.log(1.6), 1.0)).item() == 0.0
    assert gradient(wide, one_token(math.log(0.75), -1.0)).item() == 0.0


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    dual = functools.partial(loss, dual_clip=3.0)
    losses, stats = dual(one_token(math.log(9.0), -2.0))
    assert (losses.item(), stats["clipped"].item()) == (6.0, 1.0)
    assert gradient(dual, one_token(math.log(9.0), -2.0)).item() == 0.0
    assert gradient(dual, one_token(math.log(2.9), -2.0)).item() == pytest.approx(5.8)
    assert gradient(dual, one_token(math.log(1.1), 2.0)).item() == pytest.approx(-2.2)


@pytest.mark.parametrize("bound", [1.2, 1.5, 3.0])
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("ratio", [0.01, 0.79, 0.81, 1.0, 1.19, 1.21, 1.49, 1.51, 2.9, 3.1, 50.0])
def test_the_dual_clip_is_the_two_sided_clip_of_intellect_2(bound, advantage, ratio):
    # arXiv 2505.07291: min(min(r, δ)·A, clip(r, 1 − ε, 1 + ε)·A), with δ of at least 1 + ε.
    inputs = one_token(math.log(ratio), advantage)
    objective = min(min(ratio, bound) * advantage, clip(ratio, 0.8, 1.2) * advantage)
    assert loss(inputs, dual_clip=bound)[0].item() == pytest.approx(-objective)


@pytest.mark.parametrize(
    ("dual_clip", "ratios", "advantages", "expected"),
    [
        # NeMo RL, tests/unit/algorithms/test_loss_functions.py, test_clipped_pg_loss_dual_clip; SkyRL has the same.
        (3.0, [0.5, 1.0, 10.0], [1.0, -1.0, -4.0], [-0.5, 1.0, 12.0]),
        # slime, tests/test_policy_loss.py, test_compute_policy_loss_applies_dual_clip_to_negative_advantages.
        (1.5, [2.0, 2.0, 0.5], [2.0, -2.0, 2.0], [-2.4, 3.0, -1.0]),
    ],
)
def test_losses_with_the_dual_clip_are_those_of_other_projects(
    dual_clip, ratios, advantages, expected
):
    tokens = [
        one_token(math.log(ratio), advantage)
        for ratio, advantage in zip(ratios, advantages, strict=True)
    ]
    assert [loss(token, dual_clip=dual_clip)[0].item() for token in tokens] == pytest.approx(
        expected, abs=1e-5
    )


@settings(deadline=None)
@given(st.floats(-4, 4), st.floats(-3, 3))
def test_clipping_never_lowers_the_loss(log_ratio, advantage):
    losses, _ = loss(one_token(log_ratio, advantage))
    assert losses.item() >= -math.exp(log_ratio) * advantage - 1e-9


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "clipped"}, 60)
