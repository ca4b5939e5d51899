"""The dispatcher admits and drops groups, and sends each ticket to a rollout worker.

When a slot is free, the next ticket goes to the worker with the most free slots. This is queue scheduling (ROLL Flash,
arXiv 2510.11345). The paper's baselines are in extras/baselines.py.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.cluster.processes import RolloutEnded
from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.failures import Failures
from asyncrl.controller.ledger import DropReason
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import Abort, Idle, IdleReason, Tickets
from asyncrl.records import Ticket, Trajectory

PUT_BACK: tuple[DropReason, ...] = ("stale", "surplus", "discarded", "late", "shut_out")
"""Reasons after which a problem is issued again, so that training includes slow problems. Equal rewards and failures
would come again."""
MIN_GROUPS = 20
"""Least number of the newest groups whose failed share is checked. It is the number of outstanding groups if that is
larger, because failed groups end earlier."""


@dataclass(eq=False)
class Dispatcher:
    """Admits groups while places are free, sends out their tickets, and adds their trajectories to the buffer.

    It drops groups that fail, have equal rewards, are stale, or are not needed.
    """

    config: Config
    workers: Workers
    buffer: SampleBuffer
    ticket_source: TicketSource
    queue: deque[Ticket] = field(default_factory=deque)
    """Tickets without a worker, in order."""
    failures: Failures = field(default_factory=Failures)
    """Counts of training responses and groups that ended."""
    newest_failed: list[bool] = field(default_factory=list)
    """True for each of the newest groups that failed, oldest first. A resumed run starts empty: its reward may be
    fixed."""

    # Groups

    def add(self, trajectory: Trajectory) -> None:
        """Add a trajectory of a training group. Raises RolloutEnded if too many groups fail."""
        if trajectory.finish_reason == "aborted":
            self.buffer.count_aborted(trajectory)
            return
        self._count_response(trajectory.failure)
        if trajectory.finish_reason == "failed":
            if self.buffer.count_failure(trajectory):
                self.on_failed_group(trajectory)
        elif group := self.buffer.add(trajectory):
            if self.config.drop_zero_variance and np.ptp(group.rewards) == 0:
                self.drop(group.group_id, "filtered")
            elif self.config.extra_members:
                self._abort(group.group_id)
            self.on_ended_group(is_failed=False)

    def _count_response(self, failure: str) -> None:
        """Count a response that was not aborted, by its failure, or empty. Warn of the first failure of the run."""
        if failure and not self.failures.reasons:
            rule = "its group is dropped unless --extra-members covers it"
            print(f"warning: a response failed: {failure}; {rule}", flush=True)
        self.failures.count(failure)

    def on_failed_group(self, trajectory: Trajectory) -> None:
        """Drop a group after too many failures. `trajectory` is the last of them. Raises as `add`."""
        self.drop(trajectory.group_id, "failed")
        self.on_ended_group(is_failed=True)

    def on_ended_group(self, is_failed: bool) -> None:
        """Count a group that finished or failed. Raises as `add`."""
        self.failures.count_group(is_failed)
        window = max(MIN_GROUPS, self.buffer.node_config.max_outstanding_groups)
        self.newest_failed = [*self.newest_failed, is_failed][-window:]
        num_failed, allowed = sum(self.newest_failed), self.config.max_failed_share
        if len(self.newest_failed) == window and num_failed > allowed * window:
            raise RolloutEnded(
                f"{num_failed} of the last {window} groups failed, --max-failed-share allows {allowed:g}; most often: "
                f"{self.failures.commonest}; fix the environment or reward, raise --env-timeout-s if it is only slow, "
                "or raise --max-failed-share"
            )

    def drop_expired(self) -> None:
        """Drop the groups that are too old for every later batch."""
        for group_id in self.buffer.expired():
            self.drop(group_id, "stale")

    def drop_surplus(self) -> None:
        """Drop the groups that the next batch need not wait for."""
        for group_id in self.buffer.surplus():
            self.drop(group_id, "surplus")

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop a group, and issue its problem again if the reason is one of PUT_BACK."""
        problem = self.buffer.drop(group_id, reason)
        self._abort(group_id)
        if reason in PUT_BACK:
            self.ticket_source.put_back(problem)

    def _abort(self, group_id: int) -> None:
        """End the running responses of a group, and remove its queued tickets."""
        self.queue = deque(ticket for ticket in self.queue if ticket.group_id != group_id)
        for worker in self.workers:
            running = [
                ticket_id
                for ticket_id, ticket in worker.tickets.items()
                if ticket.group_id == group_id
            ]
            if running:
                worker.process.send(Abort(running))

    def finish_tickets(self, worker: Worker, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Mark the tickets of these trajectories as ended by a worker. Return the trajectories that are used.

        extras/swarm overrides this, because it does not use all.
        """
        for ticket_id in {trajectory.ticket_id for trajectory in trajectories}:
            worker.finish_ticket(ticket_id)
        return trajectories

    def on_message(self, worker: Worker, message) -> None:
        """Act on a message that the controller does not know. Raises RuntimeError.

        An optional system overrides this for its own messages.
        """
        raise RuntimeError(f"worker {worker.index} sent an unknown message: {message!r}")

    def describe(self) -> str:
        """Return one line with the state of all workers, and the ledger."""
        workers = ", ".join(worker.describe() for worker in self.workers)
        return f"{workers}; {len(self.queue)} tickets queued; {self.buffer.balance()}"

    # Tickets

    def enqueue(self, tickets: Sequence[Ticket], first: bool = False) -> None:
        """Queue tickets in their order, behind all others, or before them if `first`."""
        if first:
            self.queue.extendleft(reversed(tickets))
        else:
            self.queue.extend(tickets)

    def admit_groups(self) -> None:
        """Admit groups while places are free. Raises RolloutEnded if a prompt cannot be made."""
        while self.buffer.num_free_places() > 0:
            group_id, problem = self.ticket_source.next_group()
            min_version = self.buffer.admit(group_id, problem)
            try:
                self.enqueue(self.ticket_source.for_group(group_id, problem, min_version))
            except RolloutEnded:
                self.drop(group_id, "discarded")  # a resumed run issues the problem again
                raise

    def assign_tickets(self) -> Iterator[tuple[Worker, Ticket]]:
        """Assign the tickets that can start now, and yield each with its worker.

        A ticket goes to the least loaded worker that may start it. Among equally loaded workers the lowest `order`
        wins. A ticket that no worker may start delays all later tickets. The heap is for thousands of workers.
        """
        workers = list(self.workers) if self.queue else []
        loads = [
            (worker.num_running, worker.order, i)
            for i, worker in enumerate(workers)
            if worker.num_running < self.config.max_running_requests
        ]
        heapq.heapify(loads)
        passed_over = []
        while self.queue and loads:
            worker = workers[loads[0][2]]
            if not self.may_start(worker, self.queue[0]):
                passed_over.append(heapq.heappop(loads))
                continue
            ticket = self.queue.popleft()
            self.assign(worker, ticket)
            yield worker, ticket
            heapq.heapreplace(loads, (worker.num_running, *loads[0][1:]))
            while passed_over:
                heapq.heappush(loads, passed_over.pop())

    def assign(self, worker: Worker, ticket: Ticket) -> None:
        """Make a ticket the worker's. The first ticket of a group sets the version that its members need."""
        worker.assign(ticket)
        if not ticket.is_evaluation:
            self.buffer.note_assignment(ticket.group_id, worker.sent_version)

    def may_start(self, worker: Worker, ticket: Ticket) -> bool:
        """Return whether a worker has a free slot for a ticket, and weights that are new enough."""
        num_running = worker.num_running + ticket.num_members
        return num_running <= self.config.max_running_requests and self.has_weights(worker, ticket)

    def has_weights(self, worker: Worker, ticket: Ticket) -> bool:
        """Return whether a worker's engine is up, and was sent weights that are new enough for a ticket."""
        return worker.is_up and worker.sent_version >= self.needed_version(ticket)

    def needed_version(self, ticket: Ticket) -> int:
        """Return the version that a worker needs before it may start this ticket.

        Workers get new weights at different times. All members of a group need at least the version of the worker that
        got its first ticket. The worker's `sent_version` must be as new, not the loaded one. A worker acts on messages
        in order, so it loads the weights before it starts the ticket.
        """
        if ticket.is_evaluation:
            return ticket.min_version
        # While its group is unfinished, only a continued ticket can need more than its group.
        return max(ticket.min_version, self.buffer.needed_version_of_group(ticket.group_id))

    def unfinished_tickets(self) -> list[Ticket]:
        """Return the tickets of running groups, oldest first, for a resume.

        A ticket continues from the tokens that its worker has reported.
        """
        partials, assigned = {}, []
        for worker in self.workers:
            assigned += worker.awaited
            if worker.in_flight is not None:
                partials |= worker.in_flight.partials
        assigned.sort(key=lambda ticket: ticket.ticket_id)
        unfinished = []
        for ticket in (*assigned, *self.queue):
            # This leaves out evaluation tickets, too, because their groups are not resident. `evaluates` restarts them.
            if self.buffer.is_unfinished(ticket.group_id):
                partial = partials.get(ticket.ticket_id)
                unfinished.append(
                    self.ticket_source.continued(ticket, partial) if partial else ticket
                )
        return unfinished

    def send_out(self) -> None:
        outgoing: dict[int, list[Ticket]] = defaultdict(list)
        for worker, ticket in self.assign_tickets():
            outgoing[worker.index].append(ticket)
        for index, tickets in outgoing.items():
            self.workers[index].process.send(Tickets(tickets))

    def report_idle(self, reason_if_full: IdleReason) -> None:
        """Send each worker without a ticket the reason, once. `reason_if_full`: reason why no group may be admitted."""
        reason = self.idle_reason(reason_if_full)
        for worker in self.workers:
            if worker.is_up and not worker.tickets and worker.idle_reason != reason:
                worker.idle_reason = reason
                worker.process.send(Idle(reason))

    def idle_reason(self, reason_if_full: IdleReason) -> IdleReason:
        """Return the reason why a worker has no ticket."""
        return "version" if self.queue else reason_if_full
