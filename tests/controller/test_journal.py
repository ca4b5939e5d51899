"""The time of all workers, as the controller knows it."""

from types import SimpleNamespace

import pytest

from asyncrl.controller.journal import Journal
from asyncrl.controller.workers import Worker
from asyncrl.messages import ActivityReport, SampledTokens, WeightsLoaded
from asyncrl.runlog.metrics import merge_nodes


class JournalAt(Journal):
    """A journal whose clock is set by hand, ns, in which worker 0 is started at 0."""

    now = 0

    def __init__(self):
        self.events = []
        super().__init__(self.note, lambda: self.now)
        self.record_start(0)

    def note(self, event, **fields):
        self.events.append((event, fields))

    def time_at(self, now):
        self.now = now
        return dict(self.take_time())

    def report(self, until, *changes, worker=0):
        self.record_activity(
            worker, ActivityReport(tuple((*change, "") for change in changes), until)
        )

    def die(self):
        self.record_death(Worker(0, SimpleNamespace(exit_code=3)))


def test_what_a_worker_reports_counts_and_before_and_between_its_lives_the_controllers_clock():
    journal = JournalAt()
    assert journal.time_at(50) == {"starting": 50}
    journal.report(130, (80, "gated"), (100, "decoding"))
    # later than 130 is not known yet
    assert journal.time_at(200) == {"starting": 30, "gated": 20, "decoding": 30}
    journal.report(190)
    journal.record_start(1)
    journal.report(210, (202, "decoding"), worker=1)
    assert journal.time_at(205) == {"decoding": 60 + 8, "starting": 2}, "workers are summed"
    journal.die()
    assert journal.time_at(215) == {"decoding": 15, "restarting": 10}, "it did what it said last"
    journal.report(245, (240, "starved"))
    assert journal.time_at(250) == {"restarting": 25, "starved": 5}
    assert journal.worker_time()[0].total() == 245


def test_where_one_clock_takes_over_from_another_nothing_is_counted_twice():
    journal = JournalAt()
    assert journal.time_at(100) == {"starting": 100}
    journal.report(110, (98, "starved"), (103, "decoding"))
    assert journal.time_at(108) == {"starved": 3, "decoding": 7}
    journal.die()
    assert journal.time_at(130) == {"restarting": 20}


def test_what_workers_report_becomes_metrics_of_their_moments_and_times_together():
    journal = JournalAt()
    assert merge_nodes([journal.take_metrics()]) == {"rollout/discarded_tokens": 0}
    for pause_s, sampled in ((0.1, SampledTokens(30, 10, 5)), (0.3, SampledTokens(10, 0, 0))):
        journal.record_loading(0, WeightsLoaded(1, pause_s, sampled, None), made_at=0.0)
    assert [fields["pause_s"] for event, fields in journal.events if event == "update"] == [
        0.1,
        0.3,
    ]
    journal.now = 10
    metrics = merge_nodes([journal.take_metrics(), {}])
    assert metrics["rollout/pause_s"] == pytest.approx(0.2)
    assert metrics["rollout/resumed_share"] == 0.25 and metrics["rollout/discarded_tokens"] == 5
    assert metrics["worker_time/starting"] == 1 and metrics["worker_time/decoding"] == 0
