"""Rollout workers as processes: start them, talk to them, say why one died, replace it, end them.

Each has one duplex pipe, read by one thread and written by another, so that neither a slow nor a dead worker makes the
trainer wait. Processes share no queue: one that is killed while it holds a shared queue's lock blocks all the others.
"""

import functools
import multiprocessing
import queue
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cluster.placement import Placement, WorkerSpec
from cluster.processes import dump_stacks, dump_trainer_stacks, kill_session
from config import Config
from data.messages import HoldReason, Stop
from data.records import Ticket
from weights.transport import Staged

LOG_LINES_SHOWN = 15
MAX_RESTARTS = 3
"""Restarts of a node's workers between two batches; one more death ends the run."""
JOIN_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
"""Time that all workers together have to end by themselves."""


class WorkerDied(RuntimeError):
    """A rollout worker could not be started, or died more often than MAX_RESTARTS allows."""


class WorkerProcess:
    """A worker's process, its pipe and its log."""

    def __init__(self, spec: WorkerSpec, main: Callable, on_message: Callable, threads: ThreadPoolExecutor):
        """Start `main(spec, connection)` in a process of its own.

        `on_message` is called with each message, in a thread, and with None when the process has gone.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._log_path = Path(spec.log_path)
        self._log_path.touch()
        self._log_start = self._log_path.stat().st_size  # a restarted worker appends
        # Not a daemon process: those may have no children, and the engine is one.
        self.process = context.Process(target=main, args=(spec, theirs), name=f"rollout-worker-{spec.placement.worker}")
        self.started_at = time.monotonic()
        self.process.start()
        theirs.close()  # so that the pipe reads as closed as soon as the worker is gone
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        threads.submit(self._write, ours)
        self.reading: Future = threads.submit(self._read, ours, on_message)
        """Ends with the process; holds the error if `on_message` raised one."""

    def send(self, message) -> None:
        """Queue a message; never waits."""
        self._outbox.put(message)

    def _write(self, connection) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                connection.send(message)
            except OSError:
                return  # the reading thread sees the same end and acts on it

    def _read(self, connection, on_message: Callable) -> None:
        with connection:
            try:
                while True:
                    on_message(_receive(connection))
            except EOFError:
                self._outbox.put(None)
        on_message(None)

    @property
    def exit_code(self) -> int | None:
        """Exit status; minus the signal's number if one killed it; None while it runs."""
        return self.process.exitcode

    def reap(self) -> None:
        """After its pipe has closed: wait for its end, and end the engine and reward processes it may have left."""
        self.process.join(timeout=JOIN_TIMEOUT_S)
        kill_session(self.process.pid)
        self.process.join()

    def stop(self, timeout_s: float) -> None:
        """End the process and all that it started, after at most `timeout_s` seconds to end by itself."""
        self.process.join(timeout=timeout_s)
        kill_session(self.process.pid)
        self.process.join()
        self.send(None)

    def dump_stacks(self) -> None:
        """Have the process and its children write their stacks to the log."""
        dump_stacks(self.process.pid)

    def death_report(self) -> str:
        """Who died and how, then the first error and the last lines of the log."""
        code = self.exit_code
        if code is None:
            how = "is still running and did not answer"
        else:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        log = self._log_path.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        # The engine's own error comes first; then everybody who waited for it says so, at length.
        causes = [line for line in log[:-LOG_LINES_SHOWN] if re.search(r"\w+(Error|Exception): ", line)]
        shown = "\n".join(f"  | {line}" for line in causes[:1] + log[-LOG_LINES_SHOWN:])
        who = f"{self.process.name.replace('-', ' ')} (pid {self.process.pid})"
        return f"{who} {how}; its first error and last log lines, from {self._log_path}:\n{shown}"


def _receive(connection):
    """The next message. Raises EOFError when the other end is gone, however the system says so."""
    try:
        return connection.recv()
    except OSError as error:
        raise EOFError from error


@dataclass
class Worker:
    """One rollout worker as the controller sees it."""

    index: int
    process: WorkerProcess | None = None
    """Set as soon as it has been started."""
    ready: bool = False
    sent_version: int = -1
    """Newest version sent; messages are acted on in order, so tickets sent now are sampled under it."""
    updating: Staged | None = None
    """Weights that it is loading now."""
    owed: bool = False
    """Whether it is to be sent the announced weights when it has loaded those."""
    stands: bool = False
    """Whether it was told to stand still, suspended or asleep, until the next update."""
    told_to_sleep: bool = False
    """Whether it was, since the last update; `asleep` when it has said that it is."""
    asleep: bool = False
    running: dict[int, Ticket] = field(default_factory=dict)
    """Tickets that it has, by id."""
    num_running: int = 0
    """Trajectories that these ask for."""
    held: HoldReason | None = None
    """Why it has no ticket, as it was told."""

    def can_start(self, min_version: int) -> bool:
        """Whether it is up and has been sent weights that are new enough."""
        return self.ready and self.sent_version >= min_version

    def give(self, ticket: Ticket) -> None:
        """Note that it has a ticket."""
        self.held = None
        self.running[ticket.ticket_id] = ticket
        self.num_running += ticket.num_members

    def take_back(self, ticket_id: int) -> Ticket:
        """Note that it has ended a ticket."""
        ticket = self.running.pop(ticket_id)
        self.num_running -= ticket.num_members
        return ticket

    def describe(self) -> str:
        """Its state in a few words."""
        awake = "standing" if self.stands else "ready"
        state = "starting" if not self.ready else "updating" if self.updating else awake
        return f"worker {self.index} {state} v{self.sent_version} running {self.num_running}"


