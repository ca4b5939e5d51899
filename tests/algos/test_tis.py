import functools
import math

import pytest
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

loss = LOSSES["tis"]


def oracle(token, clip_low=0.0, clip_high=1.0):
    weight = clip(math.exp(token.held - token.behavior), clip_low, clip_high)
    return -weight * token.advantage * token.logprob


@pytest.mark.parametrize(
    "options", [{}, {"clip_high": 2.0}, {"clip_low": 0.5, "clip_high": 1.5}], ids=str
)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=0.6),
    )


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.25, 0.25), (0.999, 0.999), (1.001, 1.0), (50.0, 1.0)]
)
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
def test_weight_is_the_ratio_truncated_at_one_and_every_token_keeps_a_gradient(
    ratio, weight, advantage
):
    inputs = one_token(math.log(ratio), advantage)
    _, stats = loss(inputs)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (ratio > 1)
    assert gradient(loss, inputs).item() == pytest.approx(-weight * advantage)


def test_lower_clip_raises_small_weights():
    raised = functools.partial(loss, clip_low=0.5)
    assert gradient(raised, one_token(math.log(0.1), 1.0)).item() == pytest.approx(-0.5)


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
