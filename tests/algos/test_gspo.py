import functools
import math
from dataclasses import replace

import pytest
import torch
from loss_checks import (
    check_stats,
    check_values_and_gradients,
    clip,
    gradient,
    one_token,
    random_inputs,
)

from algos import LOSSES

loss = LOSSES["gspo"]


def oracle(tokens, clip_low=3e-4, clip_high=4e-4):
    ratio = math.exp(sum(token.logprob - token.behavior for token in tokens) / len(tokens))
    clipped_ratio = clip(ratio, 1 - clip_low, 1 + clip_high)
    return [-min(ratio * token.advantage, clipped_ratio * token.advantage) for token in tokens]


@pytest.mark.parametrize("options", [{}, {"clip_low": 0.1, "clip_high": 0.3}], ids=str)
@pytest.mark.parametrize("tokens_per_sequence", [1, 7, 60])
def test_values_and_gradients_equal_the_formula(options, tokens_per_sequence):
    check_values_and_gradients(
        functools.partial(loss, **options),
        functools.partial(oracle, **options),
        random_inputs(spread=0.6, tokens_per_sequence=tokens_per_sequence),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [
        (1.0003, 1.0, False),
        (1.0005, 1.0, True),
        (0.5, 1.0, False),
        (0.9998, -1.0, False),
        (0.9996, -1.0, True),
        (2.0, -1.0, False),
    ],
)
def test_clip_boundaries_of_a_sequence_of_one_token(ratio, advantage, is_clipped):
    inputs = one_token(math.log(ratio), advantage)
    assert loss(inputs)[1]["clipped"].item() == is_clipped
    expected = 0.0 if is_clipped else -ratio * advantage
    assert gradient(loss, inputs).item() == pytest.approx(expected, abs=1e-12)


def test_a_sequence_is_clipped_as_a_whole_and_its_token_ratios_cancel_in_the_geometric_mean():
    inputs = random_inputs(2, tokens_per_sequence=2)
    opposite = torch.tensor([2.0, -2.0], dtype=torch.float64)
    inputs = replace(
        inputs,
        logprobs=(inputs.behavior_logprobs + opposite).requires_grad_(),
        advantages=torch.ones(2, dtype=torch.float64),
    )
    assert loss(inputs)[1]["clipped"].tolist() == [0.0, 0.0]
    assert gradient(loss, inputs).tolist() == pytest.approx([-1.0, -1.0])
    moved = replace(inputs, logprobs=(inputs.behavior_logprobs + opposite + 0.01).requires_grad_())
    assert loss(moved)[1]["clipped"].tolist() == [1.0, 1.0]
    assert gradient(loss, moved).tolist() == [0.0, 0.0]


def test_ratios_and_losses_are_those_of_nemo_rl():
    # NeMo RL, tests/unit/algorithms/test_loss_functions.py, test_clipped_pg_loss_gspo and …_gspo_batch_size_2, whose
    # numbers have four digits.
    current = torch.tensor([-1.69315, -1.0, -0.59453] * 2, dtype=torch.float64)
    inputs = replace(
        random_inputs(6, tokens_per_sequence=3),
        logprobs=current.requires_grad_(),
        behavior_logprobs=torch.tensor([-1.0] * 3 + [-2.0] * 3, dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0, 2.0] * 2, dtype=torch.float64),
    )
    losses, stats = loss(inputs, clip_low=0.2, clip_high=0.2)
    assert stats["ratio"].tolist() == pytest.approx([0.9086] * 3 + [2.4697] * 3, abs=5e-5)
    assert losses.tolist() == pytest.approx(
        [-0.9086, 0.9086, -1.8171, -1.2, 2.4697, -2.4], abs=5e-5
    )
    assert losses[:3].mean().item() == pytest.approx(-0.6057, abs=5e-5)
    assert losses.mean().item() == pytest.approx(-0.4912, abs=5e-5)


def test_ratios_of_sequences_of_several_lengths_are_those_of_areal():
    # AReaL, tests/test_functional.py, test_sequence_level_1d_variable_lengths: e^0.5, e^1 and e^1.5.
    lengths = torch.tensor([3, 5, 4])
    inputs = replace(
        random_inputs(12),
        logprobs=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).repeat_interleave(lengths),
        behavior_logprobs=torch.tensor([0.5, 1.0, 1.5], dtype=torch.float64).repeat_interleave(
            lengths
        ),
        sequence_ids=torch.arange(3).repeat_interleave(lengths),
    )
    expected = [1.648721] * 3 + [2.718282] * 5 + [4.481689] * 4
    assert loss(inputs)[1]["ratio"].tolist() == pytest.approx(expected, abs=1e-5)


def test_one_token_s_loss_sends_its_gradient_to_the_whole_sequence():
    inputs = random_inputs(4, tokens_per_sequence=4)
    behavior, advantages = inputs.behavior_logprobs, torch.full((4,), 3.0, dtype=torch.float64)
    inputs = replace(inputs, logprobs=behavior.clone().requires_grad_(), advantages=advantages)
    (slopes,) = torch.autograd.grad(loss(inputs)[0][0], inputs.logprobs)
    assert slopes.tolist() == pytest.approx([-0.75] * 4)


def test_stats_are_detached_and_per_token():
    stats = loss(random_inputs())[1]
    check_stats(stats, {"ratio", "clipped"}, 60)
    assert len(stats["ratio"].unique()) == 6
