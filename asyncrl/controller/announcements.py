"""Announcements: the newest weights, and which weights each worker has, loads and is owed."""

from collections.abc import Iterable

from asyncrl.controller.workers import Worker
from asyncrl.messages import Connect
from asyncrl.weights.transport import Announcement, Transport


class Announcements:
    """Brings announced weights to the workers, and keeps the transport's books on who reads them.

    A worker loads one version at a time; of those announced meanwhile it is owed the newest. One on a machine that has
    joined fetches them first, while it samples on, and only when it is `refresh_lag` versions behind, or has nothing to
    do without them. The controller calls all of this under its lock.
    """

    def __init__(self, workers: Iterable[Worker], refresh_lag: int = 0):
        self.workers, self.refresh_lag = workers, refresh_lag
        self.transport = Transport()
        """What brings weights to the engines; see asyncrl/weights/transport.py. One that does nothing until it is
        known."""
        self._are_connected = False
        self.newest: Announcement | None = None
        """Weights that workers are to have."""
        self.deferred: Announcement | None = None
        """Weights that wait for the running evaluation to end; newer ones take their place."""

    def connect(self, transport) -> None:
        """Give the engines the weight transport, when all are up."""
        self.transport, self._are_connected = transport, True
        for worker in filter(lambda worker: worker.is_up, self.workers):  # on_ready connects one that has just died
            worker.process.send(Connect(transport.init_info(worker.index)))

    def take_deferred(self) -> Announcement | None:
        """Take the weights that wait, if any; they wait no longer."""
        deferred, self.deferred = self.deferred, None
        return deferred

    def announce(self, announcement: Announcement) -> None:
        """Have all workers load these weights: at once, or when they are up and have loaded what they are loading.

        A late version may come twice, and must wake also a worker that was told to stand while it loads it.
        """
        self.newest = announcement
        self.transport.announce(announcement.staged)
        for worker in self.workers:
            worker.owed = worker.stands or worker.is_behind(self.newest, self.refresh_lag)
            if worker.is_up and worker.loading is None:
                self._send_owed(worker)

    def catch_up(self) -> None:
        """Send the newest weights to workers that can start nothing without newer ones, as patient as they may be."""
        for worker in self.workers if self.newest else ():
            if worker.held == "version" and worker.loading is None and worker.is_behind(self.newest, self.refresh_lag):
                worker.owed = True
                self._send_owed(worker)

    def _send_owed(self, worker: Worker) -> None:
        """Send a worker the newest weights if it is owed them, unless it has to wait for those that come after."""
        if worker.owed and self.transport.can_read(worker.index, self.newest.staged):
            infos = self.transport.messages(worker.index, self.newest.staged)
            self.transport.acquire(worker.index, self.newest.staged)
            worker.owed = False
            (worker.fetch if worker.is_remote else worker.load)(self.newest, infos)

    def on_ready(self, worker: Worker) -> None:
        """Connect a worker that was started again, and send it the weights; the first are connected all together."""
        if self._are_connected:
            worker.process.send(Connect(self.transport.init_info(worker.index)))
        worker.owed = self.newest is not None
        self._send_owed(worker)

    def on_fetched(self, worker: Worker) -> None:
        """Have a worker load the weights that have come to its machine, also if there are newer ones: it has these."""
        worker.load(worker.loading, self.transport.messages(worker.index, worker.loading.staged))

    def on_gone(self, worker: Worker, version: int) -> None:
        """Have a worker fetch the newest weights, if it still fetches a version that is gone."""
        if worker.loading is not None and version == worker.loading.version > worker.sent_version:
            self.transport.release(worker.index, worker.loaded().staged)
            worker.owed = True
            self._send_owed(worker)

    def on_receiving(self, worker: Worker) -> None:
        """Send the weights that a worker waits for."""
        self.transport.send(worker.index, worker.loading.staged)

    def on_updated(self, worker: Worker) -> None:
        """Give back the buffer that a worker has loaded, and send what it is owed."""
        self.transport.release(worker.index, worker.loaded().staged)
        worker.owed = worker.owed and (worker.stands or worker.is_behind(self.newest, self.refresh_lag))
        self._send_owed(worker)

    def on_death(self, worker: Worker) -> None:
        """Give back what joined a dead worker to the trainer."""
        self.transport.drop(worker.index)
        if worker.loading is not None:
            self.transport.release(worker.index, worker.loaded().staged)
