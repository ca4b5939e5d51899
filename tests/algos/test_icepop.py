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

loss = LOSSES["icepop"]


def oracle(tokens, clip_low=0.2, clip_high=0.2, low=0.5, high=5.0, level="token"):
    logs = [token.proximal - token.behavior for token in tokens]
    losses = []
    for token, log in zip(tokens, logs, strict=True):
        k = math.exp(log if level == "token" else sum(logs) / len(logs))
        w = k if low <= k <= high else 0.0
        u = math.exp(token.logprob - token.proximal)
        losses.append(
            -w * min(u * token.advantage, clip(u, 1 - clip_low, 1 + clip_high) * token.advantage)
        )
    return losses


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_low": 0.05, "clip_high": 1.0},
        {"low": 0.9, "high": 1.2},
        {"level": "sequence"},
        {"level": "sequence", "low": 0.9, "high": 1.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens_per_sequence", [1, 10])
def test_values_and_gradients_equal_the_formula(options, tokens_per_sequence):
    check_values_and_gradients(
        functools.partial(loss, **options),
        functools.partial(oracle, **options),
        random_inputs(spread=0.6, tokens_per_sequence=tokens_per_sequence),
    )


@pytest.mark.parametrize(
    ("stale", "weight"), [(0.49, 0.0), (0.51, 0.51), (1.0, 1.0), (4.99, 4.99), (5.01, 0.0)]
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_token_outside_the_band_is_left_out(stale, weight, level):
    chosen = functools.partial(loss, level=level)
    inputs = one_token(math.log(stale), 1.0, proximal=math.log(stale))
    _, stats = chosen(inputs)
    assert stats["weight"].item() == pytest.approx(weight)
    assert stats["clipped"].item() == (weight == 0)
    assert gradient(chosen, inputs).item() == pytest.approx(-weight, abs=1e-12)


@pytest.mark.parametrize(
    ("proximal", "behavior", "advantages", "weights", "tolerance"),
    [
        # verl, tests/trainer/ppo/test_rollout_corr.py, test_exact_icepop_zeroes_weights_without_changing_mask.
        (
            [0.0] * 3,
            [-math.log(k) for k in (0.4, 0.8, 6.0)],
            [1.0, -1.0, 2.0],
            [0.0, 0.8, 0.0],
            1e-5,
        ),
        # NeMo RL, tests/unit/algorithms/test_loss_functions.py, test_clipped_pg_loss_icepop_importance_sampling: four
        # digits.
        ([-1.0] * 3, [-0.5, -3.5, -0.8], [1.0, -1.0, 2.0], [0.6065, 0.0, 0.8187], 5e-5),
    ],
    ids=["verl", "nemo_rl"],
)
def test_weights_are_those_of_other_projects(proximal, behavior, advantages, weights, tolerance):
    inputs = replace(
        random_inputs(3, tokens_per_sequence=3),
        logprobs=torch.tensor(proximal, dtype=torch.float64).requires_grad_(),
        proximal_logprobs=torch.tensor(proximal, dtype=torch.float64),
        behavior_logprobs=torch.tensor(behavior, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
    )
    chosen = functools.partial(loss, low=0.5, high=5.0)
    assert chosen(inputs)[1]["weight"].tolist() == pytest.approx(weights, abs=tolerance)
    expected = [-w * a for w, a in zip(weights, advantages, strict=True)]
    assert gradient(chosen, inputs).tolist() == pytest.approx(expected, abs=2 * tolerance)


@pytest.mark.parametrize(("moved", "is_clipped"), [(1.19, False), (1.21, True)])
def test_the_clip_is_anchored_at_the_proximal_policy(moved, is_clipped):
    inputs = one_token(math.log(2 * moved), 1.0, proximal=math.log(2))
    assert loss(inputs)[1]["clipped"].item() == is_clipped
    assert gradient(loss, inputs).item() == pytest.approx(
        0.0 if is_clipped else -2 * moved, abs=1e-12
    )


def test_level_sequence_leaves_out_or_keeps_a_sequence_as_a_whole():
    inputs = random_inputs(4, tokens_per_sequence=2)
    logs = torch.tensor([3.0, -3.0, 3.0, 3.0], dtype=torch.float64)
    inputs = replace(inputs, proximal_logprobs=inputs.behavior_logprobs + logs)
    assert loss(inputs)[1]["weight"].tolist() == [0.0] * 4
    assert loss(inputs, level="sequence")[1]["weight"].tolist() == pytest.approx(
        [1.0, 1.0, 0.0, 0.0]
    )


def test_another_level_is_an_error_naming_both():
    with pytest.raises(ValueError, match="token or sequence, got 'batch'"):
        loss(random_inputs(), level="batch")


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "proximal_ratio", "weight", "clipped"}, 60)
