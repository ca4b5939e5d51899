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

loss = LOSSES["topr"]


def oracle(token):
    if token.reward > 0:
        return -token.advantage * token.logprob
    return -clip(math.exp(token.held - token.behavior), 0, 1) * token.advantage * token.logprob


@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_equal_the_formula(seed):
    check_values_and_gradients(loss, each(oracle), random_inputs(seed=seed, spread=0.6))


@pytest.mark.parametrize(
    ("reward", "ratio", "weight"),
    [
        (1.0, 0.01, 1.0),
        (1.0, 30.0, 1.0),
        (0.0, 0.01, 0.01),
        (0.0, 0.99, 0.99),
        (0.0, 30.0, 1.0),
        (-1.0, 0.5, 0.5),
    ],
)
@pytest.mark.parametrize("advantage", [-2.0, 2.0])
def test_the_side_is_chosen_by_the_reward_and_not_by_the_advantage(
    reward, ratio, weight, advantage
):
    inputs = one_token(math.log(ratio), advantage, reward)
    _, stats = loss(inputs)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (reward <= 0 and ratio > 1)
    assert gradient(loss, inputs).item() == pytest.approx(-weight * advantage)


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
