"""The time of all workers, as the controller knows it."""

from types import SimpleNamespace

import pytest

from asyncrl.controller.journal import Journal
from asyncrl.controller.workers import Worker
from asyncrl.messages import ActivityReport, SampledTokens, Updated
from asyncrl.runlog.metrics import over_nodes


class JournalAt(Journal):
    """A journal whose clock is set by hand, ns, in which worker 0 is started at 0."""

    now = 0

    def __init__(self):
        super().__init__(lambda event, **fields: None, lambda: self.now)
        self.started(0)

    def take_time_at(self, now):
        self.now = now
        return self.take_time()

    def died_at(self, now):
        self.now = now
        self.died(Worker(0, SimpleNamespace(exit_code=3)))


def test_starting_is_followed_on_the_controllers_clock_and_then_what_is_reported_counts():
    journal = JournalAt()
    assert journal.take_time_at(50) == {"starting": 50}
    journal.active(0, ActivityReport(((80, "gated", "weights"), (100, "decoding", "")), 130))
    expected = {"starting": 30, "gated": 20, "decoding": 30}
    assert journal.take_time_at(200) == expected, "until 130: later is not known yet"
    journal.active(0, ActivityReport((), 190))
    assert journal.take_time_at(200) == {"decoding": 60}
    journal.started(1)
    journal.active(1, ActivityReport(((202, "decoding", ""),), 210))
    assert journal.take_time_at(205) == {"starting": 2, "decoding": 8}, "workers are summed"


def test_a_dead_worker_did_what_it_last_reported_and_is_restarting_until_the_next_one_reports():
    journal = JournalAt()
    journal.active(0, ActivityReport(((10, "decoding", ""),), 20))
    journal.died_at(50)
    assert journal.take_time_at(60) == {"starting": 10, "decoding": 40, "restarting": 10}
    journal.active(0, ActivityReport(((90, "starved", ""),), 95))
    assert journal.take_time_at(100) == {"restarting": 30, "starved": 5}
    assert journal.worker_time()[0].total() == 95


def test_where_one_clock_takes_over_from_another_nothing_is_counted_twice():
    journal = JournalAt()
    assert journal.take_time_at(100) == {"starting": 100}
    journal.active(0, ActivityReport(((98, "starved", ""), (103, "decoding", "")), 110))
    assert journal.take_time_at(120) == {"starved": 3, "decoding": 7}
    message = "worker 0 reports 'starved' at 109 ns after reporting until 110"
    with pytest.raises(RuntimeError, match=message):
        journal.active(0, ActivityReport(((109, "starved", ""),), 115))
    journal.died_at(108)
    assert journal.take_time_at(130) == {"restarting": 20}


def test_what_workers_report_becomes_metrics_of_their_moments_and_times_together():
    journal = JournalAt()
    assert over_nodes([journal.take_metrics()]) == {"rollout/discarded_tokens": 0}
    for pause_s, sampled in ((0.1, SampledTokens(30, 10, 5)), (0.3, SampledTokens(10, 0, 0))):
        journal.updated(0, Updated(1, pause_s, sampled, None), made_at=0.0)
    journal.now = 10
    metrics = over_nodes([journal.take_metrics(), {}])
    assert metrics["rollout/pause_s"] == pytest.approx(0.2)
    assert metrics["rollout/resumed_share"] == 0.25 and metrics["rollout/discarded_tokens"] == 5
    assert metrics["worker_time/starting"] == 1 and metrics["worker_time/decoding"] == 0
