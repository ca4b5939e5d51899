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

loss = LOSSES["opsm"]


def oracle(tokens, clip_low=0.2, clip_high=0.2, delta=0.5):
    moved = sum(token.behavior - token.held for token in tokens) / len(tokens)
    losses = []
    for token in tokens:
        ratio = math.exp(token.logprob - token.behavior)
        objective = min(
            ratio * token.advantage, clip(ratio, 1 - clip_low, 1 + clip_high) * token.advantage
        )
        losses.append(0.0 if token.advantage < 0 and moved > delta else -objective)
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"delta": 0.02}, {"clip_low": 0.1, "clip_high": 0.5, "delta": 0.1}], ids=str
)
@pytest.mark.parametrize("tokens_per_sequence", [1, 5])
def test_values_and_gradients_equal_the_formula(options, tokens_per_sequence):
    chosen = functools.partial(loss, **options)
    inputs = random_inputs(spread=0.6, tokens_per_sequence=tokens_per_sequence)
    check_values_and_gradients(chosen, functools.partial(oracle, **options), inputs)


@pytest.mark.parametrize(
    ("moved", "advantage", "is_left_out"),
    [(0.49, -1.0, False), (0.51, -1.0, True), (-3.0, -1.0, False), (3.0, 1.0, False)],
)
def test_only_a_bad_sequence_that_became_less_likely_is_left_out(moved, advantage, is_left_out):
    chosen = functools.partial(loss, clip_low=1.0, clip_high=100.0)
    inputs = one_token(-moved, advantage)
    _, stats = chosen(inputs)
    weight = 0.0 if is_left_out else math.exp(-moved)
    assert stats["clipped"].item() == is_left_out and stats["weight"].item() == pytest.approx(
        weight
    )
    assert gradient(chosen, inputs).item() == pytest.approx(-weight * advantage)


def test_the_mean_over_the_sequence_decides_for_all_of_its_tokens():
    inputs = random_inputs(4, tokens_per_sequence=2)
    moved = torch.tensor([-2.0, 0.9, -2.0, 1.1], dtype=torch.float64)
    inputs = replace(
        inputs,
        logprobs=(inputs.behavior_logprobs + moved).requires_grad_(),
        advantages=-torch.ones(4),
    )
    assert loss(inputs, clip_low=1.0)[1]["clipped"].tolist() == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("delta", "kept"), [(1.0, [1, 1, 0]), (2.5, [1, 1, 1]), (0.4, [1, 0, 0])])
def test_the_mask_is_that_of_trl(delta, kept):
    # TRL, tests/test_grpo_trainer.py, test_get_off_policy_mask: three sequences of 4 tokens with log-ratios −2, −0.5
    # and −2, advantages 1, −1 and −1, threshold 1; the other thresholds are ours.
    behavior = torch.full((12,), -1.0, dtype=torch.float64)
    moved = torch.tensor([-2.0, -0.5, -2.0], dtype=torch.float64).repeat_interleave(4)
    inputs = replace(
        random_inputs(12, tokens_per_sequence=4),
        logprobs=(behavior + moved).requires_grad_(),
        behavior_logprobs=behavior,
        advantages=torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64).repeat_interleave(4),
    )
    weight = loss(inputs, delta=delta)[1]["weight"]
    assert (
        (weight != 0).view(3, 4).all(dim=1).tolist()
        == (weight != 0).view(3, 4).any(dim=1).tolist()
        == kept
    )


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
