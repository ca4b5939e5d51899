"""The controller sends tickets to rollout workers, receives groups, announces weights and keeps workers alive.

The calls of a ticket and its trajectory are in asyncrl/records.py. Places become free by `announce`, or if a group is
dropped.

Death: `on_message(None)` → `on_death` → `issue_again` → the front of the queue.

Cancellation: `Dispatcher.drop`, or a finished group → `_abort` → `Abort` → worker → an `aborted` trajectory →
`SampleBuffer.count_aborted`. The ticket keeps its slot until the trajectory comes.

It lives in the process of local trainer rank 0. One lock guards all state: the workers' reading threads and the
trainer's thread take it. Every wait has a timeout. A timeout reports the state of all workers.
"""

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from asyncrl.cluster.processes import RolloutEnded
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.config import Config
from asyncrl.controller.announcements import Announcements
from asyncrl.controller.buffer import SampleBuffer
from asyncrl.controller.dispatcher import Dispatcher
from asyncrl.controller.evaluation import Evaluation
from asyncrl.controller.failures import Failures
from asyncrl.controller.journal import Journal
from asyncrl.controller.ledger import ledger_metrics
from asyncrl.controller.snapshot import ControllerState, continues_responses
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import (
    Asleep,
    Finished,
    IdleReason,
    InFlight,
    Probed,
    ProbedVersions,
    Ready,
    Receiving,
    Stopped,
    WeightsLoaded,
)
from asyncrl.records import Group, Trajectory
from asyncrl.runlog.metrics import Mean, Measured
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.weights.transport import Announcement, Staged, Transport, Weights


