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

loss = LOSSES["weighted_topr"]


def oracle(token, positive_weight=1.0, negative_weight=1.0):
    if token.reward > 0:
        return -positive_weight * token.advantage * token.logprob
    tapered = clip(math.exp(token.held - token.behavior), 0, 1)
    return -negative_weight * tapered * token.advantage * token.logprob


@pytest.mark.parametrize(
    "options",
    [{}, {"positive_weight": 0.3, "negative_weight": 1.7}, {"negative_weight": 0.0}],
    ids=str,
)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=0.6),
    )


def test_with_equal_weights_of_one_it_is_topr():
    inputs = random_inputs()
    torch.testing.assert_close(loss(inputs), LOSSES["topr"](inputs), rtol=0, atol=0)


@pytest.mark.parametrize(("reward", "expected"), [(1.0, -0.25), (0.0, -3.0)])
def test_other_weights_are_not_policy_gradient_even_on_policy(reward, expected):
    weighted = functools.partial(loss, positive_weight=0.25, negative_weight=3.0)
    inputs = one_token(0.0, 1.0, reward)
    assert gradient(weighted, inputs).item() == pytest.approx(expected)
    assert weighted(inputs)[1]["weight"].item() == pytest.approx(-expected)


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
