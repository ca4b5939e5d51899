"""The rollout workers of a node: start, state, replacement, end."""

import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from asyncrl.cluster.placement import Placement, WorkerSpec
from asyncrl.cluster.processes import RolloutEnded, folder_of_sockets, kill_session
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.cluster.worker_process import WorkerProcess
from asyncrl.config import Config
from asyncrl.messages import (
    Connect,
    IdleReason,
    InFlight,
    LoadWeights,
    ReportProgress,
    Sleep,
    Stop,
    Suspend,
    TokenSequences,
)
from asyncrl.records import Ticket
from asyncrl.weights.transport import Announcement, Transport

MAX_RESTARTS = 3
"""Restarts of a worker without a trajectory between them. Its next death ends the run."""
MAX_DEATHS = 10
"""Workers that can die with one ticket. The last of these deaths ends the run, even if other tickets end meanwhile."""
PROGRESS_S = 30.0
"""Time that workers have to report the tokens of their responses. Responses of a silent worker are sampled again."""
STOP_TIMEOUT_S = 10.0
"""Time that all workers together have to end before they are killed."""


class WorkerDied(RolloutEnded):
    """A rollout worker could not be started or died too often, or the run has no worker."""


@dataclass
class Worker:
    """One rollout worker as the controller sees it.

    A worker acts on messages in order. `state` and `sent_version` describe it after all messages that it was sent. A
    worker that gets `Suspend` while it is `loading` counts as suspended, and loads these weights first.
    """

    index: int
    process: WorkerProcess | None = None
    """None only until the process is started."""
    transport: Transport = field(default_factory=Transport)
    """Transport of weights to the worker. It sends no weights until `connect`."""
    order: float = 0.0
    """Tie-breaker between equally loaded workers; the lowest wins. Local workers all have 0."""
    state: Literal["starting", "sampling", "suspended", "falling_asleep", "asleep", "dead"] = (
        "starting"
    )
    """`sampling`: up and not paused, also before its first weights. `asleep` begins with the worker's answer. Only new
    weights end `suspended` and `asleep`. A `dead` worker is never started again: another Worker replaces it."""
    sent_version: int = -1
    """Newest version sent."""
    loading: Announcement | None = None
    """Weights that the worker was sent and has not loaded yet."""
    needs_update: bool = False
    """True if the worker gets the announced weights as soon as it is up and loads no other weights."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Its tickets, by id."""
    num_running: int = 0
    """Trajectories of its tickets."""
    num_restarts_since_ticket: int = 0
    """Restarts since the last ticket that it ended."""
    owes_progress: bool = False
    """True if it has not answered the last `request_progress` yet."""
    in_flight: InFlight | None = None
    """Its answer."""
    counts_as_attempt: bool = True
    """True if its death raises the `attempt` of its tickets. False for joined hosts: their end is no sign that the
    response kills its engine."""
    idle_reason: IdleReason | None = None
    """Reason that it was sent for having no ticket; None while it has one."""

    @property
    def is_up(self) -> bool:
        """True if the engine has started."""
        return self.state not in ("starting", "dead")

    @property
    def is_paused(self) -> bool:
        """True if sampling is stopped until the next update."""
        return self.state in ("suspended", "falling_asleep", "asleep")

    def connect(self, transport: Transport) -> None:
        self.transport = transport
        self.process.send(Connect(transport.init_info(self.index)))

    def disconnect(self) -> None:
        """Close the weight transport of a dead worker."""
        self.transport.disconnect(self.index)
        if self.loading is not None:
            self.finish_loading()

    def is_behind(self, newest: Announcement) -> bool:
        """Return whether the worker must load the newest weights."""
        return newest.version > self.sent_version

    def can_load(self, announcement: Announcement) -> bool:
        """Return whether the worker may begin to read these weights now."""
        return self.transport.can_read(announcement.staged)

    def load(self, announcement: Announcement) -> None:
        """Make the worker load staged weights, score the probe, and sample."""
        self.transport.acquire(announcement.staged)
        self.loading = announcement
        self.send_update(announcement.staged.messages, announcement.probe)

    def send_update(self, infos: list[dict], probe: TokenSequences) -> None:
        """Make the engine load the weights that are `loading`, by their update infos, and score a probe."""
        self.state, self.sent_version = "sampling", self.loading.version
        self.process.send(LoadWeights(self.sent_version, infos, probe))

    def finish_loading(self) -> None:
        """Mark the weights as loaded, and free their buffer."""
        self.transport.release(self.loading.staged)
        self.loading = None

    def request_progress(self) -> None:
        self.owes_progress, self.in_flight = True, None
        self.process.send(ReportProgress())

    def assign(self, ticket: Ticket) -> None:
        """Count a ticket as the worker's."""
        self.idle_reason = None
        self.tickets[ticket.ticket_id] = ticket
        self.num_running += ticket.num_members

    @property
    def awaited(self) -> list[Ticket]:
        """Tickets that are issued again if the worker dies: all, or a host's tickets that no other worker has."""
        return list(self.tickets.values())

    def finish_ticket(self, ticket_id: int) -> None:
        """Remove a ticket that the worker has ended."""
        self.num_running -= self.tickets.pop(ticket_id).num_members
        self.num_restarts_since_ticket = 0

    def describe(self) -> str:
        # A joined host is still sampling with older weights while it fetches the weights that are `loading`.
        state = (
            "updating"
            if self.loading and self.sent_version == self.loading.version
            else self.state.replace("_", " ")
        )
        return f"worker {self.index} {state} v{self.sent_version} running {self.num_running}"


