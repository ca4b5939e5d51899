"""A rollout worker's process, its pipe and its log.

Each has one duplex pipe, read by one thread and written by another, so that neither a slow nor a dead worker makes the
trainer wait. Processes share no queue: one that is killed while it holds a shared queue's lock blocks all the others.
"""

import contextlib
import multiprocessing
import os
import queue
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.cluster.processes import kill_session

LOG_LINES_SHOWN = 15
JOIN_TIMEOUT_S = 10.0
SAFE_PATH = "by the run"
"""PYTHONSAFEPATH of a worker while its engine starts. Any text but the empty one turns it on."""


class WorkerProcess:
    """A worker's process, its pipe and its log."""

    def __init__(
        self, spec: WorkerSpec, main: Callable, on_message: Callable, threads: ThreadPoolExecutor
    ):
        """Start `main(spec, connection)` in a process of its own.

        `on_message` is called with each message, in a thread, and with None when the process has gone.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._log_path = Path(spec.log_path)
        self._log_path.touch()
        self._log_start = self._log_path.stat().st_size  # a restarted worker appends
        # Not a daemon process: those may have no children, and the engine is one.
        self.process = context.Process(
            target=_run, args=(main, spec, theirs), name=f"rollout-worker-{spec.placement.worker}"
        )
        self.started_at = time.monotonic()
        with _safe_path():
            self.process.start()
        theirs.close()  # so that the pipe reads as closed as soon as the worker is gone
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        # First the one that ends the other: a signal may come between the two.
        self.reading: Future = threads.submit(self._read, ours, on_message)
        """Ends with the process; holds the error if `on_message` raised one."""
        threads.submit(self._write, ours)

    def send(self, message) -> None:
        """Queue a message; never waits."""
        self._outbox.put(message)

    def _write(self, connection) -> None:
        # Only this thread closes the pipe, after both have done with it: one closed in the middle of a write may give
        # its number to the pipe of the next worker, which would then get what was meant for this one.
        with connection:
            while (message := self._outbox.get()) is not None:
                # the reading thread sees the same end and acts on it
                with contextlib.suppress(OSError):
                    connection.send(message)

    def _read(self, connection, on_message: Callable) -> None:
        try:
            while (message := _receive(connection)) is not None:
                on_message(message)
            on_message(None)
        finally:
            self._outbox.put(None)

    @property
    def exit_code(self) -> int | None:
        """Exit status; minus the signal's number if one killed it; None while it runs."""
        return self.process.exitcode

    def stop(self, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        """End the process and all that it started, after at most `timeout_s` seconds to end by itself.

        Also one whose pipe has closed: it may have left an engine and reward processes.
        """
        self.process.join(timeout=timeout_s)
        kill_session(self.process.pid)
        self.process.join()

    def death_report(self) -> str:
        """Return who died, how and why, as far as that is known, and the last lines of the log."""
        code = self.exit_code
        if code is None:
            how = "is still running and did not answer"
        else:
            how = (
                f"killed by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
        log = self._log_path.read_bytes()[self._log_start :].decode(errors="replace").splitlines()
        shown = "".join(f"\n  | {line}" for line in log[-LOG_LINES_SHOWN:])
        who = f"{self.process.name.replace('-', ' ')} (pid {self.process.pid})"
        return f"{who} {how}{cause_in(log)}; its last log lines, from {self._log_path}:{shown}"


def cause_in(log: list[str]) -> str:
    """Return the first error in the lines of a worker's log; empty without one.

    Everybody who waits for an engine says that it is dead. These errors are no cause.
    """
    errors = [
        match[0] for line in log if (match := re.search(r"[\w.]+(Error|Exception): .+", line))
    ]
    for error in errors:
        if not re.search(r"EngineDeadError|the engine is dead", error):
            return f": {error}"
    return ": its engine was killed, most likely for want of memory" if errors else ""


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Have processes that are started, and those of vLLM, not look in the current folder for Python's own modules."""
    given = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = given or SAFE_PATH
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if given is not None:
            os.environ["PYTHONSAFEPATH"] = given


def end_safe_path() -> None:
    """Let programs that a worker starts import what lies beside them, unless the user has set PYTHONSAFEPATH."""
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]


def _run(main: Callable, spec: WorkerSpec, connection) -> None:
    """Run a worker in its process. Whatever it raises ends the process at once.

    multiprocessing would first wait for the engine, which nobody ends, and print the error afterwards.
    """
    try:
        main(spec, connection)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _receive(connection):
    """The next message, or None when the other end is gone, however the system says so."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
