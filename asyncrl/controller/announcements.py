"""Announcements: which weights each worker must load, and when.

asyncrl/job/publisher.py lists all calls. `Transport.make_readable` only marks the buffer that workers can read.
`Worker.load` sends the message.
"""

from collections.abc import Iterable

from asyncrl.controller.workers import Worker
from asyncrl.weights.transport import Announcement, Transport


class Announcements:
    """Brings announced weights to the workers.

    A worker loads one version at a time. Then it gets the newest of the versions announced meanwhile. The controller
    calls all methods under its lock.
    """

    def __init__(self, workers: Iterable[Worker]):
        self.workers = workers
        self.transport = Transport()
        """Transport of weights to the workers of this node. It sends no weights until `connect`."""
        self._are_connected = False
        self.newest: Announcement | None = None
        """Weights that workers must load."""
        self.deferred: Announcement | None = None
        """Weights that wait for the running evaluation. Newer weights replace them."""

    def connect(self, transport: Transport) -> None:
        """Connect all engines that are up to the weight transport."""
        self.transport, self._are_connected = transport, True
        # on_ready connects a worker that is starting
        for worker in self.workers:
            if worker.is_up:
                worker.connect(transport)

    def take_deferred(self) -> Announcement | None:
        """Return the weights that wait for an evaluation, if any, and forget them."""
        deferred, self.deferred = self.deferred, None
        return deferred

    def send_to_workers(self, announcement: Announcement) -> None:
        """Make all workers load these weights: at once, or when they are up and have loaded older weights.

        With publish_delay K, version 0 is announced K + 1 times, because each announcement frees places. A worker that
        has it loads it again only if it is paused, because only new weights end a pause.
        """
        self.newest = announcement
        self.transport.make_readable(announcement.staged)
        for worker in self.workers:
            worker.needs_update = worker.is_paused or worker.is_behind(self.newest)
            self.send_pending_update(worker)

    def send_pending_update(self, worker: Worker) -> None:
        """Send a worker the newest weights if it needs them, is up and loads no others.

        If newer weights are being written into their buffer, the worker waits for them.
        """
        is_free = worker.is_up and worker.loading is None
        if is_free and worker.needs_update and worker.can_load(self.newest):
            worker.needs_update = False
            worker.load(self.newest)

    def on_ready(self, worker: Worker) -> None:
        """Connect a worker that has started, and send it the newest weights."""
        if self._are_connected:
            worker.connect(self.transport)
        worker.needs_update = self.newest is not None
        self.send_pending_update(worker)

    def on_loaded(self, worker: Worker) -> None:
        """Free the buffer that a worker has loaded, and send newer weights if it needs them."""
        worker.finish_loading()
        worker.needs_update = worker.needs_update and (
            worker.is_paused or worker.is_behind(self.newest)
        )
        self.send_pending_update(worker)
