import functools
import math

import pytest
from loss_checks import check_stats, check_values_and_gradients, clip, each, gradient, one_token, random_inputs

from algos import LOSSES

loss = LOSSES["cispo"]


def oracle(token, clip_low=0.1, clip_high=0.1, unified_mask=False):
    ratio = math.exp(token.held - token.behavior)
    weight = clip(ratio, 1 - clip_low, 1 + clip_high)
    if unified_mask and token.advantage > 0 and ratio > 1 + clip_high:
        weight = 0.0
    if unified_mask and token.advantage < 0 and ratio < 1 - clip_low:
        weight = 0.0
    return -weight * token.advantage * token.logprob


@pytest.mark.parametrize(
    "options", [{}, {"clip_low": 1.0, "clip_high": 3.0}, {"clip_low": 0.4, "unified_mask": True}], ids=str
)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options), each(functools.partial(oracle, **options)), random_inputs(spread=0.6)
    )


@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.2, 0.9), (0.91, 0.91), (1.0, 1.0), (1.09, 1.09), (1.11, 1.1), (9, 1.1)]
)
def test_every_token_keeps_a_gradient_whose_weight_is_clipped_on_both_sides(ratio, weight, advantage):
    inputs = one_token(math.log(ratio), advantage)
    _, stats = loss(inputs)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (not 0.9 < ratio < 1.1)
    assert gradient(loss, inputs).item() == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"), [(1.11, 1.0, 0.0), (0.2, 1.0, 0.9), (0.89, -1.0, 0.0), (9.0, -1.0, 1.1)]
)
def test_the_unified_mask_drops_what_ppo_would_clip(ratio, advantage, weight):
    masked = functools.partial(loss, unified_mask=True)
    inputs = one_token(math.log(ratio), advantage)
    assert gradient(masked, inputs).item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert masked(inputs)[1]["clipped"].item() == 1.0


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
