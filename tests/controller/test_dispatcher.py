import random
from dataclasses import dataclass

import pytest
from test_tickets import make_source

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.dispatcher import Dispatcher
from asyncrl.controller.workers import Worker
from asyncrl.records import Ticket


@dataclass
class Fleet:
    workers: list[Worker]
    tickets: list[Ticket]
    max_running: int


def ticket(ticket_id, num_members, min_version):
    return Ticket(ticket_id, 0, 0, num_members, 0, (), "", None, 0, min_version)


def random_fleet(seed):
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
        ticket(i, rng.choice((1, 1, 2)), rng.randint(0, 2)) for i in range(rng.randint(0, 20))
    ]
    return Fleet(workers, tickets, max_running)


def in_order_to_the_least_loaded(fleet):
    """Every ticket in its order, each looking at all workers; the first that cannot start holds up those behind."""
    loads, given = [worker.num_running for worker in fleet.workers], []
    for one in fleet.tickets:
        able = [
            place
            for place, worker in enumerate(fleet.workers)
            if worker.is_up and worker.sent_version >= one.min_version
        ]
        place = min(able, key=lambda p: (loads[p], fleet.workers[p].order), default=None)
        if place is None or loads[place] + one.num_members > fleet.max_running:
            break
        loads[place] += one.num_members
        given.append((place, one.ticket_id))
    return given


@pytest.mark.parametrize("seed", range(200))
def test_each_ticket_goes_in_order_to_the_least_loaded_worker_that_may_start_it_and_then_by_their_order(
    seed,
):
    expected = in_order_to_the_least_loaded(random_fleet(seed))
    fleet = random_fleet(seed)
    config = Config(max_running_requests=fleet.max_running)
    dispatcher = Dispatcher(config, fleet.workers, SampleBuffer(config), make_source())
    dispatcher.queue.extend(fleet.tickets)
    given = []
    for worker, one in dispatcher.assign():
        worker.give(one)
        given.append((worker.index, one.ticket_id))
    assert given == expected
    assert len(dispatcher.queue) == len(fleet.tickets) - len(given)


class Outbox:
    """Stands in for a worker's process; keeps what it is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def test_members_of_a_group_start_only_where_the_weights_are_as_new_as_the_first_ones():
    """A worker may have been sent a version that another, still busy with the one before, has not."""
    config = Config(
        groups_per_step=1,
        group_size=3,
        async_ratio=0,
        max_running_requests=1,
        num_rollout_workers=2,
    )
    ahead, behind = (
        Worker(i, Outbox(), state="sampling", sent_version=version)
        for i, version in enumerate((5, 4))
    )
    buffer = SampleBuffer(config)
    dispatcher = Dispatcher(config, [ahead, behind], buffer, make_source())
    dispatcher.fill()
    assert (ahead.num_running, behind.num_running) == (1, 0), "the group counts on version 5 now"
    behind.sent_version = 5
    dispatcher.fill()
    assert (ahead.num_running, behind.num_running) == (1, 1)
