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


def watch_for_stopped(limit_s: float) -> Callable[[], None]:
    """Fork a process that kills each process of this node's run that is stopped for `limit_s` seconds.

    Return a function that ends it. Call this before there are threads. A stopped process looks alive to processes that
    wait for it. The watchdog ends with its rank.
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
        os.kill(watchdog, signal.SIGKILL)
        os.waitpid(watchdog, 0)

    return end


def _watch(root: psutil.Process, parent: int, limit_s: float) -> None:
    """Kill stopped processes among `root` and its descendants until the process `parent` has ended.

    Seconds are counted, not read from a clock, because this process may have been stopped, too.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    setproctitle("watch for stopped processes")
    poll_s = max(0.1, min(1.0, limit_s / 10))
    stopped_s: dict[psutil.Process, float] = {}
    while os.getppid() == parent:
        time.sleep(poll_s)
        members = []
        with contextlib.suppress(psutil.NoSuchProcess):
            members = [root, *root.children(recursive=True)]
        stopped = [process for process in members if _is_stopped(process)]
        stopped_s = {process: stopped_s.get(process, 0.0) + poll_s for process in stopped}
        for process, seconds in stopped_s.items():
            if seconds >= limit_s:
                line = f"error: {title(process)} was stopped (SIGSTOP) for {limit_s:g} s, and is killed\n"
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    os.write(2, line.encode())
                    process.kill()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
