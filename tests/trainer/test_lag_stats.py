"""Statistics that test_policy.py has no tokens for: values beyond any bound."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_policy import random_sequences

from asyncrl.trainer.lag_stats import TokenStats
from asyncrl.trainer.logprobs import Scored
from asyncrl.trainer.packing import bundle, pack

pytestmark = pytest.mark.usefixtures("one_rank")


def reduced(lags, **stats):
    """The metrics of statistics that have a gradient, as those of a user's loss may."""
    token_stats = TokenStats()
    tensors = {name: torch.tensor(row, requires_grad=True) for name, row in stats.items()}
    token_stats.add(tensors, torch.tensor(lags))
    return token_stats.reduce()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_stays_in_its_lag_and_its_statistic(bad):
    metrics = reduced([0, 2, 6], x=[1.0, bad, 3.0], y=[1.0, 2.0, 3.0])
    for name in ("x", "x/lag_2"):
        assert metrics[name] == pytest.approx(bad, nan_ok=True)
    finite = {"x/lag_0": 1.0, "x/lag_5-8": 3.0, "y": 2.0, "y/lag_2": 2.0}
    assert finite.items() <= metrics.items()


def test_weights_beyond_a_floats_range_have_an_effective_sample_size():
    """The longest sequence outweighs the others."""
    huge = math.exp(50)  # its square overflows float32
    assert reduced([0, 0], ratio=[huge, 0.0])["ess"] == pytest.approx(0.5)
    batch = pack(bundle(random_sequences(5)), "short_rows")
    batch = replace(batch, lags=torch.zeros_like(batch.targets))
    logprobs = (batch.behavior_logprobs + 300).requires_grad_()
    stats = TokenStats()
    stats.add_scores(batch, Scored(logprobs, logprobs, logprobs), {})
    metrics = stats.reduce()
    assert metrics["sequence_ess"] == pytest.approx(1 / 5)
    assert metrics["ratio_max"] == pytest.approx(math.exp(20))
