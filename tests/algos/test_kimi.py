import functools

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

loss = LOSSES["kimi"]


def oracle(token, tau=0.1):
    return -token.advantage * token.logprob + tau / 2 * (token.logprob - token.behavior) ** 2


@pytest.mark.parametrize("options", [{}, {"tau": 2.0}, {"tau": 0.0}], ids=str)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=0.6),
    )


@pytest.mark.parametrize("log_ratio", [-3.0, 0.0, 2.0])
def test_a_token_without_advantage_is_pulled_back_to_the_policy_that_sampled_it(log_ratio):
    assert gradient(loss, one_token(log_ratio, 0.0)).item() == pytest.approx(0.1 * log_ratio)


def test_the_pull_balances_the_push_where_the_log_ratio_is_the_advantage_over_tau():
    assert (
        gradient(functools.partial(loss, tau=0.5), one_token(log_ratio=2.0, advantage=1.0)).item()
        == 0.0
    )


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio"}, 60)
