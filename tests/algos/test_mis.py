import functools
import math
from dataclasses import replace

import pytest
import torch
from loss_checks import check_stats, check_values_and_gradients, gradient, one_token, random_inputs

from algos import LOSSES

loss = LOSSES["mis"]


def oracle(tokens, low=0.5, high=2.0, level="token"):
    logs = [token.held - token.behavior for token in tokens]
    product = math.prod(math.exp(log) for log in logs)
    losses = []
    for token, log in zip(tokens, logs, strict=True):
        ratio = math.exp(log)
        judged = {"token": ratio, "sequence": product, "geometric": product ** (1 / len(tokens))}[
            level
        ]
        weight = product if level == "sequence" else ratio
        losses.append(-(weight if low <= judged <= high else 0.0) * token.advantage * token.logprob)
    return losses


@pytest.mark.parametrize(
    "band", [{}, {"low": 0.9, "high": 1.3}, {"low": 0.0, "high": 1.0}], ids=str
)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("tokens_per_sequence", [1, 4])
def test_values_and_gradients_equal_the_formula(band, level, tokens_per_sequence):
    chosen = functools.partial(loss, level=level, **band)
    inputs = random_inputs(spread=1.2, tokens_per_sequence=tokens_per_sequence)
    check_values_and_gradients(chosen, functools.partial(oracle, level=level, **band), inputs)
    assert 0 < chosen(inputs)[1]["clipped"].sum() < 60


@pytest.mark.parametrize(
    ("ratio", "weight"), [(0.49, 0.0), (0.51, 0.51), (1.0, 1.0), (1.99, 1.99), (2.01, 0.0)]
)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("advantage", [-1.5, 1.5])
def test_a_sequence_of_one_token_is_left_out_outside_the_band_whatever_its_advantage(
    ratio, weight, level, advantage
):
    chosen = functools.partial(loss, level=level)
    inputs = one_token(math.log(ratio), advantage)
    _, stats = chosen(inputs)
    assert stats["weight"].item() == pytest.approx(weight) and stats["clipped"].item() == (
        weight == 0
    )
    assert gradient(chosen, inputs).item() == pytest.approx(-weight * advantage)


@pytest.mark.parametrize(
    ("level", "log_ratios", "low", "high", "weights"),
    [
        # SkyRL, tests/train/algorithms/test_off_policy_correction.py: what its product and geometric masks keep.
        ("sequence", [0.2, 0.1, 0.0], 0.5, 2.0, [1.349859] * 3),
        ("sequence", [1.0, 1.0, 1.0], 0.5, 2.0, [0.0] * 3),
        ("geometric", [0.1, -0.1, 0.0], 0.9, 1.1, [1.105171, 0.904837, 1.0]),
        ("geometric", [0.5, 0.5, 0.5], 0.9, 1.1, [0.0] * 3),
        # NeMo RL, tests/unit/algorithms/test_loss_functions.py, test_clipped_pg_loss_seq_mask_tis.
        ("geometric", [0.0005, 0.0005, 0.0005], 0.999, 1.002, [1.000500] * 3),
        # verl, tests/trainer/ppo/test_rollout_corr.py, test_mask_mode: ratio 0.368 is rejected and 1.649 is not.
        ("token", [-1.0, 0.5, 0.5], 0.5, 2.0, [0.0, 1.648721, 1.648721]),
        # The same file, IcePop: 0.4, 0.8 and 6 become 0, 0.8 and 0.
        ("token", [math.log(0.4), math.log(0.8), math.log(6)], 0.5, 5.0, [0.0, 0.8, 0.0]),
    ],
)
def test_weights_are_those_of_other_projects(level, log_ratios, low, high, weights):
    inputs = random_inputs(3, tokens_per_sequence=3)
    moved = torch.tensor(log_ratios, dtype=torch.float64)
    inputs = replace(inputs, logprobs=(inputs.behavior_logprobs + moved).requires_grad_())
    chosen = functools.partial(loss, level=level, low=low, high=high)
    assert chosen(inputs)[1]["weight"].tolist() == pytest.approx(weights, abs=1e-5)
    expected = [-w * a for w, a in zip(weights, inputs.advantages.tolist(), strict=True)]
    assert gradient(chosen, inputs).tolist() == pytest.approx(expected, abs=1e-5)


def test_another_level_is_an_error_naming_all():
    with pytest.raises(ValueError, match="token, sequence or geometric, got 'batch'"):
        loss(random_inputs(), level="batch")


def test_stats_are_detached_and_per_token():
    check_stats(loss(random_inputs())[1], {"ratio", "weight", "clipped"}, 60)
