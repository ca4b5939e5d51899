"""Random walks of the controller of a run that listens: hosts join, leave, are slow and lie (tests/random_walk.py)."""

import math
from dataclasses import replace

from random_walk import CHOICES, IN_CHUNKS, NUM_WALKS, Walk, run_walks
from walk_worker import WatchedWorker, WithoutProcesses

from asyncrl.config import SwarmOptions
from asyncrl.messages import Finished, ReportProgress, WeightsLoaded
from extras.swarm.pull import PullTransport
from extras.swarm.remote import RemoteWorker, SwarmWorkers
from extras.swarm.wire import Fetch, Fetched


class HostWorker(WatchedWorker):
    """An engine of a host that has joined. It fetches weights before it loads them."""

    def __init__(self, config, index, walk):
        super().__init__(config, index, walk)
        self.fetching = None
        """Version that is on its way."""

    def send(self, message):
        assert not isinstance(message, ReportProgress), "a host that joined is not asked"
        super().send(message)

    def events(self):
        yield from super().events()
        if self.exit_code is None and self.fetching is not None:
            yield "fetch", self.fetch

    def read(self):
        message = self.inbox[0]
        super().read()
        if isinstance(message, Fetch):
            assert self.fetching is None and message.version >= self.version
            self.fetching = message.version

    def fetch(self):
        """Weights have come, while it went on, or are gone as too many others still read older ones."""
        version, self.fetching = self.fetching, None
        controller = self.walk.controller
        try:
            controller.pulled.open(version, None)
        except ValueError:
            controller.fetch_anew(controller.workers[self.index], version)
        else:
            self.outbox.append(Fetched(version))


class WalkSwarmWorkers(WithoutProcesses, SwarmWorkers):
    """The real SwarmWorkers, with processes that are not started."""


class SwarmWalk(Walk):
    """A run that listens."""

    choices = CHOICES | {
        "listen": ["here:1"],
        "swarm": [SwarmOptions(refresh_lag=lag) for lag in (0, 0, 1, 2, 4)],
        "replicate_prompts": [True, True, False],
    }
    workers_class = WalkSwarmWorkers
    fewest_workers = 0
    can_snapshot = ("waiting", "holding", "finishing")

    def _prepare(self):
        self.joins_left = self.rng.randint(0, 4)
        self.refusals_left = self.rng.choice([0, 2, 5])
        self.num_buffers = 2  # hosts that join have their own

    def _begin(self, oracle, state):
        super()._begin(oracle, state)
        self.controller.pulled = PullTransport([])

    def _is_alone(self):
        return False

    def _events_of_trainer(self):
        yield from super()._events_of_trainer()
        if self.trainer == "holding":
            num_joined = self.controller.workers.num_joined if self.refusals_left else 0
            for worker in range(self.num_workers, self.num_workers + num_joined):
                yield ("refuse", worker), lambda worker=worker: self._refuse(worker)
        may_join = self.joins_left or not [*self.controller.workers]
        if self.trainer != "connecting" and may_join:
            yield ("join", -1), self._join

    def _events_of_leaving(self):
        for worker in self.controller.workers:
            if not isinstance(worker, RemoteWorker):
                if worker.is_up and worker.process.exit_code is None and self._may_die(worker):
                    yield ("die", worker.index), lambda worker=worker: self._kill(worker)
            elif worker.is_up and worker.process.exit_code is None:
                yield ("die", worker.index), lambda worker=worker: worker.process.die()
                yield ("die", -worker.index), lambda worker=worker: self._shut_out(worker)
                if worker.tickets:
                    yield ("lapse", worker.index), lambda worker=worker: self._end_lease(worker)

    def _join(self):
        self.joins_left = max(0, self.joins_left - 1)
        process = HostWorker(self.config, None, self)
        worker = self.controller.let_in(process, "elsewhere", scores_probe=True)
        process.index = worker.index
        process.start()

    def _shut_out(self, worker):
        worker.process.exit_code, self.oracle.disbelieved = 0, worker.index
        worker.process.outbox.clear()
        self.controller.give_up(worker, is_believed=False)
        self.oracle.shut_out(worker.index)

    def _end_lease(self, worker):
        worker.leases[self.rng.choice(list(worker.tickets))].began_at = -math.inf
        self.controller.move_tickets()

    def _on_message(self, worker, message):
        if isinstance(worker, RemoteWorker) and isinstance(message, Finished | WeightsLoaded):
            message = replace(message, activity=None)  # as the run does with what hosts send
        super()._on_message(worker, message)

    def _refuse(self, worker):
        """What a worker of a host, which may have left, has sent is found to be false."""
        self.refusals_left -= 1
        is_refused = self.oracle.refuse(worker)
        assert self.controller.refuse_batch([worker]) is is_refused
        self.oracle.shut_out(worker)
        self.trainer = "waiting" if is_refused else "holding"
        self.oracle.check_ledger(self.controller.buffer.balance())

    def _stage_elsewhere(self, version):
        self.controller.pulled.stage(version, [])


@IN_CHUNKS
def test_in_any_order_of_events_the_promises_of_a_run_that_listens_hold(chunk):
    run_walks(SwarmWalk, NUM_WALKS // 2, chunk)
