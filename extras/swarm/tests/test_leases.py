"""Which tickets are taken from hosts, and who gets them: in simulated swarms, beside the rules once more."""

import math
import random
from collections import defaultdict

import pytest

from asyncrl.controller.dispatcher import Dispatcher
from extras.simulation.cluster import Case, Cluster, simulate
from extras.simulation.engine import EngineCurve, Swarm
from extras.simulation.workload import Workload, lengths_up_to
from extras.swarm.controller import SwarmController
from extras.swarm.leases import LeasingDispatcher


class WatchedDispatcher(LeasingDispatcher):
    """The real one, of which each answer must be that of the rules."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.token_times_s, self.mean_tokens, self.num_noted = {}, 0.0, 0
        self.former_hosts, self.moved_at = defaultdict(list), {}
        """Hosts that each response was taken from, in order, and when each ticket was taken, seconds."""

    def finish_tickets(self, worker, trajectories):
        """What was taken from a host is not sampled on there, and comes to nothing."""
        in_time = super().finish_tickets(worker, trajectories)
        late = [t for t in trajectories if t.ticket_id in self.moved_at]
        assert in_time == [t for t in trajectories if t.ticket_id not in self.moved_at]
        for t in late:
            assert t.finish_reason == "aborted" or t.ended_at <= self.moved_at[t.ticket_id]
        for t in in_time:
            self.note(worker.index, t.ended_at - t.started_at, t.num_generated)
        return in_time

    def note(self, worker, took_s, num_tokens):
        """What is recent counts: of a worker the last ten or so, of all about a step's."""
        self.num_noted = min(self.num_noted + 1, self._most_noted)
        self.mean_tokens += (num_tokens - self.mean_tokens) / self.num_noted
        if num_tokens:
            known_s = self.token_times_s.get(worker, took_s / num_tokens)
            self.token_times_s[worker] = known_s + 0.1 * (took_s / num_tokens - known_s)

    def may_start(self, worker, ticket):
        """Who was the last to lose a ticket does not get it back while another is much faster."""
        has_lost = self.former_hosts[response_of(ticket)][-1:] == [worker.index]
        is_slow = any(self.is_much_faster(other, worker) for other in self.workers)
        may_start = Dispatcher.may_start(self, worker, ticket) and not (has_lost and is_slow)
        assert super().may_start(worker, ticket) == may_start
        return may_start

    def end_leases(self):
        """All tickets that are due are taken, and no other."""
        due = list(self.due_tickets())
        assert super().end_leases() == [ticket for _, ticket in due]
        for host, ticket in due:
            self.former_hosts[response_of(ticket)].append(host.index)
            self.moved_at[ticket.ticket_id] = self.now()
        groups = {group_id for group_id, _, _ in self._taken_from}
        assert groups <= {*filter(self.buffer.is_running, groups)}, "it is kept for ever"
        return [ticket for _, ticket in due]

    def due_tickets(self):
        """Tickets that another worker is to have, each with its host. Who is to have one has a slot less."""
        most = self.config.max_running_requests
        slots = {worker.index: most - worker.num_running for worker in self.workers}
        for host in self.workers:
            for ticket in host.running.values():
                takers = [
                    other
                    for other in self.workers
                    if other is not host
                    and self.has_weights(other, ticket)
                    and (
                        slots[other.index] >= ticket.num_members or self.is_much_faster(other, host)
                    )
                ]
                taker = min(takers, key=self.token_s_of, default=None)
                is_here = ticket.ticket_id not in self.moved_at
                if not taker or not is_here or not self.buffer.is_running(ticket.group_id):
                    continue
                had_s = self.now() - host.given_at[ticket.ticket_id]
                if had_s > self.lease_s_of(host, taker, ticket):
                    slots[taker.index] -= ticket.num_members
                    yield host, ticket

    def lease_s_of(self, host, taker, ticket):
        """For how long a host may have a ticket: less if the next batch waits for it, twice as long after each move."""
        if self.is_much_faster(taker, host):
            short_s = 2 * self.mean_tokens * self.token_s_of(taker)
        else:
            short_s = 2 * self.config.max_response_tokens * self.token_s_of(host)
        is_urgent = ticket.group_id in self.buffer.holding_back()
        lease_s = min(self.config.swarm.lease_s, short_s if is_urgent else math.inf)
        return lease_s * 2 ** len(self.former_hosts[response_of(ticket)])

    def is_much_faster(self, one, other):
        return one.index in self.token_times_s and 2 * self.token_s_of(one) <= self.token_s_of(
            other
        )

    def token_s_of(self, worker):
        return self.token_times_s.get(worker.index, math.inf)


def response_of(ticket):
    return ticket.group_id, ticket.member, ticket.min_version


@pytest.mark.parametrize("seed", range(8))
def test_a_ticket_moves_when_its_lease_is_over_and_not_back_to_one_that_is_much_slower(
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
