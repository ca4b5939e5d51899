import functools
import math
from dataclasses import replace

import pytest
from loss_checks import check_stats, check_values_and_gradients, gradient, one_token, random_inputs

from algos import LOSSES

loss = LOSSES["vespo"]


def bump(ratio, k, lam):
    return math.exp(lam) * ratio**k * math.exp(-lam * ratio)


def oracle(tokens, k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0):
    ratio = math.prod(math.exp(token.held - token.behavior) for token in tokens)
    good, bad = bump(ratio, k_positive, lambda_positive), bump(ratio, k_negative, lambda_negative)
    return [
        -(good if token.advantage >= 0 else bad) * token.advantage * token.logprob
        for token in tokens
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"k_positive": 0.0, "lambda_negative": 0.1}, {"k_negative": 1.3, "lambda_positive": 0.7}],
    ids=str,
)
@pytest.mark.parametrize("tokens_per_sequence", [1, 4])
def test_values_and_gradients_equal_the_formula(options, tokens_per_sequence):
    check_values_and_gradients(
        functools.partial(loss, **options),
        functools.partial(oracle, **options),
        random_inputs(spread=0.4, tokens_per_sequence=tokens_per_sequence),
    )


@pytest.mark.parametrize(("advantage", "k", "lam"), [(1.0, 2.0, 3.0), (-1.0, 3.0, 2.0)])
def test_the_weight_is_one_on_fresh_data_highest_at_k_over_lambda_and_fades_on_both_sides(
    advantage, k, lam
):
    def weight(ratio):
        return -gradient(loss, one_token(math.log(ratio), advantage)).item() / advantage

    assert weight(1.0) == pytest.approx(1.0)
    top = k / lam
    assert weight(top) == pytest.approx(math.exp(lam - k) * top**k)
    assert weight(top * 0.9) < weight(top) > weight(top * 1.1)
    assert weight(0.01) < 0.01 and weight(20.0) < 0.01


def test_the_whole_sequence_and_no_mean_over_its_length_says_how_far_it_moved():
    found = []
    for length in (2, 20):
        inputs = random_inputs(length, tokens_per_sequence=length)
        moved = (inputs.behavior_logprobs + 0.1).requires_grad_()
        found.append(
            loss(replace(inputs, logprobs=moved, advantages=inputs.advantages.abs()))[1]["weight"][
                0
            ].item()
        )
    assert (
        found == pytest.approx([bump(math.exp(0.2), 2, 3), bump(math.exp(2), 2, 3)])
        and found[1] < found[0] / 100
    )


def test_stats_are_detached_and_one_value_per_sequence():
    stats = loss(random_inputs())[1]
    check_stats(stats, {"ratio", "weight"}, 60)
    assert len(stats["ratio"].unique()) == 6
