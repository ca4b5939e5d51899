"""Accounts of time from events made by hand; every sum is of whole nanoseconds and exact."""

import itertools
import random
from collections import Counter

import pytest

from asyncrl.messages import ActivityReport
from asyncrl.runlog.time_ledger import (
    REPORT_INTERVAL_NS,
    TRAINER_STATES,
    WORKER_STATES,
    Activity,
    TimeLedger,
    TrainerClock,
    describe,
    unix_ns,
)


class Clock:
    """A clock that is set by hand, ns."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


# One ledger


def test_what_was_spent_in_each_state_sums_to_the_time_that_passed():
    ledger = TimeLedger(TRAINER_STATES, "starting", 10)
    for state, now in [("wait", 30), ("gather", 31), ("wait", 35), ("publish", 35), ("other", 42)]:
        ledger.enter(state, now)
    account = ledger.take(50)
    assert account.spent == {"starting": 20, "wait": 1, "gather": 4, "publish": 7, "other": 8}
    assert account.spans == (
        ("starting", 10, 30), ("wait", 30, 31), ("gather", 31, 35), ("publish", 35, 42), ("other", 42, 50),
    )  # fmt: skip


def test_accounts_follow_on_each_other_and_sum_to_the_total_whatever_happens():
    random_, now = random.Random(0), 1_700_000_000_000_000_000
    ledger, accounts = TimeLedger(WORKER_STATES, "starting", now), []
    for _ in range(2000):
        now += random_.choice([0, 1, random_.randrange(10**9)])
        if random_.random() < 0.1:
            accounts.append(ledger.take(now))
        else:
            ledger.enter(random_.choice(list(WORKER_STATES)), now)
    accounts.append(ledger.take(now))
    spans = [span for account in accounts for span in account.spans]
    assert spans[0][1] == ledger.start and spans[-1][2] == now == ledger.until
    assert all(before[2] == after[1] for before, after in itertools.pairwise(spans))
    assert all(start < end for _, start, end in spans)
    assert sum((account.spent for account in accounts), Counter()) == ledger.total
    assert ledger.total.total() == now - ledger.start


def test_a_state_that_is_entered_twice_is_one_span():
    ledger = TimeLedger(TRAINER_STATES, "wait", 0)
    ledger.enter("wait", 3)
    ledger.enter("wait", 5)
    assert ledger.take(9).spans == (("wait", 0, 9),)


def test_an_unknown_state_is_an_error():
    ledger = TimeLedger(TRAINER_STATES, "wait", 0)
    with pytest.raises(
        RuntimeError, match="unknown state 'waiting'; it must be one of evaluate, forward_backward"
    ):
        ledger.enter("waiting", 1)
    with pytest.raises(RuntimeError, match="unknown state 'decoding'"):
        TimeLedger(TRAINER_STATES, "decoding", 0)


def test_a_state_that_overlaps_the_one_before_is_an_error():
    ledger = TimeLedger(TRAINER_STATES, "wait", 0)
    ledger.enter("gather", 10)
    with pytest.raises(
        RuntimeError, match=r"begins at 9 ns, but the time until 10 ns .* overlap by 1 ns"
    ):
        ledger.enter("publish", 9)
    ledger.take(12)
    with pytest.raises(RuntimeError, match="overlap by 2 ns"):
        ledger.take(10)


def test_the_trainers_clock_is_the_real_one_and_begins_a_new_account_with_each_step():
    before, clock = unix_ns(), TrainerClock()
    clock.enter("wait")
    first = clock.take()
    clock.enter("save")
    second = clock.take()
    assert before <= first.spans[0][1] and first.spans[-1][2] == second.spans[0][1]
    assert set(first.spent) <= {"starting", "wait"} and set(second.spent) <= {"wait", "save"}
    assert clock.total == first.spent + second.spent


def test_a_line_says_the_shares_largest_first():
    spent = Counter({"wait": 1_000_000_000, "publish": 3_000_000_000})
    assert describe("trainer", spent) == "trainer  4.0 s: publish 75.0%, wait 25.0%"


# What a worker does


def make_activity():
    clock = Clock()
    return Activity(clock), clock


def states(report):
    return [(state, reason) if reason else state for _, state, reason in report.changes]


def test_a_worker_decodes_while_it_has_a_request_and_waits_for_environments_while_it_has_a_trajectory():
    activity, clock = make_activity()
    activity.add(trajectories=2)
    clock.now = 5
    activity.add(requests=1)
    activity.add(requests=1)
    clock.now = 9
    activity.add(requests=-1)
    activity.add(requests=-1)
    activity.add(trajectories=-1)
    clock.now = 12
    activity.add(trajectories=-1)
    report = activity.report()
    assert report.changes == (
        (0, "starved", ""), (0, "environment", ""), (5, "decoding", ""), (9, "environment", ""), (12, "starved", ""),
    )  # fmt: skip
    assert report.until == 12


def test_without_a_ticket_a_worker_is_gated_or_starved_as_the_controller_says_until_it_gets_one():
    activity, _ = make_activity()
    for reason in ("weights", "version", "bound", "evaluation", "round"):
        activity.hold(reason)
    activity.add(trajectories=1, requests=1)
    activity.add(trajectories=-1, requests=-1)
    assert states(activity.report()) == [
        "starved", ("gated", "weights"), ("gated", "version"), ("gated", "bound"), ("gated", "evaluation"),
        ("starved", "round"), "decoding", "starved",
    ]  # fmt: skip


def test_an_update_pauses_and_a_suspension_gates_whatever_runs():
    activity, _ = make_activity()
    activity.add(trajectories=1, requests=1)
    activity.stand("suspended")
    activity.add(requests=-1)
    activity.stand("update")
    activity.go_on()
    assert states(activity.report()) == [
        "starved", "decoding", ("gated", "suspended"), ("paused", "update"), "environment",
    ]  # fmt: skip


def test_a_report_has_only_what_is_new():
    activity, clock = make_activity()
    activity.report()
    clock.now = 7
    assert activity.report() == ActivityReport((), 7)


def test_that_nothing_has_changed_is_said_only_now_and_then():
    activity, clock = make_activity()
    assert activity.report_if_due().until == 0
    clock.now = REPORT_INTERVAL_NS - 1
    assert activity.report_if_due() is None
    activity.add(trajectories=1)
    assert states(activity.report_if_due()) == ["environment"]
    clock.now = 2 * REPORT_INTERVAL_NS
    assert activity.report_if_due() == ActivityReport((), clock.now)
