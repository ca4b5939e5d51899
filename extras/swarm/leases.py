"""Leases: how long a machine that has joined may have a ticket while another could take it.

Pure but for the clock: no machine is asked, and nothing is waited for.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import Abort
from asyncrl.records import Ticket, Trajectory

FASTER = 2.0
"""Times as fast that another worker must be to be given a ticket which has begun elsewhere."""
PATIENCE = 2.0
"""Mean responses that this other worker could have sampled meanwhile; twice as many each time that the ticket moves, as
a long response is as long elsewhere: so none goes in circles."""
STALLED = 2.0
"""Times what the longest response takes on a machine, after which another as slow may have the ticket."""
LOOK_S = 2.0
"""Longest time between two looks for leases that are over; less where responses take less."""


class Leases:
    """Knows how fast workers are, and takes tickets that the trainer waits for from machines that are too slow."""

    def __init__(self, config: Config, workers: Workers, buffer: SampleBuffer, min_version: Callable):
        """`min_version(ticket)` is the version that a worker needs to start a ticket."""
        self.config, self.workers, self.buffer, self.min_version = config, workers, buffer, min_version
        self._mean_s = self._mean_tokens = 0.0  # of a trajectory, over about a step's: at its end the slow alone come
        self._num_noted, self._most_noted = 0, config.groups_per_step * config.group_size
        self._num_moves: Counter[tuple[int, int, int]] = Counter()
        self._taken_from: dict[tuple[int, int, int], Worker] = {}
        self._looked_at = time.monotonic()

    def may_start(self, worker: Worker, ticket: Ticket) -> bool:
        """Whether a worker may be given a ticket: it has the version, and the ticket was not taken from it for one that
        is much faster."""
        if not worker.can_start(self.min_version(ticket)):
            return False
        taken_from = self._taken_from.get((ticket.group_id, ticket.member, ticket.min_version))
        return taken_from is not worker or not any(_is_faster(other, worker) for other in self.workers)

    def note(self, worker: Worker, trajectory: Trajectory) -> None:
        """Learn from a trajectory how fast its worker is, and how long one is."""
        took_s, num_tokens = trajectory.ended_at - trajectory.started_at, trajectory.num_generated
        self._num_noted = min(self._num_noted + 1, self._most_noted)
        self._mean_s += (took_s - self._mean_s) / self._num_noted
        self._mean_tokens += (num_tokens - self._mean_tokens) / self._num_noted
        if num_tokens:
            worker.token_s += (took_s / num_tokens - worker.token_s) * (0.1 if worker.token_s else 1)

    def are_due(self) -> bool:
        """Whether to look again for leases that are over."""
        is_time = time.monotonic() > self._looked_at + min(LOOK_S, self._mean_s)
        return is_time and any(worker.is_remote for worker in self.workers)

    def end(self) -> Iterator[Ticket]:
        """Take from machines that have joined, and yield, the tickets which they have had for `lease_s`, or, where the
        next batch waits for them, for longer than `_urgent_lease_s`. Another worker has a slot for each, or is so much
        faster that one is free there at once."""
        self._looked_at = now = time.monotonic()
        holding_back, most = self.buffer.holding_back(), self.config.max_running_requests
        by_speed = sorted((w for w in self.workers if w.is_up), key=_token_s)
        slots = {worker.index: most - worker.num_running for worker in by_speed}
        for gone in [key for key in self._num_moves if key[0] >= 0 and not self.buffer.is_running(key[0])]:
            del self._num_moves[gone]
            self._taken_from.pop(gone, None)
        for worker in filter(lambda worker: by_speed and worker.is_remote, self.workers):
            least_s = min(self._urgent_lease_s(worker, by_speed[0]), self.config.swarm.lease_s)
            for ticket in worker.awaited:
                had_s = now - worker.given_at[ticket.ticket_id]
                if had_s <= least_s or not self.is_awaited(worker, ticket):
                    continue
                version, members = self.min_version(ticket), ticket.num_members
                able = (other for other in by_speed if other is not worker and other.can_start(version))
                has_slots = (w for w in able if slots[w.index] >= members or _is_faster(w, worker))
                if (other := next(has_slots, None)) is None:
                    continue
                is_urgent = ticket.is_evaluation or ticket.group_id in holding_back
                key = ticket.group_id, ticket.member, ticket.min_version
                lease_s = self._urgent_lease_s(worker, other) * 2 ** self._num_moves[key] if is_urgent else math.inf
                if had_s > min(lease_s, self.config.swarm.lease_s):
                    self._num_moves[key] += 1
                    slots[other.index] -= members
                    self._taken_from[key] = worker
                    worker.lapsed.add(ticket.ticket_id)
                    worker.process.send(Abort([ticket.ticket_id]))
                    yield ticket

    def _urgent_lease_s(self, worker: Worker, other: Worker) -> float:
        """Time for which a worker may have a ticket that the trainer waits for, if another could start it now."""
        if _is_faster(other, worker):
            return PATIENCE * self._mean_tokens * other.token_s
        return STALLED * self.config.max_response_tokens * _token_s(worker)

    def is_awaited(self, worker: Worker, ticket: Ticket) -> bool:
        """Whether a worker's trajectory of a ticket is waited for: it was not told to abort it."""
        is_running = ticket.is_evaluation or self.buffer.is_running(ticket.group_id)
        return is_running and ticket.ticket_id not in worker.lapsed


def _token_s(worker: Worker) -> float:
    """Time that a token takes on a worker, seconds; no end of it where nothing has come yet."""
    return worker.token_s or math.inf


def _is_faster(one: Worker, other: Worker) -> bool:
    """Whether a worker is so much faster than another that what the other has begun is better begun again there."""
    return one.is_up and one.token_s > 0 and FASTER * one.token_s <= _token_s(other)
