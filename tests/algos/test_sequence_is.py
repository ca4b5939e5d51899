import functools
import math
from dataclasses import replace

import pytest
import torch
from loss_checks import check_stats, check_values_and_gradients, gradient, one_token, random_inputs

from algos import LOSSES

loss = LOSSES["sequence_is"]


def oracle(tokens, cap=math.inf):
    weight = min(math.prod(math.exp(token.held - token.behavior) for token in tokens), cap)
    return [-weight * token.advantage * token.logprob for token in tokens]


@pytest.mark.parametrize("options", [{}, {"cap": 1.0}, {"cap": 1.5}], ids=str)
@pytest.mark.parametrize("tokens_per_sequence", [1, 4])
def test_values_and_gradients_equal_the_formula(options, tokens_per_sequence):
    check_values_and_gradients(
        functools.partial(loss, **options),
        functools.partial(oracle, **options),
        random_inputs(spread=0.4, tokens_per_sequence=tokens_per_sequence),
    )


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (4.9, 4.9), (5.1, 5.0), (1000.0, 5.0)])
def test_a_cap_bounds_the_weight_and_is_none_unless_given(ratio, weight):
    inputs = one_token(math.log(ratio), -1.0)
    assert (
        gradient(loss, inputs).item() == pytest.approx(ratio)
        and not loss(inputs)[1]["clipped"].item()
    )
    capped = functools.partial(loss, cap=5.0)
    assert gradient(capped, inputs).item() == pytest.approx(weight)
    assert capped(inputs)[1]["clipped"].item() == (ratio > 5)


def test_the_gradient_of_a_sequence_is_that_of_its_ratio_times_its_advantage():
    inputs = random_inputs(spread=0.4, tokens_per_sequence=5)
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().requires_grad_())
    log_ratio = (inputs.logprobs - inputs.behavior_logprobs).view(12, 5)
    objective = (log_ratio.sum(dim=1).exp() * inputs.advantages.view(12, 5)[:, 0]).sum()
    (expected,) = torch.autograd.grad(-objective, inputs.logprobs)
    torch.testing.assert_close(gradient(loss, inputs), expected)


def test_the_ratio_of_a_sequence_is_that_of_skyrl_s_sequence_level():
    # SkyRL, tests/train/algorithms/test_off_policy_correction.py, test_compute_tis_ratio_sequence_level and _with_cap.
    for log_ratios, cap, expected in (
        ([0.5, -0.5, 1.0], 5.0, 2.718282),
        ([1.0, 1.0, 1.0], 5.0, 5.0),
    ):
        inputs = random_inputs(3, tokens_per_sequence=3)
        moved = inputs.behavior_logprobs + torch.tensor(log_ratios, dtype=torch.float64)
        weight = loss(replace(inputs, logprobs=moved.requires_grad_()), cap=cap)[1]["weight"]
        assert weight.tolist() == pytest.approx([expected] * 3, abs=1e-5)


def test_stats_are_detached_and_one_value_per_sequence():
    stats = loss(random_inputs())[1]
    check_stats(stats, {"ratio", "weight", "clipped"}, 60)
    assert len(stats["ratio"].unique()) == 6
