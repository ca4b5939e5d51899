"""Leases: a host keeps a ticket for a limited time while another worker could take it.

Leases guarantee:

1. A response is trained on once. A moved ticket has a new id, and the host's own answer is counted as late.
2. No response is lost. A lease ends only when another worker takes the ticket, and a lost host's tickets are reissued.
3. A ticket moves after `lease_s` to the fastest worker that has a free slot and new enough weights.
4. It moves earlier if the trainer waits for it and the other worker is at least FASTER times as fast. It then moves
   when that worker could have sampled PATIENCE mean responses meanwhile.
5. Each move doubles the next lease. A long response is as long on every worker, and would move in circles.
"""

import functools
import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean

from asyncrl.controller.dispatcher import Dispatcher
from asyncrl.controller.workers import Worker
from asyncrl.messages import Abort, Tickets
from asyncrl.records import Ticket, Trajectory
from extras.swarm.remote import RemoteWorker

FASTER = 2.0
"""Least speed of a worker that takes a ticket early, as a multiple of the host's."""
PATIENCE = 2.0
"""Mean responses that this worker could have sampled meanwhile."""
LOOK_S = 0.2
"""Shortest time between two looks for tickets to move, seconds."""


class LeasingDispatcher(Dispatcher):
    """Measures how fast workers are, and moves tickets away from slow hosts. It never waits for a host."""

    now: Callable[[], float] = staticmethod(time.monotonic)
    """Clock of leases, seconds; a simulation has another."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.token_s: dict[int, float] = {}
        """Running mean of the time of a token by worker, seconds; of workers that have returned one."""
        # a step's responses: at its end only long ones come
        num_lengths = self.config.groups_per_step * self.config.group_size
        self._lengths: deque[int] = deque(maxlen=num_lengths)
        self._looked_at = self.now()

    def finish_tickets(self, worker: Worker, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Note that a worker has ended the tickets of these trajectories. Return the trajectories in time."""
        awaited = {ticket.ticket_id for ticket in worker.awaited}
        in_time = []
        for trajectory in super().finish_tickets(worker, trajectories):
            if trajectory.ticket_id in awaited:
                self._measure(worker, trajectory)
                in_time.append(trajectory)
            elif not trajectory.is_evaluation:
                self.buffer.ledger.generate(trajectory.num_generated, "late")
        return in_time

    def _measure(self, worker: Worker, trajectory: Trajectory) -> None:
        num_tokens = trajectory.num_generated
        self._lengths.append(num_tokens)
        if num_tokens:
            token_s = (trajectory.ended_at - trajectory.started_at) / num_tokens
            mean_s = self.token_s.get(worker.index) or token_s
            self.token_s[worker.index] = mean_s + 0.1 * (token_s - mean_s)
            if isinstance(worker, RemoteWorker):
                # after workers of this node, and slower hosts last
                worker.order = self.token_s[worker.index]

    def move_tickets_if_due(self) -> None:
        """Move tickets whose leases are over, unless that was just done."""
        if self.now() > self._looked_at + LOOK_S:
            self.move_tickets()

    def move_tickets(self) -> None:
        """Move the tickets whose leases are over, each to the fastest other worker that may start it."""
        self._looked_at = self.now()
        takers = sorted(filter(self._has_free_slot, self.workers), key=self._token_s)
        urgent_groups = self.buffer.holding_back()
        for host in [worker for worker in self.workers if isinstance(worker, RemoteWorker)]:
            for ticket in filter(functools.partial(self.is_awaited, host), host.awaited):
                able = (other for other in takers if self.may_start(other, ticket))
                taker = next((other for other in able if other is not host), None)
                is_urgent = ticket.is_evaluation or ticket.group_id in urgent_groups
                if taker is not None and self._is_over(host, ticket, taker, is_urgent):
                    self._move(host, ticket, taker)

    def _has_free_slot(self, worker: Worker) -> bool:
        return worker.is_up and worker.num_running < self.config.max_running_requests

    def _is_over(self, host: RemoteWorker, ticket: Ticket, taker: Worker, is_urgent: bool) -> bool:
        """Return whether a host's lease of a ticket is over; `is_urgent` if the trainer waits for the ticket."""
        lease, lease_s = host.leases[ticket.ticket_id], self.config.swarm.lease_s
        taker_s = self._token_s(taker)
        if is_urgent and taker_s < math.inf and FASTER * taker_s <= self._token_s(host):
            lease_s = min(lease_s, PATIENCE * fmean(self._lengths) * taker_s)
        return self.now() - lease.began_at > lease_s * 2**lease.num_moves

    def _move(self, host: RemoteWorker, ticket: Ticket, taker: Worker) -> None:
        """Give a host's ticket to another worker, under a new id, and abort it on the host."""
        lease = host.leases[ticket.ticket_id]
        lease.is_over = True
        host.process.send(Abort([ticket.ticket_id]))
        moved = self.ticket_source.issue_again(ticket, counts_as_attempt=False)
        taker.assign(moved)
        if isinstance(taker, RemoteWorker):
            taker.leases[moved.ticket_id].num_moves = lease.num_moves + 1
        taker.process.send(Tickets([moved]))

    def is_awaited(self, host: RemoteWorker, ticket: Ticket) -> bool:
        """Return whether a host's answer to a ticket is used. If not, the host was told to abort it."""
        is_unfinished = ticket.is_evaluation or self.buffer.is_unfinished(ticket.group_id)
        return is_unfinished and not host.leases[ticket.ticket_id].is_over

    def _token_s(self, worker: Worker) -> float:
        """Return the time of a token on a worker, seconds; infinite before it has returned one."""
        return self.token_s.get(worker.index) or math.inf
