import math

import pytest
import torch

from asyncrl.trainer.lag_stats import TokenStats
from asyncrl.trainer.logprobs import Scored
from asyncrl.trainer.packing import MicroBatch

pytestmark = pytest.mark.usefixtures("one_rank")


def test_means_are_over_all_tokens_and_over_those_of_each_lag():
    lags = [0, 1, 2, 3, 4, 5, 8, 9, 100]
    values = [float(2**i) for i in range(9)]
    stats = TokenStats()
    stats.add({"x": torch.tensor(values[:4])}, torch.tensor(lags[:4]))
    stats.add({"x": torch.tensor(values[4:])}, torch.tensor(lags[4:]))
    metrics = stats.reduce()
    assert metrics["x"] == sum(values) / 9 and metrics["tokens"] == 9
    by_lag = {
        name.removeprefix("x/lag_"): mean
        for name, mean in metrics.items()
        if name.startswith("x/lag_")
    }
    assert by_lag == {"0": 1.0, "1": 2.0, "2": 4.0, "3-4": 12.0, "5-8": 48.0, "9+": 192.0}


def test_buckets_without_tokens_are_absent():
    stats = TokenStats()
    stats.add({"x": torch.tensor([1.0])}, torch.tensor([2]))
    assert set(stats.reduce()) == {"x", "tokens", "x/lag_2", "tokens/lag_2"}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_stays_in_its_lag_and_its_statistic(bad):
    stats = TokenStats()
    stats.add(
        {"x": torch.tensor([1.0, bad, 3.0]), "y": torch.tensor([1.0, 2.0, 3.0])},
        torch.tensor([0, 2, 6]),
    )
    metrics = stats.reduce()
    assert metrics["x/lag_2"] == pytest.approx(bad, nan_ok=True) and metrics["x"] == pytest.approx(
        bad, nan_ok=True
    )
    assert (metrics["x/lag_0"], metrics["x/lag_5-8"], metrics["y"], metrics["y/lag_2"]) == (
        1.0,
        3.0,
        2.0,
        2.0,
    )


def effective_sample_size(**stats):
    token_stats = TokenStats()
    tensors = {name: torch.tensor(values) for name, values in stats.items()}
    token_stats.add(tensors, torch.zeros(len(tensors["ratio"]), dtype=torch.int64))
    metrics = token_stats.reduce()
    assert set(metrics) <= {*stats, "tokens", "ess"} | {
        f"{name}/lag_0" for name in (*stats, "tokens", "ess")
    }
    return metrics.get("ess")


def test_effective_sample_size_is_one_for_equal_weights_and_one_nth_for_a_single_one():
    assert effective_sample_size(ratio=[3.0] * 5) == pytest.approx(1.0)
    assert effective_sample_size(ratio=[1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_effective_sample_size_is_of_the_weights_that_the_loss_uses():
    assert effective_sample_size(ratio=[1.0, 9.0], weight=[1.0, 1.0]) == pytest.approx(1.0)


def test_effective_sample_size_of_huge_and_of_no_weights_is_a_number_or_absent():
    huge = math.exp(50)  # its square overflows float32
    assert effective_sample_size(ratio=[huge, 0.0]) == pytest.approx(0.5)
    assert effective_sample_size(ratio=[1.0, 1.0], weight=[0.0, 0.0]) is None


def test_stats_of_no_tokens_are_empty():
    assert TokenStats().reduce() == {}


def add_scores(stats, log_ratios, sequence_ids=None, lags=None, coefficients=1.0):
    """Add tokens with these log-ratios, and the slopes of a loss that is linear in their log-probs."""
    zeros = torch.zeros(len(log_ratios))
    ids = torch.zeros_like(zeros, dtype=torch.int64) if sequence_ids is None else sequence_ids
    batch = MicroBatch(
        *[zeros] * 5,
        sequence_ids=ids,
        behavior_logprobs=zeros,
        policy_versions=zeros,
        advantages=zeros,
        rewards=zeros,
        lengths=zeros,
        num_sequences=len(ids.unique()),
        lags=torch.zeros_like(ids) if lags is None else lags,
    )
    scored = Scored(log_ratios.clone().requires_grad_(), zeros, zeros)
    stats.add_scores(batch, scored, {})
    (scored.logprobs * coefficients).sum().backward()


def test_quantiles_of_ratios_and_the_sample_size_of_whole_sequences_are_those_of_their_definition():
    stats, log_ratios = TokenStats(), torch.linspace(-2, 1, 301)
    ids = torch.arange(301) // 43
    add_scores(stats, log_ratios[:86], ids[:86])
    add_scores(stats, log_ratios[86:], ids[86:] - ids[86])
    found = stats.reduce()
    ratios = log_ratios.double().exp()
    assert found["ratio_q01"] == pytest.approx(float(ratios[3]))
    assert found["ratio_q99"] == pytest.approx(float(ratios[297]))
    assert found["ratio_max"] == pytest.approx(math.e)
    whole = [math.exp(float(log_ratios[ids == i].double().sum())) for i in range(7)]
    expected = sum(whole) ** 2 / (7 * sum(w * w for w in whole))
    assert found["sequence_ess"] == pytest.approx(expected, rel=1e-4)


def test_the_slope_of_a_lag_is_the_norm_of_its_tokens_derivatives():
    stats = TokenStats()
    slopes = torch.tensor([3.0, 4.0, 12.0])
    add_scores(stats, torch.zeros(3), lags=torch.tensor([0, 0, 7]), coefficients=slopes)
    found = stats.reduce()
    assert (found["slope/lag_0"], found["slope/lag_5-8"], found["slope"]) == pytest.approx(
        (5.0, 12.0, 13.0)
    )


def test_stats_of_a_users_loss_may_have_a_gradient_and_any_type():
    stats = TokenStats()
    ratio = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    stats.add({"ratio": ratio * 2}, torch.tensor([0, 3]))
    assert stats.reduce()["ratio"] == 2.0
