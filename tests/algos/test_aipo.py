import functools
import math

import pytest
from loss_checks import (
    check_stats,
    check_values_and_gradients,
    each,
    gradient,
    one_token,
    random_inputs,
)

from algos import LOSSES

loss = LOSSES["aipo"]


def oracle(token, cap=5.0):
    return -min(math.exp(token.held - token.behavior), cap) * token.advantage * token.logprob


@pytest.mark.parametrize("options", [{}, {"cap": 1.2}], ids=str)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=1.0),
    )


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.01, 0.01), (4.99, 4.99), (5.01, 5.0), (100.0, 5.0)]
)
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
def test_the_weight_is_capped_from_above_only_and_every_token_keeps_a_gradient(
    ratio, weight, advantage
):
    inputs = one_token(math.log(ratio), advantage)
    _, stats = loss(inputs)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (ratio > 5)
    assert gradient(loss, inputs).item() == pytest.approx(-weight * advantage)


def test_with_a_cap_of_one_it_is_tis():
    inputs = random_inputs()
    assert (
        gradient(functools.partial(loss, cap=1.0), inputs).tolist()
        == gradient(LOSSES["tis"], inputs).tolist()
    )


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
