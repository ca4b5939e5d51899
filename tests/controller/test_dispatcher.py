import random
from dataclasses import replace

import pytest
from test_tickets import make_source
from trajectories import make_trajectory

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.dispatcher import MIN_FAILED_IN_A_ROW, Dispatcher
from asyncrl.controller.workers import Worker
from asyncrl.records import Ticket


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
        Ticket(i, 0, 0, rng.choice((1, 1, 2)), 0, (), "", None, 0, min_version=rng.randint(0, 2))
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
        dispatcher.queue.extend(tickets)
        given = []
        for worker, ticket in dispatcher.assign():
            worker.give(ticket)
            given.append((worker.index, ticket.ticket_id))
        assert given == expected, f"seed {seed}"
        assert list(dispatcher.queue) == tickets[len(given) :]


def test_more_groups_that_all_fail_than_a_run_may_have_end_it_with_the_newest_failure():
    config = Config(groups_per_step=1, group_size=1)
    buffer, source = SampleBuffer(config), make_source()
    dispatcher = Dispatcher(config, [], buffer, source)
    reasons = ["failed", "stop", *["failed"] * (MIN_FAILED_IN_A_ROW + 1)]
    message = (
        f"the last {MIN_FAILED_IN_A_ROW + 1} groups all failed, the newest with: number 22; fix"
    )
    with pytest.raises(RuntimeError, match=f"^{message}"):
        for group_id, reason in enumerate(reasons):
            buffer.admit(group_id, group_id)
            trajectory = make_trajectory(group_id, 0, finish_reason=reason)
            dispatcher.add(replace(trajectory, failure=f"number {group_id}"))
    assert group_id == len(reasons) - 1 and buffer.balance()["groups_dropped_failed"] == 22
