"""The controller of a run that listens for hosts."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from asyncrl.controller.controller import Controller
from asyncrl.controller.workers import Worker
from asyncrl.records import Trajectory
from asyncrl.runlog.metrics import Measured
from asyncrl.weights.transport import Announcement, Staged, Transport
from extras.swarm.leases import LeasingDispatcher
from extras.swarm.pull import PullTransport
from extras.swarm.remote import RemoteWorker, SwarmBuffer
from extras.swarm.wire import Fetched

if TYPE_CHECKING:
    from extras.swarm.swarm import Swarm


class SwarmDispatcher(LeasingDispatcher):
    """A dispatcher whose hosts fetch weights, fail and lie."""

    def on_message(self, worker: Worker, message) -> None:
        """Make a host's engine load weights that have come to the host."""
        if not isinstance(message, Fetched):
            super().on_message(worker, message)
        worker.load_fetched()

    def on_failed_group(self, trajectory: Trajectory) -> None:
        """Drop a failed group. A host that fails again and again is shut out, and does not end the run."""
        if isinstance(self.workers[trajectory.worker], RemoteWorker):
            self.drop(trajectory.group_id, "failed")
            self.failures.count_group(is_failed=True)
        else:
            super().on_failed_group(trajectory)

    def shut_out(self, workers: Collection[int]) -> None:
        """Drop the groups with a trajectory of one of these workers, except groups of a held batch."""
        for group_id in set(self.buffer.groups_of(workers)) - set(self.buffer.held):
            self.drop(group_id, "shut_out")


class SwarmController(Controller):
    """Lets hosts in, brings weights to them, and holds each batch until their samples are believed."""

    buffer_class = SwarmBuffer
    dispatcher_class = SwarmDispatcher
    swarm: "Swarm | None" = None
    """The hosts of this node."""
    pulled: PullTransport | None = None
    """Transport of weights to hosts; known once the controller is connected."""

    # Life of the workers

    def connect(self, transport: Transport) -> None:
        """Let hosts in, and give the engines of this node the weight transport, when all are up."""
        if self.swarm is not None:
            self.pulled = self.workers.pulled = self.swarm.make_transport(transport.specs)
            self.pulled.on_kept = self.send_pending_update
            self.swarm.start(self)
        super().connect(transport)

    def let_in(self, process, host: str, scores_probe: bool) -> RemoteWorker:
        """Make a worker of an engine of a host; its messages come by `on_message`."""
        with self.lock:
            worker = RemoteWorker(
                -1,
                process,
                self.pulled,
                refresh_lag=self.config.swarm.refresh_lag,
                now=self.dispatcher.now,
                scores_probe=scores_probe,
            )
            self.workers.join(worker)
            self.journal.record_event(
                "worker_started", worker=worker.index, attempt=0, machine=host
            )
            return worker

    def give_up(self, worker: Worker, is_believed: bool) -> None:
        """Act on the end of a host's worker. Groups with a trajectory of a worker that is not believed are dropped."""
        with self.lock:
            if not is_believed:
                self.dispatcher.shut_out([worker.index])
            self.on_message(worker, None)

    def move_tickets(self) -> None:
        """Move the tickets that hosts have had for too long to other workers."""
        with self.lock:
            self.dispatcher.move_tickets()

    def fetch_anew(self, worker: Worker, version: int) -> None:
        """Make a worker fetch the newest weights, if it still fetches a version that is gone."""
        with self.lock:
            if (
                worker.loading is not None
                and version == worker.loading.version > worker.sent_version
            ):
                worker.finish_loading()
                worker.needs_update = True
                self.announcements.send_pending_update(worker)

    def admit_and_send(self) -> None:
        """Start tickets, and send the newest weights to workers that cannot start a ticket without them."""
        self.dispatcher.move_tickets_if_due()
        super().admit_and_send()
        newest = self.announcements.newest
        for worker in self.workers if newest is not None else ():
            if (
                worker.idle_reason == "version"
                and worker.loading is None
                and worker.is_behind(newest)
            ):
                worker.needs_update = True
                self.announcements.send_pending_update(worker)

    # Batches

    def wait_for_batch(self) -> list[int]:
        """Wait for the next batch and hold it, unless one is held. It is then consumed or refused.

        Return the ids of its groups; empty if the run is asked to stop and has no worker. Raises as `wait_on_clock`.
        """
        self.wait_on_clock(lambda: self.hold_batch() or self._is_left_alone())
        return self.buffer.held

    def refuse_batch(self, workers: Collection[int]) -> bool:
        """Drop all groups of workers that are not believed. Return whether the held batch has one of them.

        Such a batch is given back, and another one must be waited for.
        """
        with self.lock:
            is_refused = not set(self.buffer.held).isdisjoint(self.buffer.groups_of(workers))
            if is_refused:
                self.buffer.held = []
            self.dispatcher.shut_out(workers)
            self.admit_and_send()
            return is_refused

    def has_evaluated(self) -> bool:
        """Return whether no evaluation runs, or it cannot end: the run must stop and has no worker."""
        return super().has_evaluated() or self._is_left_alone()

    def _is_left_alone(self) -> bool:
        return self.is_asked_to_stop and not any(self.workers)

    # Weights

    def stage(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> Staged:
        """Copy weights, in one pass, for the workers of this node and for hosts."""
        return super().stage(version, self.pulled.copy(version, parameters))

    def announce(self, announcement: Announcement) -> None:
        """Make all workers load these weights, hosts as soon as the snapshot is kept; see Controller."""
        self.pulled.make_readable(Staged(announcement.version, []))
        super().announce(announcement)

    def send_pending_update(self) -> None:
        """Make hosts fetch the announced weights. It is called when another snapshot is kept."""
        with self.lock:
            for worker in self.workers:
                self.announcements.send_pending_update(worker)

    # Measurements

    def take_metrics(self) -> Measured:
        """Take the metrics since the last call, also `swarm/*` of hosts."""
        return super().take_metrics() | self.swarm.take_metrics()

    def try_to_ban_host(self, worker: int, problem: str) -> bool:
        """Shut out the host of a worker whose weights are wrong.

        Return False for a worker of this node, and if no believed worker is left.
        """
        if worker < self.workers.num_workers:
            return False
        self.swarm.shut_out(worker, problem)
        return any(self.is_believed(other.index) for other in self.workers)

    def is_believed(self, worker: int) -> bool:
        """Return whether the host of a worker was not shut out."""
        return worker not in self.swarm.members.disbelieved

    def stop(self) -> None:
        """Tell hosts that the run has ended, and end all workers of this node."""
        try:
            if self.swarm is not None:
                self.swarm.stop()
        finally:
            super().stop()
            if self.pulled is not None:
                self.pulled.close()
