import functools
import math
from dataclasses import replace

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
    "options",
    [{}, {"clip_low": 1.0, "clip_high": 3.0}, {"clip_low": 0.4, "unified_mask": True}],
    ids=str,
)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=0.6),
    )


@pytest.mark.parametrize("advantage", [-1.5, 1.5])
@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.2, 0.9), (0.91, 0.91), (1.0, 1.0), (1.09, 1.09), (1.11, 1.1), (9, 1.1)]
)
def test_every_token_keeps_a_gradient_whose_weight_is_clipped_on_both_sides(
    ratio, weight, advantage
):
    inputs = one_token(math.log(ratio), advantage)
    _, stats = loss(inputs)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (not 0.9 < ratio < 1.1)
    assert gradient(loss, inputs).item() == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [(1.11, 1.0, 0.0), (0.2, 1.0, 0.9), (0.89, -1.0, 0.0), (9.0, -1.0, 1.1)],
)
def test_the_unified_mask_drops_what_ppo_would_clip(ratio, advantage, weight):
    masked = functools.partial(loss, unified_mask=True)
    inputs = one_token(math.log(ratio), advantage)
    assert gradient(masked, inputs).item() == pytest.approx(-weight * advantage, abs=1e-12)
    assert masked(inputs)[1]["clipped"].item() == 1.0


def test_losses_are_those_of_skyrl():
    # SkyRL, tests/train/algorithms/test_losses.py, test_policy_loss_cispo: −2.9930 is their sum.
    current, old = (-1.69315, -1.0, -0.69741), (-1.0, -1.0, -3.0)
    found = []
    for logprob, behavior, advantage in zip(current, old, (1.0, -1.0, -4.0), strict=True):
        values = [torch.tensor([value], dtype=torch.float64) for value in (logprob, behavior)]
        inputs = replace(one_token(0.0, advantage), logprobs=values[0], behavior_logprobs=values[1])
        found.append(loss(inputs, clip_low=0.2, clip_high=0.2)[0].item())
    assert found == pytest.approx([1.35452, -1.0, -3.347568], abs=1e-5)
    assert sum(found) == pytest.approx(-2.9930, abs=5e-5)


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
