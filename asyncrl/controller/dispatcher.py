"""Which groups start and which are given up, and which rollout worker gets each ticket, and when.

Each ticket goes to the worker with the most free slots, as soon as one is free (ROLL Flash, arXiv 2510.11345, queue
scheduling). What the paper compares with is in extras/baselines.py.
"""

from collections import defaultdict

import numpy as np

from asyncrl.config import Config
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.ledger import DropReason
from asyncrl.controller.tickets import TicketQueue, TicketSource
from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import Abort, Hold, HoldReason, Tickets
from asyncrl.records import Ticket, Trajectory

MIN_FAILED_IN_A_ROW = 20
"""Groups that may fail one after the other, however few are outstanding, before the run is taken for broken."""


class Dispatcher:
    """Admits groups while there are places for them, sends their tickets out, takes their trajectories in, and drops
    groups: failed, without variance, stale or not needed."""

    def __init__(
        self, config: Config, workers: Workers, buffer: SampleBuffer, tickets: TicketSource
    ):
        self.config, self.workers, self.buffer, self.tickets = config, workers, buffer, tickets
        self.queue = TicketQueue(config.max_running_requests, self.may_start)
        self._failed_in_a_row = 0

    # Groups

    def add(self, trajectory: Trajectory) -> None:
        """Take in a trajectory of a training group. Raises RuntimeError if nothing succeeds any more."""
        if trajectory.finish_reason == "failed":
            if not self.buffer.add_failed(trajectory):
                self.on_failed_group(trajectory)
        elif group := self.buffer.add(trajectory):
            self._failed_in_a_row = 0
            if self.config.drop_zero_variance and np.ptp(group.rewards) == 0:
                self.drop(group.group_id, "filtered")
            elif self.config.extra_members:
                self._abort(group.group_id)

    def on_failed_group(self, trajectory: Trajectory) -> None:
        """Drop a group too many of whose trajectories failed; `trajectory` is the last. Raises as `add`."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row > max(
            MIN_FAILED_IN_A_ROW, self.buffer.config.max_outstanding_groups
        ):
            raise RuntimeError(
                f"the last {self._failed_in_a_row} groups all failed, the newest with: {trajectory.failure}; "
                "mend the environment or reward, or raise --env-timeout-s if it is only slow"
            )
        self.drop(trajectory.group_id, "failed")

    def drop_expired(self) -> None:
        """Drop, under `drop`, the groups that are too old for every later batch."""
        for group_id in self.buffer.expired():
            self.drop(group_id, "stale")

    def find_batch(self) -> list[int] | None:
        """Find the next batch, having dropped what it need not wait for; None while it must be waited for."""
        for group_id in self.buffer.surplus():
            self.drop(group_id, "aborted")
        return self.buffer.find_batch()

    def drop(self, group_id: int, reason: DropReason) -> None:
        """Drop a group; a problem that is not to blame is issued again, so that slow problems are not starved."""
        problem = self.buffer.drop(group_id, reason)
        self._abort(group_id)
        if reason not in ("filtered", "failed"):
            self.tickets.put_back(problem)

    def _abort(self, group_id: int) -> None:
        """End what still runs or waits for a group."""
        self.queue.remove_group(group_id)
        for worker in self.workers:
            running = [
                ticket_id
                for ticket_id, ticket in worker.running.items()
                if ticket.group_id == group_id
            ]
            if running:
                worker.process.send(Abort(running))

    def take_back(self, worker: Worker, trajectories: list[Trajectory]) -> list[Trajectory]:
        """Note that a worker has ended the tickets of these trajectories. Returns those that were waited for."""
        for ticket_id in {trajectory.ticket_id for trajectory in trajectories}:
            worker.take_back(ticket_id)
        return trajectories

    def describe(self) -> str:
        """One line on what every worker does and where the groups are."""
        workers = ", ".join(worker.describe() for worker in self.workers)
        return f"{workers}; {len(self.queue)} tickets queued; {self.buffer.ledger()}"

    # Tickets

    def can_go_on(self) -> bool:
        """Whether a training ticket runs or may start before the next weights, which alone wake a worker that
        stands."""
        if self.workers.are_coming or self.buffer.num_free_places() > 0:
            return True
        active = [
            worker for worker in self.workers if worker.loading is not None or not worker.stands
        ]
        if active and self.queue.has_training_tickets:
            return True
        return any(
            not ticket.is_evaluation for worker in active for ticket in worker.running.values()
        )

    def unfinished(self) -> list[Ticket]:
        """Tickets of training groups whose trajectories are waited for: those that workers have, then the others."""
        given = sorted(
            (t for worker in self.workers for t in worker.awaited), key=lambda t: t.ticket_id
        )
        return [t for t in (*given, *self.queue) if self.buffer.is_running(t.group_id)]

    def fill(self) -> None:
        """Admit groups, and send out what can start."""
        self.admit_groups()
        self.send_out()

    def admit_groups(self) -> None:
        """Admit groups while there are places for them."""
        while self.buffer.num_free_places() > 0:
            group_id, problem = self.tickets.next_group()
            min_version = self.buffer.admit(group_id, problem)
            self.queue.append(self.tickets.for_group(group_id, problem, min_version))

    def may_start(self, worker: Worker, ticket: Ticket) -> bool:
        """Whether a worker with a free slot may be given a ticket."""
        return worker.can_start(self.min_version(ticket))

    def min_version(self, ticket: Ticket) -> int:
        """Version a worker needs before it may start this ticket: with several workers one has newer weights before
        another, and the first to start a member of a group sets the version for the other members."""
        if ticket.is_evaluation:
            return ticket.min_version
        return max(ticket.min_version, self.buffer.min_version(ticket.group_id))

    def send_out(self) -> None:
        """Send out the tickets that can start."""
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
        idle = [worker for worker in self.workers if worker.is_up and not worker.running]
        reason = self.why_idle(why_full) if idle else why_full
        for worker in idle:
            if worker.held != reason:
                worker.held = reason
                worker.process.send(Hold(reason))

    def why_idle(self, why_full: HoldReason) -> HoldReason:
        """Return why a worker has no ticket."""
        return "version" if len(self.queue) else why_full
