"""The controller: hands tickets to rollout workers, gathers groups, announces weights, and keeps the workers alive.

It lives in the process of local trainer rank 0, and the ticket queue with it. The workers' reading threads and the
trainer's thread meet at one condition, which guards all state.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from config import Config
from controller.buffer import SampleBuffer
from controller.dispatcher import Dispatcher
from controller.evaluation import Evaluations, evaluation_metrics
from controller.journal import RolloutRecords
from controller.tickets import TicketSource
from controller.workers import Worker, Workers
from data.messages import (
    Asleep,
    Connect,
    Finished,
    HoldReason,
    Probed,
    Ready,
    Receiving,
    Sleep,
    Stopped,
    Suspend,
    Update,
    Updated,
    Waiting,
)
from data.records import Group, Ticket, Trajectory
from records.metrics import RolloutReport
from records.time_ledger import TrainerClock
from weights.transport import Announcement


class Controller:
    """Runs rollout on one node: start, take batches, publish, evaluate, stop."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        tickets: TicketSource,
        record: Callable[..., None],
        clock: TrainerClock | None = None,
        num_nodes: int = 1,
    ):
        """`record(event, **fields)` writes an event, `clock` is told what `take_batch` waits for, and `num_nodes` share
        the groups of a step."""
        self.config, self.workers, self.tickets = config, workers, tickets
        self.clock = clock or TrainerClock()
        self.transport = None
        self.buffer = SampleBuffer(config.bounds(num_nodes))
        self._changed = threading.Condition()
        self.dispatcher = Dispatcher(config, self.workers, self.buffer, tickets)
        self.evaluations = Evaluations()
        self.records = RolloutRecords(record)
        self._announced: Announcement | None = None
        self._stopping = False

    # Life of the workers

    def launch(self) -> None:
        """Start all workers; returns at once."""
        with self._changed:
            for index in range(self.workers.num_workers):
                self.records.started(index)
            self.workers.launch(self.on_message, self._on_thread_ended)

    def wait_until_ready(self) -> None:
        """Wait until all engines are up.

        Raises WorkerDied, with the worker's last log lines, if one ends or is not ready within the startup timeout.
        """
        with self._changed:
            self._wait(lambda: not self.workers.starting, self.config.timeout_s, "workers to start")

    def connect(self, transport) -> None:
        """Give the engines the weight transport, when all are up."""
        self.wait_until_ready()
        with self._changed:
            self.transport = transport
            for worker in self.workers:
                worker.process.send(Connect(transport.init_info(worker.index)))

    def _on_thread_ended(self, _) -> None:
        with self._changed:
            self._changed.notify_all()

    def on_message(self, worker: Worker, message) -> None:
        """Act on a worker's message, or on its death; called by the worker's reading thread."""
        with self._changed:
            try:
                if message is None:
                    self._on_death(worker)
                else:
                    self._act_on(worker, message)
                self._fill()
            finally:
                self._changed.notify_all()

    def _act_on(self, worker: Worker, message) -> None:
        match message:
            case Ready(startup_s):
                worker.ready = True
                self.records.ready(worker.index, startup_s)
                if self.transport is not None:  # a restart: the first ones are connected all together
                    worker.process.send(Connect(self.transport.init_info(worker.index)))
                if self._announced is not None:
                    self._send_update(worker)
            case Finished(trajectories, activity):
                if activity is not None:
                    self.records.active(worker.index, activity)
                for ticket_id in {trajectory.ticket_id for trajectory in trajectories}:
                    worker.take_back(ticket_id)
                for trajectory in trajectories:
                    self._on_trajectory(trajectory)
                self.dispatcher.drop_expired()
            case Waiting(ticket_ids):
                self.dispatcher.arrive_at_barrier(ticket_ids)
            case Receiving():
                self.transport.send(worker.index, worker.updating)
            case Asleep():
                worker.asleep = True
            case Probed(version, logprobs):
                self.records.probed(version, logprobs)
            case Updated():
                self._on_updated(worker, message)
            case Stopped(activity):
                self.records.active(worker.index, activity)

    def _on_updated(self, worker: Worker, message: Updated) -> None:
        if message.activity is not None:
            self.records.active(worker.index, message.activity)
        self.records.updated(worker.index, message)
        self.buffer.count_discarded(message.sampled.discarded)
        self.transport.release(worker.updating)
        worker.updating = None
        if worker.owed:
            self._send_update(worker)

    def _on_death(self, worker: Worker) -> None:
        """Issue a dead worker's tickets again and start it anew, or end the run."""
        if self._stopping:
            return
        self.records.lost(worker.index)
        if self.transport is not None:
            self.transport.drop(worker.index)
        if worker.updating is not None:
            self.transport.release(worker.updating)
        self.workers.replace(worker)
        self.records.died(worker.index, worker.process.exit_code, len(worker.running))
        self.records.started(worker.index)
        for ticket in sorted(worker.running.values(), key=lambda t: t.ticket_id, reverse=True):
            self._issue_again(ticket)

    def _fill(self) -> None:
        """Start what can start, nothing before the first weights are announced, and tell idle workers why they are."""
        why_full: HoldReason = "weights"
        if self._announced is not None:
            self.dispatcher.fill()
            why_full = "bound" if self.evaluations.deferred is None else "evaluation"
        self.dispatcher.hold_idle(why_full)

    def _issue_again(self, ticket: Ticket) -> None:
        again = self.tickets.again(ticket)
        if ticket.is_evaluation:
            self.evaluations.running.issue_again(ticket, again)
        elif not self.buffer.is_running(ticket.group_id):
            return  # its group was dropped or finished without it
        self.dispatcher.queue.put_first([again])

    def _on_trajectory(self, trajectory: Trajectory) -> None:
        self.workers.have_worked = True
        self.records.trajectory(trajectory)
        if trajectory.is_evaluation:
            self._on_evaluated(trajectory)
        else:
            self.dispatcher.add(trajectory)

    def _on_evaluated(self, trajectory: Trajectory) -> None:
        ended = self.evaluations.add(trajectory)
        if ended is None:
            return
        self.records.evaluated(ended)
        deferred = self.evaluations.take_deferred()
        if deferred is not None:
            self._announce(deferred)

    # Batches

    def take_batch(self) -> list[Group]:
        """Wait for the next batch of groups and take it.

        Raises the error that ended rollout, or RuntimeError after the rollout timeout, with all stacks dumped, or at
        once if no batch can come.
        """
        what = "a batch of groups with unequal rewards" if self.config.drop_zero_variance else "a batch"
        with self._changed:
            return self._wait(self.take_batch_if_ready, self.config.timeout_s, what, self._can_get_batch)

    def take_batch_if_ready(self) -> list[Group] | None:
        """Take the next batch of groups, or return None while it must be waited for.

        An evaluation that holds back weights which were published keeps places taken, and is what is waited for.
        """
        with self._changed:
            self.clock.enter("wait" if self.evaluations.deferred is None else "evaluate")
            batch = self.dispatcher.take_batch()
            if batch is None:
                return None
            self.workers.restarts_since_batch = 0
            self.dispatcher.drop_expired()
            self._suspend_rest()
            self._fill()
            if self.config.colocate == "sleep":
                self._put_to_sleep()
            return batch

    def _can_get_batch(self) -> bool:
        """Whether something runs or may start that can give the next batch, with no more weights from its caller.

        What a worker holds that was told to stand does not count: only weights yet to be published wake it.
        """
        if self._announced is None or self.evaluations.deferred is not None or self.buffer.num_free_places() > 0:
            return True
        active = [w for w in self.workers if not w.ready or w.updating is not None or not w.stands]
        if active and self.dispatcher.queue.has_training_tickets:
            return True
        return any(not ticket.is_evaluation for w in active for ticket in w.running.values())

    def _suspend_rest(self) -> None:
        """With over-sampling, stop what runs until the next update; not in an evaluation, which no update may end."""
        if self.config.over_sampling > 1 and self.evaluations.running is None:
            for worker in self.workers:
                if worker.ready:
                    worker.stands = True
                    worker.process.send(Suspend())

    def _put_to_sleep(self) -> None:
        """Have all engines give up their memory until the next update; an evaluation ends first."""
        timeout_s = self.config.timeout_s
        if self.evaluations.running is not None:
            self.clock.enter("evaluate")
            self._wait(lambda: self.evaluations.running is None, timeout_s, "an evaluation")
            self.clock.enter("wait")

        def asleep() -> bool:
            for worker in self.workers:  # one that was started again in between is told when it is up
                if worker.ready and not worker.told_to_sleep:
                    worker.stands = worker.told_to_sleep = True
                    worker.process.send(Sleep())
            return all(worker.asleep for worker in self.workers)

        self._wait(asleep, timeout_s, "engines to fall asleep")

    def _wait(
        self, done: Callable[[], Any], timeout_s: float, what: str, can_come: Callable[[], bool] = lambda: True
    ) -> Any:
        """Wait until `done()`, which is asked after every change, and return what it gives; the caller holds the lock.

        The start of a worker has a timeout of its own and does not count. Raises RuntimeError after the timeout, and
        without it once `can_come()` says that the wait is in vain.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.workers.check()
            self._check_transport()
            if result := done():
                return result
            is_in_vain = not can_come()
            if not self._changed.wait(timeout=1.0) and is_in_vain:  # else a thread that failed has just said why
                raise RuntimeError(
                    f"{what} can never come: nothing runs, and nothing may start before the next weights are "
                    f"published; state: {self.describe()}"
                )
            if time.monotonic() > deadline and not self.workers.starting:
                self.workers.dump_stacks()
                raise RuntimeError(
                    f"waited {timeout_s:.0f} s for {what}; stacks of the workers are in their logs, worker_*.log; "
                    f"state: {self.describe()}"
                )

    def _check_transport(self) -> None:
        """Raise what went wrong in the background; with all stacks dumped if something takes too long."""
        if self.transport is None:
            return
        try:
            self.transport.check()
        except TimeoutError as error:
            self.workers.dump_stacks()
            raise RuntimeError(f"{error}; stacks of the workers are in their logs; state: {self.describe()}") from None

    def describe(self) -> str:
        """One line on what every worker does and where the groups are."""
        workers = ", ".join(worker.describe() for worker in self.workers)
        return f"{workers}; {len(self.dispatcher.queue)} tickets queued; {self.buffer.ledger()}"

    # Weights and evaluation

    def wait_for_buffer(self) -> None:
        """Wait until weights can be staged: until no worker reads one of the transport's buffers."""
        with self._changed:
            timeout_s = self.config.timeout_s
            self._wait(lambda: self.transport.free_buffer() is not None, timeout_s, "a free weight buffer")

    def withdraw(self) -> bool:
        """Take back an announcement that still waits for an evaluation to end, so that its buffer may be written.

        Returns whether an evaluation was to follow it: the next announcement must ask for it again.
        """
        with self._changed:
            deferred = self.evaluations.take_deferred()
            return deferred is not None and deferred.evaluate

    def publish(self, announcement: Announcement) -> None:
        """Have all workers load these weights, at once or when the running evaluation has ended.

        An evaluation is pinned to its version, so no worker may move on before its last response; training goes on
        meanwhile with the groups there are.
        """
        with self._changed:
            if self.evaluations.running is not None:
                self.evaluations.deferred = announcement
            else:
                self._announce(announcement)
            self._changed.notify_all()

    def _announce(self, announcement: Announcement) -> None:
        self._announced = announcement
        self.transport.announce(announcement.staged)
        for worker in self.workers:
            # A late version may come twice, and must wake also a worker that was told to stand while it loads it.
            worker.owed = worker.sent_version < announcement.version or worker.stands
            if worker.ready and worker.updating is None and worker.owed:
                self._send_update(worker)
        self.buffer.publish(announcement.trainer_version)
        self.dispatcher.drop_expired()
        if announcement.evaluate:
            self._start_evaluation(announcement.version)
        self._fill()

    def _start_evaluation(self, version: int) -> None:
        tickets = self.tickets.for_evaluation(version)
        if tickets:  # of several nodes the first alone evaluates
            self.evaluations.start(version, tickets)
            self.dispatcher.queue.put_first(tickets)

    def _send_update(self, worker: Worker) -> None:
        """Send the announced weights. Only worker 0 scores the probe: all load the same bytes."""
        probe = self._announced.probe if worker.index == 0 else ()
        worker.updating = self._announced.staged
        worker.sent_version = self._announced.version
        worker.owed = worker.stands = worker.told_to_sleep = worker.asleep = False
        self.transport.acquire(worker.updating)
        worker.process.send(Update(worker.sent_version, worker.updating.messages, probe))

    def finish_evaluations(self) -> None:
        """Wait until no evaluation is running or to come."""
        self.clock.enter("evaluate")
        with self._changed:
            self._wait(lambda: self.evaluations.is_idle, self.config.timeout_s, "an evaluation")

    # Records

    def take_report(self) -> RolloutReport:
        """What was measured since the last call, and the ledger."""
        with self._changed:
            self.workers.check()  # what ended a reading thread is the reason if the ledger does not balance
            return self.records.take_report(self.buffer.ledger(), self.workers.num_restarts)

    def take_probes(self) -> dict[int, tuple[np.ndarray, ...]]:
        """The engines' log-probs of the probe by version, as far as they have come since the last call."""
        with self._changed:
            return self.records.take_probes()

    def take_evaluation(self) -> dict[str, float]:
        """Metrics of the newest evaluation that ended since the last call, or nothing."""
        with self._changed:
            return evaluation_metrics(self.evaluations.take_ended())

    def worker_time(self) -> dict[int, Counter[str]]:
        """Nanoseconds of each worker in each state of WORKER_STATES so far."""
        with self._changed:
            return self.records.worker_time()

    def stop(self) -> None:
        """End all workers and their engines; none is left when this returns."""
        with self._changed:
            self._stopping = True
        try:
            self.workers.stop()
        finally:
            self.records.close()
            if self.transport is not None:
                self.transport.close()