class Controller:
    """Rollout on one node: start, batches, weights, evaluations, end."""

    buffer_class = SampleBuffer
    dispatcher_class = Dispatcher

    def __init__(
        self,
        config: Config,
        workers: Workers,
        ticket_source: TicketSource,
        record_event: Callable[..., None],
        clock: TimeLedger | None = None,
        num_nodes: int = 1,
        state: ControllerState | None = None,
    ):
        """`record_event(event, **fields)` writes an event. `clock` is the trainer's.

        `num_nodes` nodes share the groups of a step. A resumed run continues from `state`.
        """
        self.config, self.workers, self.ticket_source = config, workers, ticket_source
        self.clock = clock or TimeLedger()
        self.buffer = self.buffer_class(config.for_node(num_nodes))
        self.dispatcher = self.dispatcher_class(config, workers, self.buffer, ticket_source)
        self.announcements = Announcements(workers)
        self.evaluation: Evaluation | None = None
        """Running evaluation; only one runs at a time."""
        self.ended_evaluations: list[Evaluation] = []
        """Evaluations that ended after the last `take_evaluation`."""
        self.journal = Journal(record_event)
        self.lock = threading.Condition()
        """Guards all state, and notifies waiting threads of every change. It is re-entrant."""
        self._stopping = False
        self.is_asked_to_stop = False
        """True if the run must end after this step."""
        self.ended_by: RolloutEnded | None = None
        """Reason why no more groups are admitted. The next wait for a batch raises it, so a running step can finish."""
        self._has_timed_out = False
        if state is not None:
            self._restore(state)

    # Life of the workers

    def launch(self) -> None:
        """Start all workers. Return at once."""
        with self.lock:
            for index in range(self.workers.num_workers):
                self.journal.record_start(index)
            self.workers.launch(self.on_message, self._on_thread_ended)

    def _on_thread_ended(self, _) -> None:
        """Wake waiting threads. They check why a reading thread ended."""
        with self.lock:
            self.lock.notify_all()

    def wait_until_ready(self) -> None:
        """Wait until all engines are up. Raises WorkerDied, with log lines, if an engine ends or takes too long."""
        self.wait_until(lambda: self.ended_by or not self.workers.starting, "workers to start")
        self._check_end()

    def connect(self, transport: Transport) -> None:
        """Wait until all engines are up, and connect them to the weight transport."""
        self.wait_until_ready()
        with self.lock:
            self.announcements.connect(transport)

    def on_message(self, worker: Worker, message) -> None:
        """Act on a worker's message; None is its death. The worker's reading thread calls this."""
        with self.lock:
            # first, because the rest may raise; woken threads wait for the lock
            self.lock.notify_all()
            match message:
                case None:
                    if not self._stopping:
                        with self._noting_end():
                            self.on_death(worker)
                case Ready(startup_s):
                    worker.state = "sampling"
                    self.journal.record_event(
                        "worker_ready", worker=worker.index, startup_s=startup_s
                    )
                    self.announcements.on_ready(worker)
                case Finished(trajectories, activity):
                    self.journal.record_activity(worker.index, activity)
                    for trajectory in self.dispatcher.finish_tickets(worker, trajectories):
                        self._on_trajectory(trajectory)
                    self.dispatcher.drop_expired()
                case Receiving():
                    worker.transport.send(worker.index, worker.loading.staged)
                case WeightsLoaded():
                    self.journal.record_loading(worker.index, message, worker.loading.made_at)
                    self.buffer.ledger.generate(message.sampled.discarded, "discarded")
                    self.announcements.on_loaded(worker)
                case Asleep():
                    worker.state = "asleep"
                case Probed():
                    self.journal.record_probe(worker.index, message)
                case InFlight():
                    worker.owes_progress = False
                    worker.in_flight = message
                case Stopped(activity):
                    self.journal.record_activity(worker.index, activity)
                case _:
                    self.dispatcher.on_message(worker, message)
            self.admit_and_send()

    def on_death(self, worker: Worker) -> None:
        """Start a dead worker again, and issue its tickets again.

        Raises WorkerDied if it must not be started. Its tickets then stay with it, and a snapshot finds them there.
        """
        worker.disconnect()
        lost = worker.awaited
        # from here on another Worker has its index, or no Worker if it was of a joined host
        try:
            self.workers.replace(worker)
        finally:
            self.journal.record_death(worker)  # also the death that ends the run
        if worker.index < self.workers.num_workers:  # no joined host's
            self.journal.record_start(worker.index)
        # each goes to the front of the queue, so the oldest comes last
        for ticket in sorted(lost, key=lambda ticket: ticket.ticket_id, reverse=True):
            # not if its group was dropped or has finished
            if ticket.is_evaluation or self.buffer.is_unfinished(ticket.group_id):
                again = self.ticket_source.issue_again(ticket, worker.counts_as_attempt)
                self.dispatcher.enqueue([again], first=True)

    def _on_trajectory(self, trajectory: Trajectory) -> None:
        self.workers.have_worked = True
        self.journal.record_trajectory(trajectory)
        if not trajectory.is_evaluation:
            with self._noting_end():
                self.dispatcher.add(trajectory)
        elif self.evaluation.add(trajectory):
            self._end_evaluation()

    def _end_evaluation(self) -> None:
        """Record the evaluation whose last trajectory has arrived. Then announce the weights that waited for it."""
        ended, self.evaluation = self.evaluation, None
        self.ended_evaluations.append(ended)
        self.journal.record_event("evaluation", version=ended.version, accuracy=ended.accuracy())
        if ended.failures().is_reported:
            print(f"warning: evaluation of version {ended.version}: {ended.failures()}", flush=True)
        if deferred := self.announcements.take_deferred():
            self.announce(deferred)

    @contextlib.contextmanager
    def _noting_end(self) -> Iterator[None]:
        """Note a RolloutEnded that is raised inside. The rest of the message is still handled."""
        try:
            yield
        except RolloutEnded as error:
            self.ended_by = self.ended_by or error

    def _check_end(self) -> None:
        if self.ended_by is not None:
            raise self.ended_by

    def admit_and_send(self) -> None:
        """Admit groups and send out tickets that can start, after the first weights. Send idle workers the reason."""
        reason_if_full: IdleReason = "weights"
        if self.announcements.newest is not None:
            if self.ended_by is None:
                with self._noting_end():
                    self.dispatcher.admit_groups()
            self.dispatcher.send_out()
            reason_if_full = "bound" if self.announcements.deferred is None else "evaluation"
        self.dispatcher.report_idle(reason_if_full)

    # Batches: `wait_for_batch` → `wait_on_clock` (chooses the state of the clock) → `wait_until` (calls `hold_batch`
    # after every change until there is a batch). `consume_batch` follows when all nodes have theirs.

    def wait_for_batch(self) -> list[int]:
        """Wait for the next batch and hold it. Return the ids of its groups. Raises as `wait_on_clock`."""
        return self.wait_on_clock(self.hold_batch)

    def wait_on_clock(self, done: Callable[[], Any]) -> Any:
        """Wait for the result of `done()` as for a batch, and return it. The clock counts the time as a wait.

        Raises RolloutEnded if an earlier wait timed out, or if rollout has ended and there is no result.
        """
        if self._has_timed_out:
            self._check_end()
        kind = (
            "a batch of groups with unequal rewards"
            if self.config.drop_zero_variance
            else "a batch"
        )

        def try_now() -> Any:
            # places stay taken while an evaluation delays weights
            self.clock.enter("wait" if self.announcements.deferred is None else "evaluate")
            result = done()
            if not result:
                self._check_end()
            return result

        return self.wait_until(try_now, kind)

    def hold_batch(self) -> list[int]:
        """Hold the next batch, unless one is held. Return the ids of its groups; empty if it must be waited for.

        Groups that the batch need not wait for are dropped. Until it is consumed, groups start only if they are fresh
        enough for the batch after it.
        """
        with self.lock:
            if not self.buffer.held:
                self.dispatcher.drop_surplus()
                self.buffer.held = self.buffer.find_batch() or []
            return self.buffer.held

    def consume_batch(self) -> list[Group]:
        """Consume the batch that is held and return its groups, for training.

        Stop sampling if a full batch suspends it. Make engines free their memory if the trainer needs it for its step.
        `Announcements` wakes suspended and sleeping workers.
        """
        with self.lock:
            groups = self.buffer.consume(self.buffer.held)
            self.dispatcher.drop_expired()
            # no update may interrupt an evaluation, so it could not continue
            if self.config.suspends_between_steps and self.evaluation is None:
                self.workers.suspend()
            self.admit_and_send()
            if self.config.colocate == "sleep":
                self.finish_evaluations()
                with contextlib.suppress(RolloutEnded):  # the next batch raises it
                    self.wait_until(self.workers.fall_asleep, "engines to fall asleep")
            return groups

    def is_idle(self) -> bool:
        """Return whether no worker of this node has a response to sample before the next weights.

        It takes no lock, because the trainer asks in each layer. The answer can be out of date.
        """
        return all(
            self.workers[index].is_paused or self.workers[index].idle_reason is not None
            for index in range(self.workers.num_workers)
        )

    # Weights and evaluation

    def stage(self, version: int, parameters: Weights) -> Staged:
        """Copy weights into a buffer of the transport that no worker reads.

        Raises RolloutEnded before it reads any weights if no buffer becomes free in time.
        """
        transport = self.announcements.transport
        if not transport.keeps_readable:
            self.finish_evaluations()  # a worker that dies needs its weights again
        self.wait_until(transport.try_reserve_buffer, "a free weight buffer")
        return transport.stage(version, parameters)

    def take_back_deferred(self) -> bool:
        """Remove the announcement that waits for an evaluation. Its buffer can then be overwritten.

        Return whether it asked for an evaluation. The next announcement must ask again.
        """
        with self.lock:
            deferred = self.announcements.take_deferred()
        return deferred is not None and deferred.evaluate

    def announce_or_defer(self, announcement: Announcement) -> None:
        """Make all workers load these weights, at once or after the running evaluation."""
        with self.lock:
            self.lock.notify_all()
            if self.evaluation is None:
                self.announce(announcement)
            else:
                self.announcements.deferred = announcement

    def announce(self, announcement: Announcement) -> None:
        """Make all workers load these weights. The caller holds the lock.

        Free the places of groups consumed before it was made, admit new groups, and start an evaluation if asked.
        """
        self.announcements.send_to_workers(announcement)
        self.buffer.free_consumed_places(announcement.trainer_version)
        self.dispatcher.drop_expired()
        tickets = []
        if announcement.evaluate:
            with self._noting_end():
                tickets = self.ticket_source.for_evaluation(announcement.version)
        if tickets:  # only the first node has held-out problems
            self.evaluation = Evaluation(announcement.version, len(tickets))
            self.dispatcher.enqueue(tickets, first=True)
        self.admit_and_send()

    def finish_evaluations(self) -> None:
        """Wait until no evaluation runs and no weights wait for one, or until rollout has ended.

        The clock returns to its state.
        """
        # The lock: an evaluation that ends now must first announce the weights that waited for it.
        with self.lock:
            if self.evaluation is None:
                return
            state = self.clock.state
            self.clock.enter("evaluate")
            with contextlib.suppress(RolloutEnded):  # the next batch raises it
                self.wait_until(self.has_evaluated, "an evaluation")
            self.clock.enter(state)

    def finish_probes(self, version: int) -> None:
        """Wait until each running worker of this node has scored the probe at the newest version."""
        own = range(self.workers.num_workers)

        def have_probed() -> bool:
            up = [index for index in own if self.workers[index].is_up]
            return all(self.journal.has_probed(index, version) for index in up)

        self.wait_until(have_probed, "a probe")

    def has_evaluated(self) -> bool:
        """Return whether no evaluation runs, or rollout has ended."""
        return self.evaluation is None or self.ended_by is not None

    # Snapshots

    def snapshot(
        self, measure_records: Callable[[], dict[str, int]] = dict
    ) -> tuple[ControllerState, dict[str, int]]:
        """Return the state that a resumed run needs, and the lengths of the record files at the same moment.

        Call it between `announce_or_defer` and `consume_batch`.
        Weights that wait for an evaluation are announced first, unless it cannot end. If responses continue after a
        resume, workers report their tokens. The state is taken when the last worker has answered,
        so the buffer has all responses that ended before. Sampling continues meanwhile.
        `measure_records()` returns the length of each record file in bytes.
        """
        with self.lock:
            with contextlib.suppress(RolloutEnded):  # the next batch raises it
                self.wait_until(self._has_announced, "an evaluation")
            if continues_responses(self.config):
                with contextlib.suppress(RolloutEnded):
                    answered = self.workers.request_progress_of_all()
                    self.wait_until(answered, "responses in flight")
            state = ControllerState(
                self.buffer.state(),
                copy.deepcopy(self.ticket_source.state),
                self.dispatcher.unfinished_tickets(),
                published_version=self.announcements.newest.version,
                evaluates=self.evaluation is not None,
                evaluations=list(self.ended_evaluations),
                num_restarts=self.workers.num_restarts,
                failures=copy.deepcopy(self.dispatcher.failures),
            )
            # under the lock, so the files match the state
            return state, measure_records()

    def _has_announced(self) -> bool:
        """Return whether no weights wait for an evaluation, or it cannot end."""
        is_waiting = self.announcements.deferred is not None
        return not is_waiting or self.ended_by is not None or not any(self.workers)

    def _restore(self, state: ControllerState) -> None:
        """Continue from a state. Tickets of responses that were running come first.

        LeadingPublisher reads `published_version` and `evaluates`. An evaluation that was running starts again when its
        weights are announced.
        """
        self.buffer.restore(state.buffer)
        self.ticket_source.state = copy.deepcopy(state.tickets)
        self.dispatcher.enqueue(state.queue)
        self.workers.num_restarts = state.num_restarts
        self.dispatcher.failures = copy.deepcopy(state.failures)
        self.ended_evaluations = list(state.evaluations)

    # Waiting

    def wait_until(self, done: Callable[[], Any], goal: str) -> Any:
        """Wait until `done()` is true and return its value. It is called after every change, under the lock.

        While a worker starts, the timeout does not run. Raises errors of background threads, and RolloutEnded after the
        timeout.
        """
        deadline = time.monotonic() + self.config.timeout_s
        with self.lock:
            try:
                while True:
                    with self._noting_end():
                        self.workers.check()
                    self.announcements.transport.check()
                    if result := done():
                        return result
                    self.lock.wait(timeout=1.0)
                    if self.workers.any_starting and self.ended_by is None:
                        deadline = time.monotonic() + self.config.timeout_s
                    elif time.monotonic() > deadline:
                        raise TimeoutError(f"waited {self.config.timeout_s:.0f} s for {goal}")
            except TimeoutError as error:
                state = self.dispatcher.describe()
                self._has_timed_out = True
                self.ended_by = RolloutEnded(f"{error}; {dump_stacks()}; state: {state}")
                raise self.ended_by from None

    # Measurements

    def take_metrics(self) -> Measured:
        """Return the measurements since the last call, and the ledger."""
        with self.lock:
            # if the ledger does not balance, an error of a reading thread is the reason
            with self._noting_end():
                self.workers.check()
            failures = self.dispatcher.failures
            return {
                **ledger_metrics(self.buffer.balance()),
                **self.journal.take_metrics(),
                "rollout/restarts": self.workers.num_restarts,
                "rollout/failed_groups": Mean(failures.num_failed_groups, failures.num_groups),
                "rollout/failed_responses": Mean(failures.num_failed, failures.num_responses),
            }

    def failures(self) -> Failures:
        """Return a copy of the counts of failures in training."""
        with self.lock:
            return copy.deepcopy(self.dispatcher.failures)

    def try_to_ban_host(self, worker: int, problem: str) -> bool:
        """Stop using the remote host of a worker with wrong weights. Return whether that was done.

        extras/swarm overrides this: here no host is remote.
        """
        return False

    def is_believed(self, worker: int) -> bool:
        """Return whether the samples of a worker are used. extras/swarm overrides this."""
        return True

    def take_probes(self) -> ProbedVersions:
        """Return the engines' log-probs of the probe that arrived since the last call."""
        with self.lock:
            return self.journal.take_probes()

    def take_evaluation(self) -> dict[str, Any]:
        """Return the metrics of the newest evaluation that ended since the last call; {} without one.

        Metrics of earlier ones are in `eval/earlier`, oldest first.
        """
        with self.lock:
            ended, self.ended_evaluations = self.ended_evaluations, []
        if not ended:
            return {}
        *earlier, newest = [evaluation.metrics() for evaluation in ended]
        return newest | {"eval/earlier": earlier} if earlier else newest

    def stop(self) -> None:
        """End all workers and their engines. Return when they have ended."""
        with self.lock:
            self._stopping = True
        try:
            self.workers.stop()
        finally:
            self.journal.close()
            self.announcements.transport.close()
