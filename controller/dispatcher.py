"""Which groups start, and which ticket goes to which rollout worker, and when.

`queue` hands each ticket to the worker with the most free slots, as soon as one is free (ROLL Flash, arXiv 2510.11345,
queue scheduling). `batch` is the baseline: groups are split evenly over the workers in advance, in rounds.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Literal

from config import Config
from controller.buffer import SampleBuffer
from controller.tickets import TicketSource
from controller.workers import Worker, Workers
from data.messages import Abort, Hold, HoldReason, Proceed, Tickets
from data.records import Ticket


class TicketQueue:
    """Tickets that no worker has yet, in order."""

    def __init__(
        self,
        scheduling: Literal["queue", "batch"],
        max_running_requests: int,
        min_version: Callable[[Ticket], int] = lambda ticket: ticket.min_version,
    ):
        """`min_version(ticket)`: version that a worker must have been sent to start it."""
        self.scheduling, self.max_running_requests = scheduling, max_running_requests
        self.min_version = min_version
        self._tickets: deque[Ticket] = deque()

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def has_training_tickets(self) -> bool:
        """Whether a ticket waits that is not of an evaluation."""
        return any(not ticket.is_evaluation for ticket in self._tickets)

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
        """Each ticket to the least loaded worker that may start it; a heap, as workers and tickets can be thousands."""
        if not self._tickets:
            return
        most = self.max_running_requests
        loads = [(worker.num_running, place) for place, worker in enumerate(workers) if worker.num_running < most]
        heapq.heapify(loads)
        while self._tickets:
            ticket, passed_over = self._tickets[0], []
            while loads and not workers[loads[0][1]].can_start(self.min_version(ticket)):
                passed_over.append(heapq.heappop(loads))
            if not loads or loads[0][0] + ticket.num_members > most:
                return
            worker = workers[loads[0][1]]
            yield worker, self._tickets.popleft()
            heapq.heapreplace(loads, (worker.num_running, loads[0][1]))
            for load in passed_over:
                heapq.heappush(loads, load)

    def _assign_in_advance(self, workers: list[Worker]) -> Iterator[tuple[Worker, Ticket]]:
        """Free slots do not count: the engine keeps what it cannot run yet."""
        waiting, self._tickets = self._tickets, deque()
        for ticket in waiting:
            index = ticket.member if ticket.is_evaluation else ticket.group_id
            worker = workers[index % len(workers)]
            if worker.can_start(self.min_version(ticket)):
                yield worker, ticket
            else:
                self._tickets.append(ticket)


class Dispatcher:
    """Admits groups while there are places for them, sends their tickets out, and opens the barrier between turns."""

    def __init__(self, config: Config, workers: Workers, buffer: SampleBuffer, tickets: TicketSource):
        self.config, self.workers, self.buffer, self.tickets = config, workers, buffer, tickets
        self.queue = TicketQueue(config.scheduling, config.max_running_requests, self._min_version)
        self._at_barrier: set[int] = set()

    def _min_version(self, ticket: Ticket) -> int:
        """That of its group may have risen: with several workers one has newer weights before another."""
        if ticket.is_evaluation:
            return ticket.min_version
        return max(ticket.min_version, self.buffer.min_version(ticket.group_id))

    def fill(self) -> None:
        """Admit groups, unless the round of a batch is still running, and send out what can start."""
        while self.buffer.num_free_places() > 0 and not self._round_is_running():
            self._admit_all()
        self.send_out()
        self._open_barrier()

    def _admit_all(self) -> None:
        for _ in range(self.buffer.num_free_places()):
            group_id = self.tickets.next_group_id()
            self.queue.append(self.tickets.for_group(group_id, self.buffer.admit(group_id)))

    def _round_is_running(self) -> bool:
        return self.config.scheduling == "batch" and bool(self.queue.has_training_tickets or self._running_tickets())

    def _running_tickets(self) -> set[int]:
        """Tickets of training groups that workers have."""
        return {
            ticket.ticket_id
            for worker in self.workers
            for ticket in worker.running.values()
            if not ticket.is_evaluation
        }

    def send_out(self) -> None:
        """Send the tickets that can start to their workers."""
        outgoing: dict[int, list[Ticket]] = defaultdict(list)
        for worker, ticket in self.queue.assign(list(self.workers)):
            worker.give(ticket)
            if not ticket.is_evaluation:
                self.buffer.start(ticket.group_id, worker.sent_version)
            outgoing[worker.index].append(ticket)
        for index, tickets in outgoing.items():
            self.workers[index].process.send(Tickets(tickets))

    def hold_idle(self, why_full: HoldReason) -> None:
        """Tell workers without a ticket why, once for each reason; `why_full` says why no group may be admitted."""
        idle = [worker for worker in self.workers if worker.ready and not worker.running]
        reason = self._reason(why_full) if idle else why_full
        for worker in idle:
            if worker.held != reason:
                worker.held = reason
                worker.process.send(Hold(reason))

    def _reason(self, why_full: HoldReason) -> HoldReason:
        if why_full != "weights" and self._round_is_running():
            return "round"
        return "version" if len(self.queue) else why_full

    def abort(self, group_id: int) -> None:
        """End what still runs or waits for a group."""
        self.queue.remove_group(group_id)
        for worker in self.workers:
            running = [ticket_id for ticket_id, ticket in worker.running.items() if ticket.group_id == group_id]
            if running:
                worker.process.send(Abort(running))

    def arrive_at_barrier(self, ticket_ids: list[int]) -> None:
        """Note that these tickets wait for all others."""
        self._at_barrier.update(ticket_ids)

    def _open_barrier(self) -> None:
        """If every running trajectory waits at the barrier, on whichever worker, let all go on."""
        if not self._at_barrier:
            return
        still_to_come = self.config.scheduling == "batch" and self.queue.has_training_tickets
        if self._running_tickets() <= self._at_barrier and not still_to_come:
            self._at_barrier.clear()
            for worker in self.workers:
                worker.process.send(Proceed())
