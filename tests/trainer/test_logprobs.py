"""What is said of tokens, beside what steps of test_policy.py show: the head's scores, what sampling leaves of a
distribution, and statistics of values beyond any bound."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tiny_families import packed_scores, plain_scores
from tiny_policy import brute_force_nucleus, random_sequences
from transformers import AutoModelForCausalLM

from asyncrl.trainer.lag_stats import TokenStats
from asyncrl.trainer.logprobs import TokenLogprobs, TokenScores
from asyncrl.trainer.packing import pack
from asyncrl.trainer.sampling import Sampling, sampling_logits

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(("chunk_rows", "tolerance"), [(7, 2**-6), (1024, 1e-5)])
@torch.no_grad()
def test_bfloat16_weights_give_a_float32_log_softmax_of_their_logits(untied, chunk_rows, tolerance):
    """A product of other rows rounds its sums otherwise: the logits differ by their last bit."""
    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).eval()
    sequences = random_sequences(1)
    found = packed_scores(TokenLogprobs(model, chunk_rows), sequences, "short_rows")
    expected = plain_scores(model, sequences)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(25))
def test_what_is_kept_equals_brute_force_and_always_holds_the_sampled_token(seed):
    draw = random.Random(seed).choice
    top_p, top_k = draw((1.0, 1e-9, 0.5, 0.9, 0.999)), draw((0, 1, 3, 29, 30, 100))
    cuts = (top_p, top_k, draw((0.0, 0.001, 0.1, 0.99)))
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(40, 30, generator=generator)
    targets = torch.randint(0, 30, (40,), generator=generator)
    result = sampling_logits(logits, targets, Sampling(0.9, *cuts))
    pairs = zip(logits, targets.tolist(), strict=True)
    expected = [brute_force_nucleus(*pair, 0.9, *cuts) for pair in pairs]
    torch.testing.assert_close(result, torch.stack(expected))


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
    assert reduced([0, 0], **{"loss/ratio": [huge, 0.0]})["loss/ess"] == pytest.approx(0.5)
    batch = pack(random_sequences(5), "short_rows")
    batch = replace(batch, lags=torch.zeros_like(batch.targets))
    logprobs = (batch.columns["behavior_logprobs"] + 300).requires_grad_()
    stats = TokenStats()
    stats.add_scores(batch, TokenScores(logprobs, logprobs, logprobs), {})
    metrics = stats.reduce()
    assert metrics["loss/sequence_ess"] == pytest.approx(1 / 5)
    assert metrics["loss/ratio_max"] == pytest.approx(math.exp(20))