class Workers:
    """The rollout workers of this node, replaced when they die, a bounded number of times."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        model_path: str,
        run_path: Path,
        main: Callable,
    ):
        """`main(spec, connection)` is what each process runs."""
        self.config, self.placement = config, placement
        self.model_path, self.run_path = model_path, run_path
        self.num_restarts = 0
        self.restarts_since_batch = 0
        self.have_worked = False
        """Whether any trajectory has come back."""
        self._main = main
        self._workers: list[Worker] = []
        # Python's resource tracker takes away the semaphores that a killed worker leaves, and need not warn of it.
        sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-")
        self._threads = ThreadPoolExecutor(4 * len(placement.workers))

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __getitem__(self, index: int) -> Worker:
        return self._workers[index]

    @property
    def num_workers(self) -> int:
        """How many there are, or will be."""
        return len(self.placement.workers)

    @property
    def starting(self) -> list[Worker]:
        """Those whose engines are not up yet."""
        return [worker for worker in self._workers if not worker.ready]

    def launch(self, on_message: Callable, on_ended: Callable) -> None:
        """Start all; returns at once.

        `on_message(worker, message or None)` and `on_ended(future)` are called by reading threads.
        """
        self._on_message, self._on_ended = on_message, on_ended
        for index in range(self.num_workers):
            self._workers.append(self._start(index))  # one by one, so that stop() knows of each at once

    def _start(self, index: int) -> Worker:
        spec = WorkerSpec(
            self.config,
            self.placement.workers[index],
            self.model_path,
            self.placement.transport,
            str(self.run_path / f"worker_{index}.log"),
            self._sockets.name,
        )
        worker = Worker(index)
        worker.process = WorkerProcess(spec, self._main, functools.partial(self._on_message, worker), self._threads)
        worker.process.reading.add_done_callback(self._on_ended)
        return worker

    def replace(self, worker: Worker) -> None:
        """Start a dead worker anew.

        Raises WorkerDied, with its exit code, first error and last log lines, if it never worked or died too often.
        """
        worker.process.reap()
        report = worker.process.death_report()
        if not self.have_worked and (not worker.ready or worker.process.exit_code > 0):
            what = "was up, and died before any response came back" if worker.ready else "could not start"
            raise WorkerDied(f"rollout worker {worker.index} {what}: {report}")
        if self.restarts_since_batch == MAX_RESTARTS:
            raise WorkerDied(f"{report}\nthat was the last of {MAX_RESTARTS} restarts without a batch between them")
        self.num_restarts += 1
        self.restarts_since_batch += 1
        print(f"warning: {report.partition(';')[0]}; its {len(worker.running)} tickets are issued again", flush=True)
        self._workers[worker.index] = self._start(worker.index)

    def check(self) -> None:
        """Raise the error that ended a reading thread, or WorkerDied for a worker that takes too long to start."""
        for worker in self._workers:
            if worker.process.reading.done():
                worker.process.reading.result()
        for worker in self.starting:
            if time.monotonic() > worker.process.started_at + self.config.timeout_s:
                self.dump_stacks()
                raise WorkerDied(
                    f"rollout worker {worker.index} was not ready {self.config.timeout_s:.0f} s after its "
                    f"start (--timeout-s): {worker.process.death_report()}"
                )

    def dump_stacks(self) -> None:
        """Have every process of the run write its Python stacks: workers to their logs, trainer ranks to stderr."""
        dump_trainer_stacks()
        for worker in self._workers:
            worker.process.dump_stacks()
        time.sleep(1.0)  # the dumps are written by the other processes' signal handlers

    def stop(self) -> None:
        """End all workers and their engines; none is left when this returns."""
        for worker in self._workers:
            worker.process.send(Stop())
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.process.stop(max(0.0, deadline - time.monotonic()) if worker.ready else 0.0)
        for child in multiprocessing.active_children():  # one whose start was interrupted
            kill_session(child.pid)
        self._threads.shutdown()
        self._sockets.cleanup()
