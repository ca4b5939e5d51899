import random
from dataclasses import replace

import pytest
from test_tickets import make_source
from trajectories import make_trajectory

from asyncrl.cluster.processes import RolloutEnded
from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.dispatcher import MIN_GROUPS, Dispatcher
from asyncrl.controller.workers import Worker
from asyncrl.records import GREEDY_GROUP, Ticket


def random_fleet(seed):
    """Trajectories that a worker may have, workers with some, and tickets."""
    rng = random.Random(seed)
    max_running = rng.randint(1, 6)
    workers = [
        Worker(
            i,
            state=rng.choice(["sampling"] * 4 + ["starting"]),
            sent_version=rng.randint(0, 2),
            num_running=rng.randint(0, max_running),
            order=rng.choice([0.0, 0.01, 0.02]),
        )
        for i in range(rng.randint(1, 7))
    ]
    tickets = [
        Ticket(i, GREEDY_GROUP, 0, rng.choice((1, 1, 2)), 0, (), "", None, 0, rng.randint(0, 2))
        for i in range(rng.randint(0, 20))
    ]
    return max_running, workers, tickets


def in_order_to_the_least_loaded(max_running, workers, tickets):
    """Every ticket in its order, each looking at all workers; the first that cannot start holds up those behind."""
    loads, given = [worker.num_running for worker in workers], []
    for ticket in tickets:
        able = [
            worker.index
            for worker in workers
            if worker.is_up and worker.sent_version >= ticket.min_version
        ]
        place = min(able, key=lambda i: (loads[i], workers[i].order), default=None)
        if place is None or loads[place] + ticket.num_members > max_running:
            break
        loads[place] += ticket.num_members
        given.append((place, ticket.ticket_id))
    return given


def test_each_ticket_goes_in_order_to_the_least_loaded_worker_that_may_start_it_and_then_by_their_order():
    for seed in range(200):
        max_running, workers, tickets = random_fleet(seed)
        expected = in_order_to_the_least_loaded(max_running, workers, tickets)
        config = Config(max_running_requests=max_running)
        dispatcher = Dispatcher(config, workers, SampleBuffer(config), make_source())
        dispatcher.enqueue(tickets)
        given = []
        for worker, ticket in dispatcher.assign_tickets():
            given.append((worker.index, ticket.ticket_id))
        assert given == expected, f"seed {seed}"
        assert list(dispatcher.queue) == tickets[len(given) :]


def test_no_member_of_a_running_group_starts_with_weights_older_than_those_of_the_first():
    config = Config(groups_per_step=1, group_size=2, max_running_requests=1)
    buffer, source = SampleBuffer(config), make_source()
    workers = [
        Worker(i, state="sampling", sent_version=version) for i, version in enumerate((1, 0))
    ]
    dispatcher = Dispatcher(config, workers, buffer, source)
    dispatcher.queue.extend(source.for_group(0, 0, buffer.admit(0, 0)))
    assert [worker.index for worker, _ in dispatcher.assign_tickets()] == [0]
    workers[1].sent_version = 1
    assert [worker.index for worker, _ in dispatcher.assign_tickets()] == [1]


FAIL, OK = "failed", "stop"


def end_groups(config, reasons):
    """Have groups of one member end one after the other. Returns the dispatcher and the error that ends the run."""
    buffer = SampleBuffer(config)
    dispatcher = Dispatcher(config, [], buffer, make_source())
    for group_id, reason in enumerate(reasons):
        buffer.admit(group_id, group_id)
        trajectory = make_trajectory(group_id, 0, finish_reason=reason)
        failure = f"a.py:f, line 3: KeyError: {group_id}" if reason == FAIL else ""
        try:
            dispatcher.add(replace(trajectory, failure=failure))
        except RolloutEnded as error:
            return dispatcher, str(error)
    return dispatcher, ""


@pytest.mark.parametrize(
    ("options", "reasons", "num_groups", "num_failed"),
    [
        ({}, [FAIL] * 40, MIN_GROUPS, MIN_GROUPS),
        ({}, [*[OK] * 100, *[FAIL] * 40], 111, 11),
        ({}, [FAIL, OK] * 40, None, 10),
        ({}, [FAIL, FAIL, OK, FAIL] * 40, MIN_GROUPS, 15),
        ({"max_failed_share": 0.0}, [*[OK] * 30, *[FAIL] * 40], 31, 1),
        ({"max_failed_share": 1.0}, [FAIL] * 400, None, 400),
        # as many groups as may be outstanding: those that fail end first
        ({"groups_per_step": 32}, [FAIL] * 80, 64, 64),
        ({"groups_per_step": 32}, [*[FAIL] * 30, *[OK] * 80], None, 30),
    ],
)
def test_a_run_ends_when_too_large_a_share_of_the_newest_groups_failed(
    options, reasons, num_groups, num_failed
):
    config = Config(**{"groups_per_step": 1, "group_size": 1} | options)
    dispatcher, error = end_groups(config, reasons)
    ended = dispatcher.failures
    assert ended.num_groups == ended.num_responses == (num_groups or len(reasons))
    assert dispatcher.buffer.balance()["groups_dropped_failed"] == ended.num_failed_groups
    if num_groups is not None:
        window = max(MIN_GROUPS, config.max_outstanding_groups)
        assert error.startswith(
            f"{num_failed} of the last {window} groups failed, --max-failed-share allows "
            f"{config.max_failed_share:g}; most often: a.py:f, line 3: KeyError: "
        )
        assert "\n" not in error and "raise --max-failed-share" in error


def test_a_spare_member_covers_one_that_failed_and_its_group_counts_as_finished():
    config = Config(groups_per_step=1, group_size=1, extra_members=1, max_failed_share=0.0)
    buffer = SampleBuffer(config)
    dispatcher = Dispatcher(config, [], buffer, make_source())
    for group_id in range(30):
        buffer.admit(group_id, group_id)
        failed = make_trajectory(group_id, 0, finish_reason=FAIL)
        for member in (replace(failed, failure="timed out"), make_trajectory(group_id, 1)):
            dispatcher.add(member)
    ended = dispatcher.failures
    assert (ended.num_groups, ended.num_failed_groups) == (30, 0)
    assert (ended.num_responses, ended.reasons) == (60, {"timed out": 30})
    assert ended.is_reported
