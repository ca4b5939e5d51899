"""The time of all workers, as the controller knows it."""

from types import SimpleNamespace

import pytest

from asyncrl.controller.journal import Journal
from asyncrl.controller.workers import Worker
from asyncrl.messages import ActivityReport, SampledTokens, Updated
from asyncrl.runlog.metrics import over_nodes


class Clock:
    """A clock that is set by hand, ns."""

    now = 0

    def __call__(self):
        return self.now


DEAD = Worker(0, SimpleNamespace(exit_code=3))


def make_journal():
    clock = Clock()
    return Journal(lambda event, **fields: None, clock), clock


def test_starting_is_followed_on_the_controllers_clock_and_then_what_is_reported_counts():
    journal, clock = make_journal()
    clock.now = 100
    journal.started(0)
    clock.now = 150
    assert journal.take_time() == {"starting": 50}
    journal.active(0, ActivityReport(((180, "gated", "weights"), (200, "decoding", "")), 230))
    clock.now = 300
    assert journal.take_time() == {"starting": 30, "gated": 20, "decoding": 30}, (
        "until 230: later is not known yet"
    )
    journal.active(0, ActivityReport((), 290))
    clock.now = 300
    assert journal.take_time() == {"decoding": 60}


def test_a_dead_worker_did_what_it_last_reported_and_is_restarting_until_the_next_one_reports():
    journal, clock = make_journal()
    clock.now = 0
    journal.started(0)
    journal.active(0, ActivityReport(((10, "decoding", ""),), 20))
    clock.now = 50
    journal.died(DEAD)
    clock.now = 60
    assert journal.take_time() == {"starting": 10, "decoding": 40, "restarting": 10}
    journal.active(0, ActivityReport(((90, "starved", ""),), 95))
    clock.now = 100
    assert journal.take_time() == {"restarting": 30, "starved": 5}
    assert journal.worker_time()[0].total() == 95 - 0


def test_where_one_clock_takes_over_from_another_nothing_is_counted_twice():
    journal, clock = make_journal()
    clock.now = 0
    journal.started(0)
    clock.now = 100
    journal.take_time()
    journal.active(0, ActivityReport(((98, "starved", ""), (103, "decoding", "")), 110))
    clock.now = 120
    assert journal.take_time() == {"starved": 3, "decoding": 7}
    clock.now = 108
    journal.died(DEAD)
    clock.now = 130
    assert journal.take_time() == {"restarting": 20}


def test_workers_are_summed():
    journal, clock = make_journal()
    clock.now = 0
    journal.started(0)
    clock.now = 0
    journal.started(1)
    journal.active(1, ActivityReport(((2, "decoding", ""),), 10))
    clock.now = 5
    assert journal.take_time() == {"starting": 5 + 2, "decoding": 8}


def test_a_report_that_overlaps_the_one_before_is_an_error():
    journal, clock = make_journal()
    clock.now = 0
    journal.started(0)
    journal.active(0, ActivityReport(((10, "decoding", ""),), 20))
    with pytest.raises(
        RuntimeError, match="worker 0 reports 'starved' at 19 ns after reporting until 20"
    ):
        journal.active(0, ActivityReport(((19, "starved", ""),), 25))


def test_what_workers_report_becomes_metrics_of_their_moments_and_times_together():
    journal, clock = make_journal()
    clock.now = 0
    assert over_nodes([journal.take_metrics()]) == {"rollout/discarded_tokens": 0}
    journal.started(0)
    for pause_s, sampled in ((0.1, SampledTokens(30, 10, 5)), (0.3, SampledTokens(10, 0, 0))):
        journal.updated(0, Updated(1, pause_s, sampled, None), made_at=0.0)
    clock.now = 10
    metrics = over_nodes([journal.take_metrics(), {}])
    assert metrics["rollout/pause_s"] == pytest.approx(0.2)
    assert metrics["rollout/resumed_share"] == 0.25 and metrics["rollout/discarded_tokens"] == 5
    assert metrics["worker_time/starting"] == 1 and metrics["worker_time/decoding"] == 0
