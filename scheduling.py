"""Which waiting ticket goes to which rollout worker, and when.

`queue` hands each ticket to the worker with the most free slots, as soon as one is free (ROLL Flash, arXiv 2510.11345,
queue scheduling). `batch` is the baseline: groups are split evenly over the workers in advance, whatever they do.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal

from data.records import Ticket
from tickets import EVALUATION_GROUP
from workers import Worker


class TicketQueue:
    """Tickets that no worker has yet, in order."""

    def __init__(self, scheduling: Literal["queue", "batch"], max_running_requests: int):
        self.scheduling, self.max_running_requests = scheduling, max_running_requests
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def has_training_tickets(self) -> bool:
        """Whether a ticket waits that is not of an evaluation."""
        return any(ticket.group_id != EVALUATION_GROUP for ticket in self._tickets)

    def append(self, tickets: list[Ticket]) -> None:
        """Put tickets at the end."""
        self._tickets.extend(tickets)

    def put_first(self, tickets: list[Ticket]) -> None:
        """Put tickets before all others, in their order."""
        self._tickets.extendleft(reversed(tickets))

    def remove_group(self, group_id: int) -> None:
        """Take out the tickets of a group."""
        self._tickets = deque(ticket for ticket in self._tickets if ticket.group_id != group_id)

    def assign(self, workers: list[Worker]) -> Iterator[tuple[Worker, Ticket]]:
        """Take out the tickets that can start now, each with its worker; the caller adds it to the worker's load."""
        if self.scheduling == "batch":
            yield from self._assign_in_advance(workers)
        else:
            yield from self._assign_to_free(workers)

    def _assign_to_free(self, workers: list[Worker]) -> Iterator[tuple[Worker, Ticket]]:
        while self._tickets:
            ticket = self._tickets[0]
            able = [worker for worker in workers if worker.can_start(ticket)]
            worker = min(able, key=lambda w: w.num_running, default=None)
            if worker is None or worker.num_running + ticket.num_members > self.max_running_requests:
                return
            yield worker, self._tickets.popleft()

    def _assign_in_advance(self, workers: list[Worker]) -> Iterator[tuple[Worker, Ticket]]:
        """Free slots do not count: the engine keeps what it cannot run yet."""
        waiting, self._tickets = self._tickets, deque()
        for ticket in waiting:
            index = ticket.member if ticket.group_id == EVALUATION_GROUP else ticket.group_id
            worker = workers[index % len(workers)]
            if worker.can_start(ticket):
                yield worker, ticket
            else:
                self._tickets.append(ticket)
