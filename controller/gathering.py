"""Trajectories become groups in the buffer; groups that cannot be trained on, or need not be, are dropped from it."""

import numpy as np

from config import Config
from controller.buffer import SampleBuffer
from controller.dispatcher import Dispatcher
from controller.ledger import DropReason
from controller.tickets import TicketSource
from data.records import Group, Trajectory

MIN_FAILED_IN_A_ROW = 20
"""Groups that may fail one after the other, however few are outstanding, before the run is taken for broken."""


class Gatherer:
    """Puts trajectories into the buffer, and drops groups: failed, without variance, stale or not needed."""

    def __init__(self, config: Config, buffer: SampleBuffer, dispatcher: Dispatcher, tickets: TicketSource):
        self.config, self.buffer, self.dispatcher, self.tickets = config, buffer, dispatcher, tickets
        self._failed_in_a_row = 0

    def add(self, trajectory: Trajectory) -> None:
        """Take in a trajectory of a training group. Raises RuntimeError if nothing succeeds any more."""
        if trajectory.finish_reason == "failed":
            self._on_failed(trajectory)
            return
        group = self.buffer.add(trajectory)
        if group is not None:
            self._on_group(group)

    def _on_group(self, group: Group) -> None:
        """Act on a group that is complete: it may teach nothing, and its extra members are not needed."""
        self._failed_in_a_row = 0
        if self.config.drop_zero_variance and np.ptp(group.rewards) == 0:
            self._drop(group.group_id, "filtered")
            self.tickets.forget(group.group_id)
        elif self.config.extra_members:
            self.dispatcher.abort(group.group_id)

    def _on_failed(self, trajectory: Trajectory) -> None:
        """Drop the group of a failed trajectory if it had no spare; a run in which nothing succeeds ends."""
        if self.buffer.add_failed(trajectory):
            return
        self._failed_in_a_row += 1
        if self._failed_in_a_row > max(MIN_FAILED_IN_A_ROW, self.buffer.bounds.max_outstanding):
            raise RuntimeError(
                f"the last {self._failed_in_a_row} groups all failed, the newest with: {trajectory.failure}; "
                "mend the environment or reward, or raise --env-timeout-s if it is only slow"
            )
        self._drop(trajectory.group_id, "failed")
        self.tickets.forget(trajectory.group_id)

    def drop_expired(self) -> None:
        """Under `drop`: abort what expired and issue its problem again, so that slow problems are not starved."""
        for group_id in self.buffer.expired():
            self._drop(group_id, "stale")
            self.tickets.put_back(group_id)

    def take(self) -> list[Group] | None:
        """The next batch, given up for it what it need not wait for, or None while it must be waited for."""
        for group_id in self.buffer.surplus():
            self._drop(group_id, "aborted")
            self.tickets.put_back(group_id)
        batch = self.buffer.take()
        for group in batch or ():
            self.tickets.forget(group.group_id)
        return batch

    def _drop(self, group_id: int, reason: DropReason) -> None:
        self.buffer.drop(group_id, reason)
        self.dispatcher.abort(group_id)
