"""The simulated latency of a step: its laws against scipy's. errors.toml has what cannot be read."""

import random

import numpy as np
import pytest
from scipy import stats

from extras.latency_law import LatencyLaw

NUM_DRAWS = 5000


@pytest.mark.parametrize(
    ("text", "law", "failure_rate"),
    [
        (" normal:2,5  fail:0.2 ", stats.norm(2, 5), 0.2),
        ("fail:0.2 lognormal:1,0.5 scale:3", stats.lognorm(0.5, scale=3 * np.e), 0.2),
    ],
)
def test_delays_follow_their_law_and_fail_at_their_rate(text, law, failure_rate):
    parsed, rng = LatencyLaw.parse(text), random.Random(0)
    delays = [parsed.draw(rng) for _ in range(NUM_DRAWS)]
    assert parsed.draw(random.Random(0)) == delays[0]
    seconds = np.array([delay.seconds for delay in delays])
    # A negative draw counts as 0 s.
    drawn = law.rvs(NUM_DRAWS, random_state=0).clip(min=0)
    assert stats.ks_2samp(seconds, drawn).pvalue > 0.01
    for kind in ("hang", "crash"):
        count = sum(delay.failure == kind for delay in delays)
        assert stats.binomtest(count, NUM_DRAWS, failure_rate / 2).pvalue > 0.01
