"""The controller: hands tickets to rollout workers, takes groups in, announces weights, and keeps the workers alive.

It lives in the process of local trainer rank 0, and the ticket queue with it. The workers' reading threads and the
trainer's thread meet at one condition, which guards all state.
"""

from collections.abc import Callable, Collection, Iterable

import numpy as np
from torch import Tensor

from asyncrl.config import Config
from asyncrl.controller.announcements import Announcements
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.cut import ControllerState, cut, restore
from asyncrl.controller.dispatcher import Dispatcher
from asyncrl.controller.evaluation import Evaluations, evaluation_metrics
from asyncrl.controller.journal import Journal
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.waiting import Changes
from asyncrl.controller.workers import Disbelieved, Worker, Workers
from asyncrl.messages import (
    Asleep,
    Fetched,
    Finished,
    HoldReason,
    InFlight,
    Probed,
    Ready,
    Receiving,
    Stopped,
    Updated,
    Waiting,
)
from asyncrl.records import Group, Ticket, Trajectory
from asyncrl.runlog.metrics import RolloutReport
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.weights.transport import Announcement, Staged


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
        restored: ControllerState | None = None,
    ):
        """`record(event, **fields)` writes an event, `clock` is told what `take_batch` waits for, `num_nodes` share
        the groups of a step, and a run that is resumed goes on from `restored`."""
        self.config, self.workers, self.tickets = config, workers, tickets
        self.clock = clock or TrainerClock()
        self.buffer = SampleBuffer(config.of_node(num_nodes))
        self.dispatcher = Dispatcher(config, workers, self.buffer, tickets)
        self.announcements = Announcements(workers, config.swarm.refresh_lag)
        self.evaluations = Evaluations()
        self.journal = Journal(record)
        self._changed = Changes(config.timeout_s, workers, self.announcements, self.dispatcher.describe)
        self._stopping = False
        self.is_asked_to_stop = False
        """Whether batches and evaluations are waited for only while there is a worker."""
        if restored is not None:
            restore(restored, self.dispatcher, self.evaluations)

    # Life of the workers

    def launch(self) -> None:
        """Start all workers; returns at once."""
        with self._changed:
            for index in range(self.workers.num_workers):
                self.journal.started(index)
            self.workers.launch(self.on_message, self._changed.on_thread_ended)

    def wait_until_ready(self) -> None:
        """Wait until all engines are up. Raises WorkerDied, with its last log lines, if one ends or takes too long."""
        with self._changed:
            self._changed.wait_until(lambda: not self.workers.starting, "workers to start")

    def connect(self, transport) -> None:
        """Give the engines the weight transport, when all are up."""
        self.wait_until_ready()
        with self._changed:
            self.announcements.connect(transport)

    def let_in(self, process, machine: str, scores_probe: bool) -> Worker:
        """Make a worker of an engine of a machine that has joined; its messages come by `on_message`."""
        with self._changed:
            worker = self.workers.join(process, scores_probe)
            self.journal.record("worker_started", worker=worker.index, attempt=0, machine=machine)
            return worker

    def end_leases(self) -> None:
        """Issue again the tickets that machines which have joined have had for too long."""
        with self._changed:
            for ticket in list(self.dispatcher.leases.end()):
                self._issue_again(ticket, self.tickets.elsewhere(ticket))
            self._fill()

    def fetch_anew(self, worker: Worker, version: int) -> None:
        """Have a worker fetch the newest weights in place of a version that is gone."""
        with self._changed:
            self.announcements.on_gone(worker, version)

    def on_message(self, worker: Worker, message) -> None:
        """Act on a worker's message, or, if it is None, on its death; called by the worker's reading thread."""
        with self._changed:
            self._changed.notify_all()  # now, as this may raise; they wait for the lock all the same
            match message:
                case None:
                    self._on_death(worker)
                case Disbelieved():
                    self.dispatcher.shut_out([worker.index])
                    self._on_death(worker)
                case Ready(startup_s):
                    worker.state = "sampling"
                    self.journal.record("worker_ready", worker=worker.index, startup_s=startup_s)
                    self.announcements.on_ready(worker)
                case Finished(trajectories, activity):
                    self.journal.active(worker.index, activity)
                    for trajectory in self.dispatcher.take_back(worker, trajectories):
                        self._on_trajectory(trajectory)
                    self.dispatcher.drop_expired()
                    if self.dispatcher.leases.are_due():
                        self.end_leases()
                case Waiting(ticket_ids):
                    self.dispatcher.at_barrier.update(ticket_ids)
                case Fetched():
                    self.announcements.on_fetched(worker)
                case Receiving():
                    self.announcements.on_receiving(worker)
                case Updated():
                    self.journal.updated(worker.index, message, worker.loading.made_at)
                    self.buffer.count_discarded(message.sampled.discarded)
                    self.announcements.on_updated(worker)
                case Asleep():
                    worker.state = "asleep"
                case Probed(version, logprobs):
                    self.journal.probed(worker.index, version, logprobs)
                case InFlight():
                    worker.answer(message)
                case Stopped(activity):
                    self.journal.active(worker.index, activity)
            self._fill()

    def _on_death(self, worker: Worker) -> None:
        """Issue a dead worker's tickets again and start it anew, or end the run."""
        if self._stopping:
            return
        self.journal.lost(worker.index)
        self.announcements.on_death(worker)
        self.workers.replace(worker)
        exit_code, tickets = worker.process.exit_code, len(worker.running)
        self.journal.record("worker_died", worker=worker.index, exit_code=exit_code, tickets=tickets)
        if not worker.is_remote:
            self.journal.started(worker.index)
        make_again = self.tickets.elsewhere if worker.is_remote else self.tickets.again
        for ticket in sorted(worker.awaited, key=lambda t: t.ticket_id, reverse=True):
            self._issue_again(ticket, make_again(ticket))

    def _issue_again(self, ticket: Ticket, again: Ticket) -> None:
        if ticket.is_evaluation:
            self.evaluations.running.issue_again(ticket, again)
        if ticket.is_evaluation or self.buffer.is_running(ticket.group_id):  # else dropped, or finished without it
            self.dispatcher.queue.put_first([again])

    def _on_trajectory(self, trajectory: Trajectory) -> None:
        self.workers.have_worked = True
        self.journal.trajectory(trajectory)
        if not trajectory.is_evaluation:
            self.dispatcher.add(trajectory)
        elif ended := self.evaluations.add(trajectory):
            self.journal.record("evaluation", version=ended.version, accuracy=ended.accuracy())
            if deferred := self.announcements.take_deferred():
                self._announce(deferred)

    def _fill(self) -> None:
        """Start what can start, nothing before the first weights are announced, and tell idle workers why they are."""
        why_full: HoldReason = "weights"
        if self.announcements.newest is not None:
            self.dispatcher.fill()
            why_full = "bound" if self.announcements.deferred is None else "evaluation"
        self.dispatcher.hold_idle(why_full)
        self.announcements.catch_up()

    # Batches

    def take_batch(self) -> list[Group]:
        """Wait for the next batch and consume it. Raises as `hold_batch`."""
        self.hold_batch()
        return self.consume_batch()

    def take_batch_if_ready(self) -> list[Group] | None:
        """Consume the next batch of groups, or return None while it must be waited for."""
        with self._changed:
            return self.consume_batch() if self.hold_batch_if_ready() else None

    def hold_batch(self) -> list[Group]:
        """Wait for the next batch and hold it, unless one is held. It is then consumed or refused.

        Returns its groups, none if the run is asked to stop and has no worker. Raises what ended rollout, RuntimeError
        if none comes or can come.
        """
        what = "a batch of groups with unequal rewards" if self.config.drop_zero_variance else "a batch"
        with self._changed:
            is_over = lambda: self.buffer.held or self.hold_batch_if_ready() or self._is_left_alone()  # noqa: E731
            self._changed.wait_until(is_over, what, self._can_get_batch)
            return self.buffer.held

    def _is_left_alone(self) -> bool:
        """Whether the run is asked to stop, and no worker is there that could finish the step."""
        return self.is_asked_to_stop and not any(self.workers)

    def hold_batch_if_ready(self) -> list[Group] | None:
        """Hold the next batch of groups, or return None while it must be waited for."""
        with self._changed:
            # An evaluation that holds published weights back is what is waited for: it keeps places taken.
            self.clock.enter("wait" if self.announcements.deferred is None else "evaluate")
            return self.dispatcher.hold_batch()

    def refuse_batch(self, workers: Collection[int]) -> bool:
        """Drop all groups of workers that are not believed.

        If the held batch has one of them, it is put back, and another one is to be waited for. Returns whether it was.
        """
        with self._changed:
            is_refused = self.dispatcher.refuse_batch(workers)
            self._fill()
            return is_refused

    def consume_batch(self) -> list[Group]:
        """Consume the batch that is held: it is trained on now. Returns its groups."""
        with self._changed:
            batch = self.dispatcher.consume_batch()
            self.dispatcher.drop_expired()
            if self.config.over_sampling > 1 and self.evaluations.running is None:  # which no update may end
                self.workers.suspend()
            self._fill()
            if self.config.colocate == "sleep":
                self._put_to_sleep()
            return batch

    def _can_get_batch(self) -> bool:
        """Whether something runs or may start that can give the next batch before the next weights."""
        weights = self.announcements
        return weights.newest is None or weights.deferred is not None or self.dispatcher.can_go_on()

    def _put_to_sleep(self) -> None:
        """Have all engines give up their memory until the next update; an evaluation ends first."""
        if self.evaluations.running is not None:
            self.finish_evaluations()
            self.clock.enter("wait")
        self._changed.wait_until(self.workers.fall_asleep, "engines to fall asleep")

    # Weights and evaluation

    def stage(self, version: int, parameters: Iterable[tuple[str, Tensor]]) -> Staged:
        """Copy weights into a buffer of the transport that no worker reads, when there is one."""
        transport = self.announcements.transport
        if not transport.keeps_announced and self.evaluations.running is not None:
            self.finish_evaluations()  # a worker that dies needs its weights again
            self.clock.enter("publish")
        with self._changed:
            self._changed.wait_until(transport.reserve, "a free weight buffer")
        return transport.stage(version, parameters)

    def withdraw(self) -> bool:
        """Take back an announcement that still waits for an evaluation to end, so that its buffer may be written.

        Returns whether an evaluation was to follow it: the next announcement must ask for it again.
        """
        with self._changed:
            deferred = self.announcements.take_deferred()
        return deferred is not None and deferred.evaluate

    def publish(self, announcement: Announcement) -> None:
        """Have all workers load these weights, at once or when the evaluation that runs, of one version, has ended."""
        with self._changed:
            self._changed.notify_all()
            if self.evaluations.running is None:
                self._announce(announcement)
            else:
                self.announcements.deferred = announcement

    def _announce(self, announcement: Announcement) -> None:
        self.announcements.announce(announcement)
        self.buffer.publish(announcement.trainer_version)
        self.dispatcher.drop_expired()
        tickets = self.tickets.for_evaluation(announcement.version) if announcement.evaluate else []
        if tickets:  # of several nodes the first alone evaluates
            self.evaluations.start(announcement.version, tickets)
            self.dispatcher.queue.put_first(tickets)
        self._fill()

    def finish_evaluations(self) -> None:
        """Wait until no evaluation runs, nor weights wait for one, or no worker is there and the run is to stop."""
        self.clock.enter("evaluate")
        with self._changed:
            is_over = lambda: self.evaluations.running is None or self._is_left_alone()  # noqa: E731
            self._changed.wait_until(is_over, "an evaluation")

    def cut(self, measure: Callable[[], dict[str, int]] = dict) -> ControllerState:
        """Take all that a resumed run needs of this node's rollout, as of one instant between `publish` and
        `take_batch`, in which `measure()` gives the lengths of its records; sampling goes on."""
        with self._changed:
            return cut(self._changed, self.dispatcher, self.announcements, self.evaluations, measure)

    # What was measured

    def take_report(self) -> RolloutReport:
        """Take what was measured since the last call, and the ledger."""
        with self._changed:
            self.workers.check()  # what ended a reading thread is the reason if the ledger does not balance
            return self.journal.take_report(self.buffer.ledger(), self.workers.num_restarts)

    def take_probes(self) -> dict[int, dict[int, tuple[np.ndarray, ...]]]:
        """Take the engines' log-probs of the probe by version and worker, as far as they have come since."""
        with self._changed:
            return self.journal.take_probes()

    def take_evaluation(self) -> dict[str, float]:
        """Take the metrics of the newest evaluation that ended since the last call, if any did."""
        with self._changed:
            return evaluation_metrics(self.evaluations.take_ended())

    def stop(self) -> None:
        """End all workers and their engines; none is left when this returns."""
        with self._changed:
            self._stopping = True
        try:
            self.workers.stop()
        finally:
            self.journal.close()
            self.announcements.transport.close()
