"""The simulated latency of a step: laws, failures, and what cannot be read."""

import random
import statistics

import pytest

from extras.latency_law import Delay, LatencyLaw


@pytest.mark.parametrize(
    "text, seconds, failures",
    [
        ("constant:2.5", (2.5, 0.0), 0.0),
        ("normal:10,5 fail:0.2", (10.08, 4.8), 0.2),  # truncated at 0
        ("fail:0.2 lognormal:1,0.5", (3.08, 1.64), 0.2),
        ("fail:0.5", (0.0, 0.0), 0.5),
    ],
)
def test_delays_follow_their_law(text, seconds, failures):
    law, rng = LatencyLaw.parse(text), random.Random(0)
    delays = [law.draw(rng) for _ in range(20_000)]
    assert min(delay.seconds for delay in delays) >= 0
    assert statistics.mean(delay.seconds for delay in delays) == pytest.approx(seconds[0], rel=0.02)
    assert statistics.stdev(delay.seconds for delay in delays) == pytest.approx(
        seconds[1], rel=0.05
    )
    for kind in ("hang", "crash"):
        share = sum(delay.failure == kind for delay in delays) / len(delays)
        assert share == pytest.approx(failures / 2, abs=0.01)


def test_delays_are_repeatable_and_the_law_is_a_value():
    law = LatencyLaw.parse(" normal:10,5  fail:0.01 ")
    assert law == LatencyLaw("normal", (10.0, 5.0), 0.01)
    assert law.draw(random.Random(3)) == law.draw(random.Random(3))
    assert LatencyLaw.parse("constant:1").draw(random.Random()) == Delay(1.0, None)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "allowed are constant:S"),
        ("gamma:1,2", "cannot read 'gamma:1,2'; allowed are"),
        ("normal:10", "cannot read 'normal:10'"),
        ("normal:10, 5", "cannot read 'normal:10,'"),
        ("normal:ten,5", "cannot read"),
        ("normal:nan,5", "cannot read"),
        ("normal:10,-5", "SIGMA must be at least 0, got -5"),
        ("constant:-1", "S must be at least 0, got -1"),
        ("fail:1.5", r"in \[0, 1\], got 1.5"),
        ("fail:-0.5", r"in \[0, 1\], got -0.5"),
        ("normal:1,1 constant:1", "has 2 laws of seconds, wanted one"),
        ("fail:0.1 fail:0.2", "has two laws 'fail'"),
    ],
)
def test_a_latency_that_cannot_be_read_is_an_error_that_shows_it(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        LatencyLaw.parse(text)
    assert repr(text) in str(caught.value)
