"""Leases: how long a host that has joined may have a ticket while another worker could take it.

Pure but for the clock: no host is asked, and nothing is waited for.
"""

import math
import time
from collections.abc import Callable, Collection

from asyncrl.controller.dispatcher import Dispatcher
from asyncrl.controller.workers import Worker
from asyncrl.messages import Abort
from asyncrl.records import Ticket, Trajectory
from extras.swarm.remote import RemoteWorker
from extras.swarm.wire import Fetched

FASTER = 2.0
"""Times as fast that another worker must be to be given a ticket which has begun on a host."""
PATIENCE = 2.0
"""Mean responses that this other worker could have sampled meanwhile."""
STALLED = 2.0
"""Times what the longest response takes on a host, after which another worker as slow may have the ticket."""
LOOK_S = 2.0
"""Longest time between two looks for leases that are over; less where responses take less."""


class LeasingDispatcher(Dispatcher):
    """Knows how fast workers are, and takes tickets that the trainer waits for from hosts that are too slow."""

    now: Callable[[], float] = staticmethod(time.monotonic)
    """The clock of leases, seconds; a simulation has its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.token_s: dict[int, float] = {}
        """Recent time of a token by worker, seconds; of workers that have returned one."""
        # of a trajectory, over about a step's: at its end the slow alone come
        self._mean_s = self._mean_tokens = 0.0
        self._num_noted, self._most_noted = 0, self.config.groups_per_step * self.config.group_size
        # the workers that each ticket was taken from, in order
        self._taken_from: dict[tuple[int, int, int], list[Worker]] = {}
        self._looked_at = self.now()

    def may_start(self, worker: Worker, ticket: Ticket) -> bool:
        """Whether a worker may be given a ticket; not if it was taken from this worker for one that is much faster."""
        if not super().may_start(worker, ticket):
            return False
        is_taken = self._taken_from.get(_key(ticket), [None])[-1] is worker
        return not (is_taken and any(self._is_faster(other, worker) for other in self.workers))

    def finish_tickets(self, worker: Worker, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Note that a worker has ended the tickets of these trajectories. Returns those that were waited for."""
        late_tickets = set(worker.reissued) if isinstance(worker, RemoteWorker) else set()
        in_time = []
        for trajectory in super().finish_tickets(worker, trajectories):
            if trajectory.ticket_id not in late_tickets:
                self._note(worker, trajectory)
                in_time.append(trajectory)
            elif not trajectory.is_evaluation:
                self.buffer.ledger.generate(trajectory.num_generated, "late")
        return in_time

    def _note(self, worker: Worker, trajectory: Trajectory) -> None:
        """Learn from a trajectory how fast its worker is, and how long one is."""
        took_s, num_tokens = trajectory.ended_at - trajectory.started_at, trajectory.num_generated
        self._num_noted = min(self._num_noted + 1, self._most_noted)
        self._mean_s += (took_s - self._mean_s) / self._num_noted
        self._mean_tokens += (num_tokens - self._mean_tokens) / self._num_noted
        if num_tokens:
            token_s = took_s / num_tokens
            known_s = self.token_s.get(worker.index) or token_s
            self.token_s[worker.index] = known_s + 0.1 * (token_s - known_s)
            if isinstance(worker, RemoteWorker):
                # after workers of this node, and slower hosts last
                worker.order = self.token_s[worker.index]

    def on_message(self, worker: Worker, message) -> None:
        """Make a host's engine load weights that have come to the host."""
        if not isinstance(message, Fetched):
            super().on_message(worker, message)
        worker.load_fetched()

    def on_failed_group(self, trajectory: Trajectory) -> None:
        """Drop a failed group; a host that fails again and again is shut out, and does not end the run."""
        if isinstance(self.workers[trajectory.worker], RemoteWorker):
            self.drop(trajectory.group_id, "failed")
            self.failures.count_group(is_failed=True)
        else:
            super().on_failed_group(trajectory)

    def shut_out(self, workers: Collection[int]) -> None:
        """Drop the groups that have a trajectory of one of these workers, which are not believed. Groups of a held
        batch stay."""
        for group_id in set(self.buffer.groups_of(workers)) - set(self.buffer.held):
            self.drop(group_id, "shut_out")

    # Leases

    def are_due(self) -> bool:
        """Whether to look again for leases that are over."""
        is_time = self.now() > self._looked_at + min(LOOK_S, self._mean_s)
        return is_time and any(isinstance(worker, RemoteWorker) for worker in self.workers)

    def end_leases(self) -> list[Ticket]:
        """Take from hosts, and return, tickets that they have had for `lease_s`, or, where the next batch waits for
        them, for longer than `_urgent_lease_s`. Both double each time that the ticket moves: a long response is as long
        on any worker, and would move in circles.

        Another worker has a slot for each, or is so much faster that one is free there at once.
        """
        self._looked_at = now = self.now()
        self._forget_moves()
        holding_back, ended = self.buffer.holding_back(), []
        takers = sorted((worker for worker in self.workers if worker.is_up), key=self._token_s)
        slots = {
            worker.index: self.config.max_running_requests - worker.num_running for worker in takers
        }
        hosts = [worker for worker in self.workers if isinstance(worker, RemoteWorker)]
        for worker in hosts if takers else ():
            shortest_s = min(self._urgent_lease_s(worker, takers[0]), self.config.swarm.lease_s)
            for ticket in worker.awaited:
                had_s = now - worker.given_at[ticket.ticket_id]
                if had_s <= shortest_s or not self.is_awaited(worker, ticket):
                    continue
                taker = next(
                    (other for other in takers if self._can_take(other, worker, ticket, slots)),
                    None,
                )
                if taker is None:
                    continue
                is_urgent = ticket.is_evaluation or ticket.group_id in holding_back
                if had_s > self._lease_s(worker, taker, ticket, is_urgent):
                    slots[taker.index] -= ticket.num_members
                    self._take_away(worker, ticket)
                    ended.append(ticket)
        return ended

    def is_awaited(self, worker: Worker, ticket: Ticket) -> bool:
        """Whether a worker's trajectory of a ticket is waited for: the worker was not told to abort it."""
        is_running = ticket.is_evaluation or self.buffer.is_running(ticket.group_id)
        return is_running and ticket.ticket_id not in worker.reissued

    def _can_take(
        self, other: Worker, worker: Worker, ticket: Ticket, slots: dict[int, int]
    ) -> bool:
        """Whether another worker could start a ticket of `worker` soon."""
        if other is worker or not self.has_weights(other, ticket):
            return False
        return slots[other.index] >= ticket.num_members or self._is_faster(other, worker)

    def _lease_s(self, worker: Worker, taker: Worker, ticket: Ticket, is_urgent: bool) -> float:
        """Time for which a worker may have a ticket, seconds; `is_urgent` if the trainer waits for it."""
        lease_s = self.config.swarm.lease_s
        if is_urgent:
            lease_s = min(lease_s, self._urgent_lease_s(worker, taker))
        return lease_s * 2 ** len(self._taken_from.get(_key(ticket), ()))

    def _take_away(self, worker: Worker, ticket: Ticket) -> None:
        self._taken_from.setdefault(_key(ticket), []).append(worker)
        worker.reissued.add(ticket.ticket_id)
        worker.process.send(Abort([ticket.ticket_id]))

    def _forget_moves(self) -> None:
        """Forget what has moved of groups that no longer run."""
        for key in list(self._taken_from):
            if key[0] >= 0 and not self.buffer.is_running(key[0]):
                del self._taken_from[key]

    def _urgent_lease_s(self, worker: Worker, other: Worker) -> float:
        """Time for which a worker may have a ticket that the trainer waits for, if another could start it now."""
        if self._is_faster(other, worker):
            return PATIENCE * self._mean_tokens * self._token_s(other)
        return STALLED * self.config.max_response_tokens * self._token_s(worker)

    def _token_s(self, worker: Worker) -> float:
        """Time that a token takes on a worker, seconds; infinite where nothing has come yet."""
        return self.token_s.get(worker.index) or math.inf

    def _is_faster(self, one: Worker, other: Worker) -> bool:
        """Whether `one` is so much faster than `other` that what `other` has begun is better begun again there."""
        token_s = self._token_s(one)
        return one.is_up and token_s < math.inf and FASTER * token_s <= self._token_s(other)


def _key(ticket: Ticket) -> tuple[int, int, int]:
    """What all tickets for the same trajectories have in common."""
    return ticket.group_id, ticket.member, ticket.min_version
