"""The fake worker and the real Workers in a random walk, whose oracle sees what a worker is sent."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import get_args

from fake_worker import FakeWorker

from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import (
    Abort,
    Connect,
    Idle,
    IdleReason,
    LoadWeights,
    Receiving,
    ReportProgress,
    Sleep,
    Suspend,
    Tickets,
)


class WatchedWorker(FakeWorker):
    """Stands where WorkerProcess does: the walk chooses its events, and checks what it is sent."""

    merged_share = 0.5

    def __init__(self, config, index, walk):
        """`walk` has rng, failure_share and the transport, and is told what is sent."""
        super().__init__(config, index)
        self.walk, self.failure_share = walk, walk.failure_share
        self.reading, self.started_at, self.exit_code = Future(), time.monotonic(), None
        self.is_connected, self.num_announced = False, 0
        """Whether it knows the transport; and how many versions had been announced when it was sent weights last."""
        self.newest = None
        """Message that was sent to it last."""
        self.is_told = False
        """Whether it knows why it has had no ticket since the last one."""
        self.is_suspended = False
        """Whether it was told to stop until the next update."""
        self.sent_version = -1
        """Version of the newest update sent to it."""
        self.is_receiving = False
        """Whether it waits for weights to be sent."""
        self.lapsed = set()
        """Tickets that were taken from it, as it had them for too long."""
        self.given, self.aborted = {}, set()
        """Tickets that have not been delivered, by id, and ids of those that it was told to abort."""

    # What the controller calls

    def send(self, message):
        super().send(message)
        oracle, previous, self.newest = self.walk.oracle, self.newest, message
        match message:
            case ReportProgress():
                assert oracle.continues_responses, "responses are sampled again by their seeds"
                self.newest = previous
            case Idle(reason):
                assert message != previous, "a worker is told once why it has no ticket"
                assert not self.given, "and none that has one"
                self.is_told = True
                assert reason in (*get_args(IdleReason), "round")
                has_weights = oracle.announced >= 0 and not oracle.is_resuming
                assert has_weights or reason in ("weights", "version")
                assert reason != "weights" or not has_weights
                assert reason != "evaluation" or oracle.evaluating
            case Connect():
                assert not self.is_connected
                self.is_connected = True
            case LoadWeights(version, infos):
                assert self.is_connected
                if "buffer" in infos[0]:
                    assert oracle.num_announced > self.num_announced, "weights are sent twice"
                    self.num_announced = oracle.num_announced
                self.sent_version, self.is_suspended = version, False
            case Suspend() | Sleep():
                self.is_suspended = True
            case Tickets(tickets):
                self.is_told = False
                self.given |= {ticket.ticket_id: ticket for ticket in tickets}
                oracle.given(tickets, self.sent_version)
                if self.config.scheduling == "batch":
                    self._check_round()
            case proceed if type(proceed).__name__ == "Proceed":  # of extras/baselines.py
                assert all(map(self._waits, self.given.values())), "a barrier opens for some"
            case Abort(ticket_ids):
                self.aborted.update(ticket_ids)

    def stop(self, timeout_s=0): ...

    def death_line(self):
        return f"worker {self.index} was killed"

    def death_report(self):
        return f"{self.death_line()}; it"

    # Events

    def events(self):
        if self.exit_code is None:
            yield from super().events()

    def die(self):
        self.exit_code, self.owes_progress = -9, False
        self.outbox.append(None)

    def read(self):
        message = self.inbox[0]
        super().read()
        if isinstance(message, LoadWeights) and self.walk.transport.sends:
            self.is_receiving = "buffer" in message.update_infos[0]
            if self.is_receiving:
                self.outbox.append(Receiving())

    def may_load(self):
        return super().may_load() and not self.is_receiving

    def load(self):
        """Finish loading; the buffer must still hold what it held."""
        (info,) = self.loading.update_infos
        is_here = "buffer" in info
        held = self.walk.transport.versions[info["buffer"]] if is_here else info["version"]
        assert held == self.loading.version, "a buffer was overwritten while read"
        super().load()

    def go_on(self):
        self.move(self.walk.rng.choice(self.movable()))

    # What holds of a barrier

    def _check_round(self):
        """Groups are dealt out in advance, and none of the next round before all of one have come back."""
        walk, rounds = self.walk, set()
        for worker in walk.controller.workers:
            for ticket in worker.process.given.values():
                if not ticket.is_evaluation:
                    assert ticket.group_id % walk.num_workers == worker.index
                    rounds.add(walk.oracle.groups[ticket.group_id].issued_at)
        assert len(rounds) <= 1, "a round begins in the middle of another"

    def _waits(self, ticket):
        """Whether what is trained on of a ticket is at the barrier, or given up there."""
        states = {episode.state for episode in self.episodes.get(ticket.ticket_id, ())}
        is_given_up = ticket.ticket_id in self.aborted
        return is_given_up or ticket.is_evaluation or "barrier" in states <= {"barrier", "ended"}


class WithoutProcesses:
    """For a kind of Workers: its processes are not started."""

    def __init__(self, walk, config, placement):
        super().__init__(config, placement, "", Path(), main=None)
        self.walk = walk

    def _start(self, index, num_restarts_since_ticket=0):
        process = WatchedWorker(self.config, index, self.walk)
        return Worker(index, process=process, num_restarts_since_ticket=num_restarts_since_ticket)


class WalkWorkers(WithoutProcesses, Workers):
    """The real Workers, with processes that are not started."""