class Workers:
    """The rollout workers of this node. A dead worker is replaced, a bounded number of times."""

    def __init__(
        self, config: Config, placement: Placement, model_path: str, run_path: Path, main: Callable
    ):
        """Each process runs `main(spec, connection)`."""
        self.config, self.placement = config, placement
        self.model_path, self.run_path = model_path, run_path
        self.num_restarts = 0
        """Restarts of all workers in the run."""
        self.have_worked = False
        """True if any trajectory has arrived."""
        self._main = main
        self.by_index: dict[int, Worker] = {}
        # also of dead processes, because handling a death can fail
        self._readings: list[Future] = []
        # Python's resource tracker removes semaphores of killed workers. Its warnings are not needed.
        sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
        self._pids_before = {child.pid for child in multiprocessing.active_children()}
        """Processes of the program that called `train`."""
        self._temporary = folder_of_sockets()
        self._threads = ThreadPoolExecutor(4 * len(placement.workers) or 1)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.by_index.values())

    def __getitem__(self, index: int) -> Worker:
        return self.by_index[index]

    @property
    def num_workers(self) -> int:
        """Number of this node's own workers, started or not."""
        return len(self.placement.workers)

    @property
    def starting(self) -> list[Worker]:
        return [worker for worker in self if worker.state == "starting"]

    @property
    def any_starting(self) -> bool:
        """True if a worker is starting. `check` limits the time of a start."""
        return bool(self.starting)

    def launch(self, on_message: Callable, on_ended: Callable) -> None:
        """Start all workers. Return at once.

        `on_message(worker, message or None)` and `on_ended(future)` are called by reading threads.
        """
        self._on_message, self._on_ended = on_message, on_ended
        for index in range(self.num_workers):
            # now, so that stop() ends a worker if the start of the next one fails
            self.by_index[index] = self._start(index)

    def watch(self, thread: Future) -> None:
        """Make `check` raise the error that ends a thread."""
        self._readings.append(thread)
        thread.add_done_callback(self._on_ended)

    def _start(self, index: int, num_restarts_since_ticket: int = 0) -> Worker:
        log, placement = str(self.run_path / f"worker_{index}.log"), self.placement
        spec = WorkerSpec(
            self.config,
            placement.workers[index],
            self.model_path,
            placement.transport,
            log,
            self._temporary.name,
        )
        worker = Worker(index, num_restarts_since_ticket=num_restarts_since_ticket)
        worker.process = WorkerProcess(
            spec, self._main, functools.partial(self._on_message, worker), self._threads
        )
        self.watch(worker.process.reading)
        return worker

    def replace(self, worker: Worker) -> None:
        """Start another process for a dead worker.

        Raises WorkerDied if it could not start, or ended by an error, before any trajectory arrived. Raises it also if
        this worker died too often, or one ticket ended too many workers. The error has exit code, log lines and first
        error.
        """
        worker.process.stop()
        report = worker.process.death_report()
        was_up = worker.is_up
        worker.state = "dead"
        if not self.have_worked and (not was_up or worker.process.exit_code > 0):
            failure = "died before any response arrived" if was_up else "could not start"
            raise WorkerDied(f"rollout worker {worker.index} {failure}: {report}")
        if worker.num_restarts_since_ticket == MAX_RESTARTS:
            raise WorkerDied(
                f"{report}\nall {MAX_RESTARTS} restarts are used, and no response arrived between them"
            )
        ticket = max(worker.awaited, key=lambda ticket: ticket.attempt, default=None)
        if ticket is not None and ticket.attempt + 1 >= MAX_DEATHS:
            raise WorkerDied(
                f"{report}\n{MAX_DEATHS} workers died with one ticket (group {ticket.group_id}, "
                f"member {ticket.member}, environment seed {ticket.environment_seed}); "
                "see their logs, and begin a new run without its problem: a resume would end here again"
            )
        self.num_restarts += 1
        if self.placement.workers[worker.index].shared_with_rank is not None:
            torch.cuda.empty_cache()  # the engine needs memory that the trainer's last step used
        print(
            f"warning: {worker.process.death_line()}; its {len(worker.tickets)} tickets are issued again",
            flush=True,
        )
        num_restarts = worker.num_restarts_since_ticket + 1
        self.by_index[worker.index] = self._start(worker.index, num_restarts)

    def suspend(self) -> None:
        """Stop the sampling of all workers until the next update."""
        for worker in self:
            if worker.is_up:
                worker.state = "suspended"
                worker.process.send(Suspend())

    def fall_asleep(self) -> bool:
        """Ask each worker that is up to fall asleep. Return whether all are asleep."""
        for worker in self:
            # weights that it needs would wake it again
            if worker.state in ("sampling", "suspended") and not worker.needs_update:
                worker.state = "falling_asleep"
                worker.process.send(Sleep())
        return all(worker.state in ("asleep", "dead") for worker in self)

    def request_progress_of_all(self) -> Callable[[], bool]:
        """Ask all workers of this node for the progress of their responses.

        Return a function. It returns whether all have answered or are too late.
        """
        # less than --timeout-s, after which the wait would end the run
        deadline = time.monotonic() + min(PROGRESS_S, self.config.timeout_s / 2)
        for worker in self:
            if worker.is_up:
                worker.request_progress()

        def all_have_answered() -> bool:
            silent = [worker.describe() for worker in self if worker.owes_progress]
            if not silent or time.monotonic() < deadline:
                return not silent
            print(
                f"warning: {', '.join(silent)} sent no progress; a resumed run samples its responses again",
                flush=True,
            )
            return True

        return all_have_answered

    def check(self) -> None:
        """Raise the error that ended a reading thread, or WorkerDied for a worker that takes too long to start."""
        for reading in self._readings:
            if reading.done():
                reading.result()
        for worker in self.starting:
            if time.monotonic() > worker.process.started_at + self.config.timeout_s:
                raise WorkerDied(
                    f"rollout worker {worker.index} was not ready {self.config.timeout_s:.0f} s after its "
                    f"start (--timeout-s); {dump_stacks()}: {worker.process.death_report()}"
                )

    def stop(self) -> None:
        """End all workers and their engines. Return when they have ended."""
        for worker in self:
            worker.process.send(Stop())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self:
            worker.process.stop(max(0.0, deadline - time.monotonic()) if worker.is_up else 0.0)
        for child in multiprocessing.active_children():  # a start may have been interrupted
            if child.pid not in self._pids_before:
                kill_session(child.pid)
        self._threads.shutdown()
        self._temporary.cleanup()
