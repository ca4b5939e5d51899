"""Announcements: the newest weights, and the weights that each worker has, loads and needs."""

from collections.abc import Iterable

from asyncrl.controller.workers import Worker
from asyncrl.weights.transport import Announcement, Transport


class Announcements:
    """Brings announced weights to the workers.

    A worker loads one version at a time. Of the versions announced meanwhile it gets the newest. The controller calls
    all methods under its lock.
    """

    def __init__(self, workers: Iterable[Worker]):
        self.workers = workers
        self.transport = Transport()
        """Transport of weights to the workers of this node. It does nothing until `connect`."""
        self._are_connected = False
        self.newest: Announcement | None = None
        """Weights that workers must load."""
        self.deferred: Announcement | None = None
        """Weights that wait for the running evaluation to end; newer weights replace them."""

    def connect(self, transport: Transport) -> None:
        """Give the engines the weight transport, when all are up."""
        self.transport, self._are_connected = transport, True
        # on_ready connects one that has just died
        for worker in filter(lambda worker: worker.is_up, self.workers):
            worker.connect(transport)

    def take_deferred(self) -> Announcement | None:
        """Return the weights that wait, if any, and forget them."""
        deferred, self.deferred = self.deferred, None
        return deferred

    def announce(self, announcement: Announcement) -> None:
        """Make all workers load these weights: at once, or when they are up and have loaded older weights.

        A delayed version may be announced twice. The second time it wakes workers that were suspended while they
        loaded it.
        """
        self.newest = announcement
        self.transport.announce(announcement.staged)
        for worker in self.workers:
            worker.needs_update = worker.is_paused or worker.is_behind(self.newest)
            if worker.is_up and worker.loading is None:
                self.send_pending_update(worker)

    def send_pending_update(self, worker: Worker) -> None:
        """Send a worker the newest weights if it needs them. If their buffer is being overwritten, it waits for the
        next weights."""
        if worker.needs_update and worker.can_load(self.newest):
            worker.needs_update = False
            worker.load(self.newest)

    def on_ready(self, worker: Worker) -> None:
        """Connect a restarted worker, and send it the weights. `connect` connects the first workers."""
        if self._are_connected:
            worker.connect(self.transport)
        worker.needs_update = self.newest is not None
        self.send_pending_update(worker)

    def on_updated(self, worker: Worker) -> None:
        """Free the buffer that a worker has loaded, and send newer weights if it needs them."""
        worker.finish_loading()
        worker.needs_update = worker.needs_update and (
            worker.is_paused or worker.is_behind(self.newest)
        )
        self.send_pending_update(worker)
