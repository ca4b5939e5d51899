"""Leases: how long a machine that has joined may have a ticket while another could take it.

Pure but for the clock: no machine is asked, and nothing is waited for.
"""

import functools
import time
from collections.abc import Callable, Iterator

from controller.buffer import SampleBuffer
from controller.workers import Worker, Workers
from data.messages import Abort
from data.records import Ticket, Trajectory

SLOW = 4.0
"""Times the mean duration of a trajectory after which a machine that holds a batch back is too slow for it."""


class Leases:
    """Knows how long trajectories take, and takes tickets from machines that need much longer."""

    def __init__(
        self, lease_s: float, most_running: int, workers: Workers, buffer: SampleBuffer, min_version: Callable
    ):
        """`most_running` trajectories run on a worker, and `min_version(ticket)` is what it needs to start a ticket."""
        self.lease_s, self.most_running = lease_s, most_running
        self.workers, self.buffer, self.min_version = workers, buffer, min_version
        self._mean_s = 0.0  # of a trajectory, the newest counting most

    def note(self, worker: Worker, trajectory: Trajectory) -> None:
        """Learn from a trajectory how fast its worker is, and how long one takes."""
        took_s = trajectory.ended_at - trajectory.started_at
        self._mean_s += (took_s - self._mean_s) * (0.02 if self._mean_s else 1)
        if worker.is_remote and trajectory.num_generated:
            token_s = took_s / trajectory.num_generated
            worker.token_s += (token_s - worker.token_s) * (0.1 if worker.token_s else 1)

    def end(self) -> Iterator[Ticket]:
        """Take from machines that have joined, and yield, the tickets which another worker may start and they have had
        for `lease_s`, or, where the next batch waits for them, for much longer than a trajectory takes."""
        holding_back, now = self.buffer.holding_back(), time.monotonic()
        for worker in filter(lambda worker: worker.is_remote, self.workers):
            for ticket in filter(functools.partial(self.is_awaited, worker), list(worker.running.values())):
                is_urgent = ticket.is_evaluation or ticket.group_id in holding_back
                lease_s = min(self.lease_s, SLOW * self._mean_s) if is_urgent and self._mean_s else self.lease_s
                if now > worker.given_at[ticket.ticket_id] + lease_s and self._can_take(ticket, worker):
                    worker.lapsed.add(ticket.ticket_id)
                    worker.process.send(Abort([ticket.ticket_id]))
                    yield ticket

    def is_awaited(self, worker: Worker, ticket: Ticket) -> bool:
        """Whether a worker's trajectory of a ticket is waited for: it was not told to abort it."""
        is_running = ticket.is_evaluation or self.buffer.is_running(ticket.group_id)
        return is_running and ticket.ticket_id not in worker.lapsed

    def _can_take(self, ticket: Ticket, other: Worker) -> bool:
        """Whether a worker that has a free slot may start a ticket which another has."""
        version, most = self.min_version(ticket), self.most_running - ticket.num_members
        return any(w is not other and w.num_running <= most and w.can_start(version) for w in self.workers)
