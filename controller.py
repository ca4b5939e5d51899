"""The controller: hands tickets to rollout workers, gathers groups, announces weights, and keeps the workers alive.

It lives in the process of local trainer rank 0, and the ticket queue with it. The workers' reading threads and the
trainer's thread meet at one condition, which guards all state.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffer import DropReason, SampleBuffer
from config import Config
from data.records import Group, Ticket, Trajectory
from evaluation import Evaluation
from llm_proxy import SampledTokens
from messages import Asleep, Connect, Finished, Probed, Ready, Receiving, Sleep, Suspend, Update, Updated, Waiting
from placement import Placement
from rollout import run_worker
from scheduling import Dispatcher
from tickets import EVALUATION_GROUP, TicketSource
from weight_sync import Staged
from workers import Worker, Workers

MIN_FAILED_IN_A_ROW = 20
"""Groups that may fail one after the other, however few are outstanding, before the run is taken for broken."""


@dataclass(frozen=True)
class Announcement:
    """Weights that workers are to load."""

    version: int
    """Policy version of the weights."""
    trainer_version: int
    """Version that the trainer had reached when it published them; ahead of `version` by publish_delay."""
    staged: Staged
    probe: tuple[tuple[int, ...], ...]
    evaluate: bool


class Controller:
    """Runs rollout on one node: start, take batches, publish, evaluate, stop."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        model_path: str,
        tickets: TicketSource,
        run_path: Path,
        record: Callable[..., None],
        worker_main: Callable = run_worker,
    ):
        self.config, self.tickets, self.record = config, tickets, record
        self.transport = None
        self.workers = Workers(
            config, placement, model_path, run_path, self._on_message, self._on_thread_ended, worker_main
        )
        self.buffer = SampleBuffer(
            config.groups_per_step,
            config.group_size,
            config.max_outstanding_groups,
            config.max_staleness,
            config.publish_delay,
            config.stale_policy,
            config.extra_groups,
            config.extra_members,
            config.admission,
        )
        self.pause_s: list[float] = []
        self.probe_logprobs: dict[int, tuple[np.ndarray, ...]] = {}
        self.evaluations: list[Evaluation] = []
        self._changed = threading.Condition()
        self.dispatcher = Dispatcher(config, self.workers, self.buffer, tickets)
        self.sampled = SampledTokens()
        self._announced: Announcement | None = None
        self._deferred: Announcement | None = None
        self._evaluation: Evaluation | None = None
        self._failed_in_a_row = 0
        self._stopping = False

    # Life of the workers

    def launch(self) -> None:
        """Start all workers; returns at once."""
        with self._changed:
            self.workers.launch()

    def wait_until_ready(self) -> None:
        """Wait until all engines are up.

        Raises WorkerDied, with the worker's last log lines, if one ends or is not ready within the startup timeout.
        """
        with self._changed:
            self._wait(lambda: not self.workers.starting, self.config.startup_timeout_s, "workers to start")

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

    def _on_message(self, worker: Worker, message) -> None:
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
                self.record("worker_ready", worker=worker.index, startup_s=startup_s)
                if self.transport is not None:  # a restart: the first ones are connected all together
                    worker.process.send(Connect(self.transport.init_info(worker.index)))
                if self._announced is not None:
                    self._send_update(worker)
            case Finished(trajectories):
                for ticket_id in {trajectory.ticket_id for trajectory in trajectories}:
                    worker.take_back(ticket_id)
                for trajectory in trajectories:
                    self._on_trajectory(trajectory)
                self._drop_expired()
            case Waiting(ticket_ids):
                self.dispatcher.arrive_at_barrier(ticket_ids)
            case Receiving():
                self.transport.send(worker.index, worker.updating)
            case Asleep():
                worker.asleep = True
            case Probed(version, logprobs):
                self.probe_logprobs[version] = logprobs
            case Updated(version, pause_s, sampled):
                self._count_sampled(sampled)
                self.transport.release(worker.updating)
                worker.updating = None
                self.pause_s.append(pause_s)
                self.record("update", worker=worker.index, version=version, pause_s=pause_s)
                if version < self._announced.version:
                    self._send_update(worker)

    def _on_death(self, worker: Worker) -> None:
        """Issue a dead worker's tickets again and start it anew, or end the run."""
        if self._stopping:
            return
        if self.transport is not None:
            self.transport.drop(worker.index)
        if worker.updating is not None:
            self.transport.release(worker.updating)
        self.workers.replace(worker)
        self.record("worker_died", worker=worker.index, exit_code=worker.process.exit_code, tickets=len(worker.running))
        for ticket in sorted(worker.running.values(), key=lambda t: t.ticket_id, reverse=True):
            self._issue_again(ticket)

    def _fill(self) -> None:
        """Start what can start; nothing can before the first weights are announced."""
        if self._announced is not None:
            self.dispatcher.fill()

    def _issue_again(self, ticket: Ticket) -> None:
        again = self.tickets.again(ticket)
        if ticket.group_id == EVALUATION_GROUP:
            self._evaluation.issue_again(ticket, again)
        elif not self.buffer.is_running(ticket.group_id):
            return  # its group was dropped or finished without it
        self.dispatcher.queue.put_first([again])

    def _count_sampled(self, sampled: SampledTokens) -> None:
        self.buffer.count_discarded(sampled.discarded)
        for field in dataclasses.fields(SampledTokens):
            setattr(self.sampled, field.name, getattr(self.sampled, field.name) + getattr(sampled, field.name))

    # Trajectories

    def _on_trajectory(self, trajectory: Trajectory) -> None:
        self.workers.have_worked = True
        self.record("trajectory", **_summary(trajectory))
        if trajectory.group_id == EVALUATION_GROUP:
            self._on_evaluated(trajectory)
        elif trajectory.finish_reason == "failed":
            self._on_failed(trajectory)
        else:
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
        if self._failed_in_a_row > max(MIN_FAILED_IN_A_ROW, self.config.max_outstanding_groups):
            raise RuntimeError(
                f"the last {self._failed_in_a_row} groups all failed, the newest with: {trajectory.failure}; "
                "mend the environment or reward, or raise --env-timeout-s if it is only slow"
            )
        self._drop(trajectory.group_id, "failed")
        self.tickets.forget(trajectory.group_id)

    def _drop_expired(self) -> None:
        """Under `drop`: abort what expired and issue its problem again, so that slow problems are not starved."""
        for group_id in self.buffer.expired():
            self._drop(group_id, "stale")
            self.tickets.put_back(group_id)

    def _drop(self, group_id: int, reason: DropReason) -> None:
        self.buffer.drop(group_id, reason)
        self.dispatcher.abort(group_id)

    # Batches

    def take_batch(self) -> list[Group]:
        """Wait for the next batch of groups and take it.

        Raises the error that ended rollout, or RuntimeError after the rollout timeout, with all stacks dumped.
        """
        with self._changed:
            batch: list[Group] | None = None

            def taken() -> bool:
                nonlocal batch
                for group_id in self.buffer.surplus():
                    self._drop(group_id, "aborted")
                    self.tickets.put_back(group_id)
                batch = self.buffer.take()
                return batch is not None

            what = "a batch of groups with unequal rewards" if self.config.drop_zero_variance else "a batch"
            self._wait(taken, self.config.rollout_timeout_s, what)
            for group in batch:
                self.tickets.forget(group.group_id)
            self._drop_expired()
            self._suspend_rest()
            self._fill()
            if self.config.colocate == "sleep":
                self._put_to_sleep()
            return batch

    def _suspend_rest(self) -> None:
        """With over-sampling, stop what runs until the next update; not in an evaluation, which no update may end."""
        if self.config.over_sampling > 1 and self._evaluation is None:
            for worker in self.workers:
                if worker.ready:
                    worker.process.send(Suspend())

    def _put_to_sleep(self) -> None:
        """Have all engines give up their memory until the next update; an evaluation ends first."""
        timeout_s = self.config.rollout_timeout_s
        self._wait(lambda: self._evaluation is None, timeout_s, "an evaluation")

        def asleep() -> bool:
            for worker in self.workers:  # one that was started again in between is told when it is up
                if worker.ready and not worker.told_to_sleep:
                    worker.told_to_sleep = True
                    worker.process.send(Sleep())
            return all(worker.asleep for worker in self.workers)

        self._wait(asleep, timeout_s, "engines to fall asleep")

    def _wait(self, done: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until `done()`, which is asked after every change; the caller holds the condition.

        The start of a worker has a timeout of its own and does not count.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self.workers.check()
            self._check_transport()
            if done():
                return
            self._changed.wait(timeout=1.0)
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
            timeout_s = self.config.rollout_timeout_s
            self._wait(lambda: self.transport.free_buffer() is not None, timeout_s, "a free weight buffer")

    def withdraw(self) -> bool:
        """Take back an announcement that still waits for an evaluation to end, so that its buffer may be written.

        Returns whether an evaluation was to follow it: the next announcement must ask for it again.
        """
        with self._changed:
            deferred, self._deferred = self._deferred, None
            return deferred is not None and deferred.evaluate

    def publish(self, announcement: Announcement) -> None:
        """Have all workers load these weights, at once or when the running evaluation has ended.

        An evaluation is pinned to its version, so no worker may move on before its last response; training goes on
        meanwhile with the groups there are.
        """
        with self._changed:
            if self._evaluation is not None:
                self._deferred = announcement
            else:
                self._announce(announcement)
            self._changed.notify_all()

    def _announce(self, announcement: Announcement) -> None:
        self._announced = announcement
        self.transport.announce(announcement.staged)
        for worker in self.workers:
            if worker.ready and worker.updating is None and worker.sent_version < announcement.version:
                self._send_update(worker)
        self.buffer.publish(announcement.trainer_version)
        self._drop_expired()
        if announcement.evaluate:
            self._start_evaluation(announcement.version)
        self._fill()

    def _send_update(self, worker: Worker) -> None:
        """Send the announced weights. Only worker 0 scores the probe: all load the same bytes."""
        probe = self._announced.probe if worker.index == 0 else ()
        worker.updating = self._announced.staged
        worker.sent_version = self._announced.version
        worker.told_to_sleep = worker.asleep = False
        self.transport.acquire(worker.updating)
        worker.process.send(Update(worker.sent_version, worker.updating.messages, probe))

    def _start_evaluation(self, version: int) -> None:
        tickets = self.tickets.for_evaluation(version)
        self._evaluation = Evaluation.of(version, tickets)
        self.dispatcher.queue.put_first(tickets)

    def _on_evaluated(self, trajectory: Trajectory) -> None:
        evaluation = self._evaluation
        evaluation.add(trajectory)
        if not evaluation.has_ended:
            return
        self.evaluations.append(evaluation)
        self.record("evaluation", version=evaluation.version, accuracy=evaluation.accuracy)
        self._evaluation = None
        if self._deferred is not None:
            deferred, self._deferred = self._deferred, None
            self._announce(deferred)

    def finish_evaluations(self) -> None:
        """Wait until no evaluation is running or to come."""
        with self._changed:
            self._wait(
                lambda: self._evaluation is None and self._deferred is None,
                self.config.rollout_timeout_s,
                "an evaluation",
            )

    def drain(self) -> dict:
        """Hand over what was measured since the last call: evaluations, pauses, tokens, probe log-probs, the ledger."""
        with self._changed:
            evaluations, self.evaluations = self.evaluations, []
            pauses, self.pause_s = self.pause_s, []
            probes, self.probe_logprobs = self.probe_logprobs, {}
            sampled, self.sampled = self.sampled, SampledTokens()
            return {
                "evaluations": evaluations,
                "pause_s": pauses,
                "probes": probes,
                "sampled": sampled,
                "ledger": self.buffer.ledger(),
                "num_restarts": self.workers.num_restarts,
            }

    def stop(self) -> None:
        """End all workers and their engines; none is left when this returns."""
        with self._changed:
            self._stopping = True
        try:
            self.workers.stop()
        finally:
            if self.transport is not None:
                self.transport.close()


def _summary(trajectory: Trajectory) -> dict:
    record = {
        "ticket": trajectory.ticket_id,
        "group": trajectory.group_id,
        "member": trajectory.member,
        "worker": trajectory.worker,
        "started_at": trajectory.started_at,
        "ended_at": trajectory.ended_at,
        "tokens": trajectory.num_generated,
        "finish_reason": trajectory.finish_reason,
        "reward": trajectory.reward,
    }
    if trajectory.num_generated:
        versions = trajectory.policy_versions[trajectory.loss_mask]
        record |= {"min_version": int(versions.min()), "max_version": int(versions.max())}
    return record if not trajectory.failure else record | {"failure": trajectory.failure}
