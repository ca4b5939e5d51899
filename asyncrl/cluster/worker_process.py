"""A rollout worker's process, its pipe and its log.

One thread reads the pipe and another writes it, so the trainer never waits for a slow or dead worker. Workers share no
queue. A process that is killed while it holds a queue's lock blocks all other processes.
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
END_TIMEOUT_S = 10.0
SAFE_PATH = "by the run"
"""PYTHONSAFEPATH of a worker while its engine starts. Any text turns it on."""


class WorkerProcess:
    """A worker's process, its pipe and its log."""

    def __init__(
        self, spec: WorkerSpec, main: Callable, on_message: Callable, threads: ThreadPoolExecutor
    ):
        """Start `main(spec, connection)` in a process.

        A thread calls `on_message` with each message, and with None when the process has ended.
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._log_path = Path(spec.log_path)
        self._log_path.touch()
        self._log_start = self._log_path.stat().st_size  # a restarted worker appends
        # not a daemon process, because daemons can have no children, such as the engine
        self.process = context.Process(
            target=_run, args=(main, spec, theirs), name=f"rollout worker {spec.placement.worker}"
        )
        self.started_at = time.monotonic()
        with _safe_path():
            self.process.start()
        theirs.close()  # the pipe then ends with the worker
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        # first, because it ends the other thread, and a signal may come between the two
        self.reading: Future = threads.submit(self._read, ours, on_message)
        """Ends with the process. It has the error if `on_message` raised one."""
        threads.submit(self._write, ours)

    def send(self, message) -> None:
        """Queue a message; never waits."""
        self._outbox.put(message)

    def _write(self, connection) -> None:
        # Only this thread closes the pipe, after both threads have finished. If it were closed during a write, the next
        # worker's pipe could get its number and the rest of the message.
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
        """Exit status, or minus the number of the signal that killed it; None while it runs."""
        return self.process.exitcode

    def stop(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Wait at most `timeout_s` seconds for the end of the process. Then kill it and all processes that it started.

        A dead process may have left an engine and reward processes.
        """
        self.process.join(timeout=timeout_s)
        kill_session(self.process.pid)
        self.process.join()

    def death_report(self) -> str:
        """Return the death line, and the last lines of the log."""
        shown = "".join(f"\n  | {line}" for line in self._log_lines()[-LOG_LINES_SHOWN:])
        return f"{self.death_line()}; its last log lines, from {self._log_path}:{shown}"

    def death_line(self) -> str:
        """Return which process died, how and why, if known."""
        code = self.exit_code
        if code is None:
            how = "is still running and did not answer"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        who = f"{self.process.name} (pid {self.process.pid})"
        return f"{who} {how}{cause_in(self._log_lines())}"

    def _log_lines(self) -> list[str]:
        """Return what this process has written to its log."""
        return self._log_path.read_bytes()[self._log_start :].decode(errors="replace").splitlines()


def cause_in(log: list[str]) -> str:
    """Return the first error in the lines of a worker's log; empty without one.

    All callers that wait for a dead engine report its death. These errors are no cause.
    """
    errors = [
        match[0] for line in log if (match := re.search(r"[\w.]+(Error|Exception): .+", line))
    ]
    for error in errors:
        if not re.search(r"EngineDeadError|the engine is dead", error):
            return f": {error}"
    return ": its engine was killed, most likely because memory ran out" if errors else ""


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Make processes that start, also vLLM's, not import Python's own modules from the current folder."""
    given = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = given or SAFE_PATH
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if given is not None:
            os.environ["PYTHONSAFEPATH"] = given


def end_safe_path() -> None:
    """Allow programs that a worker starts to import files beside them, unless the user has set PYTHONSAFEPATH."""
    if os.environ.get("PYTHONSAFEPATH") == SAFE_PATH:
        del os.environ["PYTHONSAFEPATH"]


def _run(main: Callable, spec: WorkerSpec, connection) -> None:
    """Run a worker in its process. Any error ends the process at once.

    Before it prints the error, multiprocessing would wait for the engine, without end.
    """
    try:
        main(spec, connection)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _receive(connection):
    """Return the next message, or None if the other end is closed."""
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
