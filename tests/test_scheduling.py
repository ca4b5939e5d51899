import random
from dataclasses import dataclass

import pytest

from data.records import Ticket
from scheduling import TicketQueue
from workers import Worker


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
        Worker(i, ready=rng.random() < 0.8, sent_version=rng.randint(0, 2), num_running=rng.randint(0, max_running))
        for i in range(rng.randint(1, 7))
    ]
    tickets = [ticket(i, rng.choice((1, 1, 2)), rng.randint(0, 2)) for i in range(rng.randint(0, 20))]
    return Fleet(workers, tickets, max_running)


def in_order_to_the_least_loaded(fleet):
    """Every ticket in its order, each looking at all workers; the first that cannot start holds up those behind it."""
    loads, given = [worker.num_running for worker in fleet.workers], []
    for one in fleet.tickets:
        able = [place for place, worker in enumerate(fleet.workers) if worker.can_start(one)]
        place = min(able, key=lambda p: loads[p], default=None)
        if place is None or loads[place] + one.num_members > fleet.max_running:
            break
        loads[place] += one.num_members
        given.append((place, one.ticket_id))
    return given


@pytest.mark.parametrize("seed", range(200))
def test_each_ticket_goes_in_order_to_the_least_loaded_worker_that_may_start_it(seed):
    expected = in_order_to_the_least_loaded(random_fleet(seed))
    fleet = random_fleet(seed)
    queue = TicketQueue("queue", fleet.max_running)
    queue.append(fleet.tickets)
    given = []
    for worker, one in queue.assign(fleet.workers):
        worker.give(one)
        given.append((worker.index, one.ticket_id))
    assert given == expected
    assert len(queue) == len(fleet.tickets) - len(given)
