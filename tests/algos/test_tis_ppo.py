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

loss = LOSSES["tis_ppo"]


def oracle(tokens, clip_low=0.2, clip_high=0.2, cap=2.0, level="token"):
    stale = [math.exp(token.proximal - token.behavior) for token in tokens]
    losses = []
    for token, ratio in zip(tokens, stale, strict=True):
        weight = min(math.prod(stale) if level == "sequence" else ratio, cap)
        moved = math.exp(token.logprob - token.proximal)
        objective = min(
            moved * token.advantage, clip(moved, 1 - clip_low, 1 + clip_high) * token.advantage
        )
        losses.append(-weight * objective)
    return losses


@pytest.mark.parametrize(
    "options", [{}, {"cap": 1.0}, {"clip_low": 0.05, "clip_high": 1.0, "cap": 5.0}], ids=str
)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("tokens_per_sequence", [1, 6])
def test_values_and_gradients_equal_the_formula(options, level, tokens_per_sequence):
    options = options | {"level": level}
    inputs = random_inputs(spread=0.6, tokens_per_sequence=tokens_per_sequence)
    check_values_and_gradients(
        functools.partial(loss, **options), functools.partial(oracle, **options), inputs
    )


def test_at_level_token_it_is_decoupled_ppo_that_truncates():
    inputs = random_inputs(spread=1.0)
    losses, stats = loss(inputs)
    other, other_stats = LOSSES["decoupled_ppo"](inputs, action="truncate", behavior_weight_cap=2.0)
    assert torch.equal(losses, other) and all(
        torch.equal(stats[name], other_stats[name]) for name in stats
    )


def test_before_the_first_update_of_a_step_only_the_weight_tells_it_from_policy_gradient_and_roll_s_tis_from_it():
    inputs = one_token(math.log(1.5), 1.0, proximal=math.log(1.5))
    assert gradient(loss, inputs).item() == pytest.approx(-1.5)
    assert gradient(LOSSES["tis"], inputs).item() == pytest.approx(-1.0)
    stale = one_token(math.log(3.0), 1.0, proximal=math.log(3.0))
    assert (
        gradient(loss, stale).item() == pytest.approx(-2.0)
        and loss(stale)[1]["clipped"].item() == 1
    )


@pytest.mark.parametrize(
    ("level", "log_ratios", "cap", "weights"),
    [
        # SkyRL, tests/train/algorithms/test_off_policy_correction.py, test_compute_tis_ratio_*.
        ("token", [0.5, -0.5, 1.0], 2.0, [1.648721, 0.606531, 2.0]),
        ("sequence", [0.5, -0.5, 1.0], 5.0, [2.718282] * 3),
        ("sequence", [1.0, 1.0, 1.0], 5.0, [5.0] * 3),
        # verl, tests/trainer/ppo/test_rollout_corr.py, test_mask_mode.
        ("token", [-1.0, 0.5, 0.5], 2.0, [0.367879, 1.648721, 1.648721]),
    ],
)
def test_weights_are_those_of_other_projects(level, log_ratios, cap, weights):
    inputs = random_inputs(3, tokens_per_sequence=3)
    stale = inputs.behavior_logprobs + torch.tensor(log_ratios, dtype=torch.float64)
    inputs = replace(inputs, proximal_logprobs=stale)
    assert loss(inputs, level=level, cap=cap)[1]["weight"].tolist() == pytest.approx(
        weights, abs=1e-5
    )


def test_losses_are_those_of_nemo_rl():
    # NeMo RL, tests/unit/algorithms/test_loss_functions.py,
    # test_clipped_pg_loss_on_policy_truncated_importance_sampling at token level; its numbers have four digits, and its
    # cap of 0.8 is one that --algo-args does not take.
    def tensor(*values):
        return torch.tensor(values, dtype=torch.float64)

    inputs = replace(
        random_inputs(3, tokens_per_sequence=3),
        logprobs=tensor(-1.69315, -1.0, -0.59453).requires_grad_(),
        proximal_logprobs=tensor(-1.0, -1.0, -1.0),
        behavior_logprobs=tensor(-0.5, -1.5, -0.8),
        advantages=tensor(1.0, -1.0, 2.0),
    )
    losses, stats = loss(inputs, cap=0.8)
    assert stats["weight"].tolist() == pytest.approx([0.6065, 0.8, 0.8], abs=5e-5)
    assert losses.tolist() == pytest.approx([-0.3033, 0.8, -1.92], abs=5e-5)
    assert losses.mean().item() == pytest.approx(-0.4744, abs=5e-5)


def test_another_level_is_an_error_naming_both():
    with pytest.raises(ValueError, match="token or sequence, got 'geometric'"):
        loss(random_inputs(), level="geometric")


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "proximal_ratio", "weight", "clipped"}, 60)
