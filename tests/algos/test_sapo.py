import functools
import math

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

loss = LOSSES["sapo"]


def oracle(token, tau_positive=1.0, tau_negative=1.05):
    tau = tau_positive if token.advantage > 0 else tau_negative
    ratio = math.exp(token.logprob - token.behavior)
    return -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * token.advantage


@pytest.mark.parametrize(
    "options", [{}, {"tau_positive": 0.3, "tau_negative": 4.0}, {"tau_positive": 10.0}], ids=str
)
def test_values_and_gradients_equal_the_formula(options):
    check_values_and_gradients(
        functools.partial(loss, **options),
        each(functools.partial(oracle, **options)),
        random_inputs(spread=0.6),
    )


def test_the_weight_is_what_the_gradient_has_in_place_of_the_ratio():
    inputs = random_inputs(spread=1.0)
    weight = loss(inputs)[1]["weight"]
    torch.testing.assert_close(gradient(loss, inputs), -weight * inputs.advantages)
    assert (weight < loss(inputs)[1]["ratio"]).all()


def test_the_gate_closes_on_both_sides_smoothly_and_sooner_for_a_bad_token():
    ratios = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
    good, bad = (
        [-a * gradient(loss, one_token(math.log(r), a)).item() / r for r in ratios]
        for a in (1.0, -1.0)
    )
    for first, second, fresh, *others in (good, bad):
        assert 0 < first < second < fresh == pytest.approx(1.0)
        assert [fresh, *others] == sorted([fresh, *others], reverse=True) and others[-1] > 0
    assert all(b < g for g, b, r in zip(good, bad, ratios, strict=True) if r != 1)


def test_the_value_at_ratio_one_is_that_of_areal():
    # AReaL, tests/test_functional.py, test_known_value of SAPO: gate 2, loss −2 at ratio 1, A = 1 and τ = 1.
    assert loss(one_token(0.0, 1.0))[0].item() == pytest.approx(-2.0, abs=1e-5)


def test_the_losses_of_skyrl_s_tokens_are_those_of_its_formula():
    # SkyRL, tests/train/algorithms/test_losses.py, test_sapo_policy_loss_basic: its inputs, τ 1 and 2; worked out by
    # hand from ratios 0.60653, 1.22140 and 0.90484.
    found = [
        loss(one_token(log_ratio, advantage), tau_positive=1.0, tau_negative=2.0)[0].item()
        for log_ratio, advantage in ((-0.5, 1.0), (0.2, -1.0), (-0.1, 0.5))
    ]
    assert found == pytest.approx([-1.611530, 1.217855, -0.952455], abs=1e-5)


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight"}, 60)
