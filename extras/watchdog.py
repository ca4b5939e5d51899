"""A process beside every trainer rank that kills what was stopped (SIGSTOP) for too long, and names it."""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable

import psutil
from setproctitle import setproctitle

from asyncrl.cluster.stacks import run_root, title

ALONE_S = 5.0
"""Time that torchrun's agent has to end after its ranks, or to be seen to be stopped."""


def end_what_is_stopped(limit_s: float) -> Callable[[], None]:
    """Fork a process that kills each process of this node's run that was stopped (SIGSTOP) for `limit_s` seconds, and
    says so on stderr. Returns what ends it. To be called before there are threads.

    A stopped process looks alive to all who wait for it; this one waits for nobody. A debugger's stop is another, and
    Ctrl-Z stops this process too. It outlives a rank until torchrun's agent has ended, which may be stopped while the
    ranks finish: after them there is nobody else who would see it.
    """
    root, parent = run_root(), os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which is waited for there
    if (pid := os.fork()) == 0:
        try:
            _look_for_stopped(root, parent, limit_s)
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def end() -> None:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # one that is itself stopped would never take the signal
        if root.pid == parent:
            os.waitpid(pid, 0)

    return end


def _look_for_stopped(root: psutil.Process, parent: int, limit_s: float) -> None:
    """Look until the processes `parent` and `root` have ended, or SIGTERM has come where they are the same.

    A `root` that goes on without its rank, and is not stopped, is left alone: it is not the agent, if that was killed
    before this began. Time is that which was waited here, not the clock's: this process may have been stopped, too.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    setproctitle("watch for stopped processes")
    poll_s, alone_s, stopped_s = max(0.1, min(2.0, limit_s / 10)), 0.0, Counter()
    while _status(root) not in (None, psutil.STATUS_ZOMBIE) and alone_s < ALONE_S:
        is_told = signal.sigtimedwait({signal.SIGTERM}, poll_s)
        if is_told and root.pid == parent:
            return
        if is_told or os.getppid() != parent:
            poll_s = 0.1
        if os.getppid() != parent and _status(root) != psutil.STATUS_STOPPED:
            alone_s += poll_s
        alive = []
        with contextlib.suppress(psutil.NoSuchProcess):
            alive = [root, *root.children(recursive=True)]
        stopped_s = Counter(
            {p: stopped_s[p] + poll_s for p in alive if _status(p) == psutil.STATUS_STOPPED}
        )
        for process in [process for process, seconds in stopped_s.items() if seconds >= limit_s]:
            reason = (
                f"error: {title(process)} was stopped (SIGSTOP) for {limit_s:g} s, and is killed"
            )
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                os.write(2, f"{reason}\n".encode())
                process.kill()


def _status(process: psutil.Process) -> str | None:
    """What the process does, by psutil's constants; None if it has gone."""
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None
