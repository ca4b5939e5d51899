"""Processes that stand still: their stacks go to one file of the run, and those that were stopped are killed."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
from setproctitle import setproctitle

RUN_ID = "TORCHELASTIC_RUN_ID"
"""Environment variable of torchrun's ranks."""
STACKS_FILE = "ASYNC_RL_STACKS"
"""Environment variable: the file to which the processes of a run write their stacks."""
ALONE_S = 5.0
"""Time that torchrun's agent has to end after its ranks, or to be seen to be stopped."""
DUMP_S = 0.2
"""Time that a process has to write its stacks."""
_kept_open: list = []


def run_root() -> psutil.Process:
    """The first process of this node's run: torchrun's agent; without one the trainer, or what it is on a joined
    machine. For trainer ranks."""
    process = psutil.Process()
    if multiprocessing.parent_process() is not None:
        process = process.parent()
    return process.parent() if RUN_ID in os.environ else process


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
        if root.pid == parent:
            os.waitpid(pid, 0)

    return end


def _look_for_stopped(root: psutil.Process, parent: int, limit_s: float) -> None:
    """Look until the processes `parent` and `root` have ended, or SIGTERM has come where they are the same.

    A `root` that goes on without its rank, and is not stopped, is left alone: it is not the agent, if that was killed
    before this began. Time is that which was waited here, not the clock's: this process may have been stopped, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
        stopped_s = Counter({p: stopped_s[p] + poll_s for p in alive if _status(p) == psutil.STATUS_STOPPED})
        for process in [process for process, seconds in stopped_s.items() if seconds >= limit_s]:
            reason = f"error: {_title(process)} was stopped (SIGSTOP) for {limit_s:g} s, and is killed"
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                os.write(2, f"{reason}\n".encode())
                process.kill()


def _status(process: psutil.Process) -> str | None:
    """What the process does, by psutil's constants; None if it has gone."""
    try:
        return process.status() if process.is_running() else None
    except psutil.NoSuchProcess:
        return None


def _title(process: psutil.Process) -> str:
    """What ps calls a process, as far as it says which one it is, and its pid."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{' '.join(process.cmdline()).strip()[:60]} (pid {process.pid})"
    return f"process {process.pid}"


def write_stacks_to(path: Path | None = None) -> None:
    """Have this process, and those that it will start, append the Python stacks of all its threads to a file at
    SIGUSR1; by default to that of who started it, or stderr."""
    if path is not None:
        os.environ[STACKS_FILE] = str(path)
    name = os.environ.get(STACKS_FILE)
    file = open(name, "a", encoding="utf-8") if name else sys.stderr  # noqa: SIM115 (the handler needs it open)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    _kept_open.append(file)


def dump_stacks(pid: int | None = None) -> str:
    """Have a process and its descendants, by default all of this node's run, dump their Python stacks. Returns, for an
    error line, where they are.

    Only processes that registered a handler for SIGUSR1 are asked: the signal would end the others. This process dumps
    its own stacks while it holds the interpreter's lock: a signal's handler would walk frames that may be changing.
    """
    name = os.environ.get(STACKS_FILE)
    with contextlib.suppress(psutil.NoSuchProcess), open(name, "a") if name else os.fdopen(os.dup(2), "w") as file:
        root = run_root() if pid is None else psutil.Process(pid)
        for member in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                print(f"\n=== {_title(member)}, {member.status()}, {time.strftime('%H:%M:%S')}", file=file, flush=True)
            if member.pid == os.getpid():
                faulthandler.dump_traceback(file=file, all_threads=True)
            elif _handles_sigusr1(member.pid):
                os.kill(member.pid, signal.SIGUSR1)
                time.sleep(DUMP_S)
    return f"stacks of all processes are in {name}" if name else "stacks are in what this process printed"


def _handles_sigusr1(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
