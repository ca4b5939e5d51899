"""Which tickets move from hosts, and to whom: in simulated swarms, beside the rules once more."""

import math
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from trajectories import make_trajectory

from asyncrl.config import Config
from asyncrl.controller.workers import Worker
from asyncrl.records import EVALUATION_GROUP, Ticket
from extras.simulation.cluster import Case, Cluster, simulate
from extras.simulation.engine import EngineCurve, Swarm
from extras.simulation.workload import Workload, lengths_up_to
from extras.swarm.controller import SwarmController, SwarmDispatcher
from extras.swarm.leases import LOOK_S
from extras.swarm.remote import RemoteWorker, SwarmBuffer


class WatchedDispatcher(SwarmDispatcher):
    """The real one, of which each answer must be that of the rules."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.token_times_s, self.lengths = {}, []
        self.num_moves, self.moved_at = Counter(), {}
        """Moves before each ticket, and when each was taken from a host, seconds."""
        self.looked_at, self.num_looks = self.now(), 0

    def finish_tickets(self, worker, trajectories):
        """What was taken from a host is not sampled on there, and comes to nothing."""
        in_time = super().finish_tickets(worker, trajectories)
        late = [t for t in trajectories if t.ticket_id in self.moved_at]
        assert in_time == [t for t in trajectories if t.ticket_id not in self.moved_at]
        for t in late:
            assert t.finish_reason == "aborted" or t.ended_at <= self.moved_at[t.ticket_id]
        for t in in_time:
            self.note(worker, t.ended_at - t.started_at, t.num_generated)
        return in_time

    def note(self, worker, took_s, num_tokens):
        """What is recent counts: of a worker the last ten or so, of all a step's. Slow ones get tickets last."""
        self.lengths.append(num_tokens)
        if num_tokens:
            known_s = self.token_times_s.get(worker.index, took_s / num_tokens)
            self.token_times_s[worker.index] = known_s + 0.1 * (took_s / num_tokens - known_s)
            assert worker.order == self.token_times_s[worker.index]

    def move_tickets_if_due(self):
        """Workers are looked at often, but not at every message."""
        is_due, num_looks = self.now() > self.looked_at + LOOK_S, self.num_looks
        super().move_tickets_if_due()
        assert self.num_looks - num_looks == is_due

    def move_tickets(self):
        """All tickets that are due move, and no other, each to the worker that is to have it, at once."""
        self.looked_at, self.num_looks = self.now(), self.num_looks + 1
        due = list(self.due_tickets())
        before = {worker.index: set(worker.tickets) for worker in self.workers}
        super().move_tickets()
        given = {
            (taker.index, response_of(ticket)): ticket.ticket_id
            for taker in self.workers
            for ticket in taker.tickets.values()
            if ticket.ticket_id not in before[taker.index]
        }
        assert given.keys() == {(taker.index, response_of(ticket)) for ticket, taker in due}
        for ticket, taker in due:
            moved_id = given[taker.index, response_of(ticket)]
            self.num_moves[moved_id] = self.num_moves[ticket.ticket_id] + 1
            self.moved_at[ticket.ticket_id] = self.now()

    def due_tickets(self):
        """Tickets that another worker is to have, each with that worker, who has a slot less then."""
        most = self.config.max_running_requests
        slots = {worker.index: most - worker.num_running for worker in self.workers}
        for host in self.workers:
            for ticket in host.tickets.values():
                takers = [
                    other
                    for other in self.workers
                    if other is not host
                    and self.has_weights(other, ticket)
                    and slots[other.index] >= ticket.num_members
                ]
                taker = min(takers, key=self.token_s_of, default=None)
                is_here = ticket.ticket_id not in self.moved_at
                if not taker or not is_here or not self.buffer.is_unfinished(ticket.group_id):
                    continue
                had_s = self.now() - host.leases[ticket.ticket_id].began_at
                if had_s > self.lease_s_of(host, taker, ticket):
                    slots[taker.index] -= ticket.num_members
                    yield ticket, taker

    def lease_s_of(self, host, taker, ticket):
        """For how long a host may have a ticket: less if the next batch waits for it, twice as long after each move."""
        lease_s, taker_s = self.config.swarm.lease_s, self.token_s_of(taker)
        is_urgent = ticket.group_id in self.buffer.holding_back()
        if is_urgent and 2 * taker_s <= self.token_s_of(host) and taker_s < math.inf:
            newest = self.lengths[-self.config.groups_per_step * self.config.group_size :]
            lease_s = min(lease_s, 2 * sum(newest) / len(newest) * taker_s)
        return lease_s * 2 ** self.num_moves[ticket.ticket_id]

    def token_s_of(self, worker):
        return self.token_times_s.get(worker.index, math.inf)


def response_of(ticket):
    return ticket.group_id, ticket.member


@pytest.mark.parametrize("seed", range(8))
def test_a_ticket_moves_at_once_to_the_fastest_free_worker_when_its_lease_is_over(
    monkeypatch, seed
):
    draw = random.Random(seed)
    monkeypatch.setattr(SwarmController, "dispatcher_class", WatchedDispatcher)
    options = {
        "groups_per_step": 3,
        "group_size": 4,
        "async_ratio": draw.choice([0.0, 1.0]),
        "extra_members": draw.choice([0, 1]),
        "swarm.lease_s": draw.choice([5.0, 1800.0]),
    }
    curve = EngineCurve(((1, 10.0), (64, 2.0)), 2000.0, draw.choice([2, 4, 16]))
    hosts = Swarm(1e7, 0.02, uplink_bytes_per_s=1e7, stay_s=draw.choice([100.0, 1e9]))
    cluster = Cluster(curve, 8, 0.002, message_s=draw.choice([0, 1]), swarm=hosts)
    simulate(Case(options, Workload(lengths_up_to(400)), cluster, seed=seed))


@pytest.mark.parametrize("group_id", [7, EVALUATION_GROUP])
def test_a_slow_host_loses_what_the_trainer_waits_for_and_late_tokens_of_training_are_counted(
    group_id,
):
    config, counted, process = Config(listen="here:1"), [], SimpleNamespace(send=lambda message: ())
    host = RemoteWorker(0, process, state="sampling", sent_version=0, now=lambda: 0.0)
    other = Worker(1, process, state="sampling", sent_version=0)
    source = SimpleNamespace(
        issue_again=lambda ticket, counts_as_attempt: (
            counted.append(counts_as_attempt) or replace(ticket, ticket_id=2)
        )
    )
    dispatcher = SwarmDispatcher(config, [host, other], SwarmBuffer(config), source)
    dispatcher.now = lambda: 100.0
    dispatcher.buffer.admit(7, 0)
    ticket = Ticket(1, group_id, 0, 1, 0, (2, 3), "", None, 0, 0)
    other.assign(replace(ticket, ticket_id=0))
    answer = replace(make_trajectory(group_id, 0), ticket_id=0, started_at=0.0, ended_at=1.0)
    assert dispatcher.finish_tickets(other, [answer]) == [answer]
    host.assign(ticket)
    assert dispatcher.is_awaited(host, ticket)
    dispatcher.move_tickets()
    assert counted == [False] and list(other.tickets) == [2]
    assert not dispatcher.is_awaited(host, ticket)
    assert dispatcher.finish_tickets(host, [replace(answer, ticket_id=1)]) == []
    num_late = dispatcher.buffer.ledger.counts["tokens_dropped_late"]
    assert num_late == (answer.num_generated if group_id == 7 else 0)
