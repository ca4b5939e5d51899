"""A process beside every trainer rank. It kills processes that are stopped (SIGSTOP) for too long, and names them."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil
from setproctitle import setproctitle

from asyncrl.cluster.processes import STOP_SIGNALS
from asyncrl.cluster.stacks import run_root, title

ALONE_S = 5.0
"""Time that torchrun's agent has to end after its rank, unless the agent is stopped."""


def watch_for_stopped(limit_s: float) -> Callable[[], None]:
    """Fork a process that kills each process of this node's run that is stopped for `limit_s` seconds.

    Return a function that ends it. Call this before there are threads. A stopped process looks alive to processes that
    wait for it. The watchdog outlives its rank, because torchrun's agent may be stopped while the ranks finish.
    """
    root = run_root()
    parent = os.getpid()
    watchdog = os.fork()
    if watchdog == 0:
        try:
            _watch(root, parent, limit_s)
        finally:
            os._exit(0)

    def end() -> None:
        if root.pid == parent:
            os.kill(watchdog, signal.SIGKILL)
            os.waitpid(watchdog, 0)
        else:
            os.kill(
                watchdog, signal.SIGCONT
            )  # it ends after the agent, unless it is stopped itself

    return end


def _watch(root: psutil.Process, parent: int, limit_s: float) -> None:
    """Kill stopped processes until `root`, and with it the run, has ended.

    If the root continues without `parent` and is not stopped, it is no agent: the agent was killed earlier.
    Seconds are counted, not read from a clock, because this process may have been stopped, too.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    setproctitle("watch for stopped processes")
    poll_s = max(0.1, min(1.0, limit_s / 10))
    alone_s = 0.0
    stopped_s: dict[psutil.Process, float] = {}
    while _status(root) not in (None, psutil.STATUS_ZOMBIE) and alone_s < ALONE_S:
        time.sleep(poll_s)
        if os.getppid() != parent and _status(root) != psutil.STATUS_STOPPED:
            alone_s += poll_s
        members = []
        with contextlib.suppress(psutil.NoSuchProcess):
            members = [root, *root.children(recursive=True)]
        stopped = [process for process in members if _status(process) == psutil.STATUS_STOPPED]
        stopped_s = {process: stopped_s.get(process, 0.0) + poll_s for process in stopped}
        for process, seconds in stopped_s.items():
            if seconds >= limit_s:
                line = f"error: {title(process)} was stopped (SIGSTOP) for {limit_s:g} s, and is killed\n"
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    os.write(2, line.encode())
                    process.kill()


def _status(process: psutil.Process) -> str | None:
    """Return one of psutil's constants; None if the process has gone."""
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None
