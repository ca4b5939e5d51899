"""Processes: how they end, with a parent or all together, and their signals, memory and cores."""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import psutil

GARBAGE_THRESHOLD = 10_000
"""New objects between two garbage collections; the default is 700, and 2,000 from Python 3.13 on. It is set before
torch and vLLM are imported. They make a million objects, and repeated collections took a tenth of the time."""
gc.set_threshold(GARBAGE_THRESHOLD)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES, LARGEST_KEPT = 1 << 30, 32 << 20
"""Freed memory that malloc keeps in its heap; largest piece that it allocates there, malloc's maximum."""
LONGEST_TMPDIR = 50
"""Bytes of the longest path. A folder (14) and a socket (37) are added, and a socket's path has at most 107."""
FIRST_PARENT = os.getppid()
"""Parent's pid at import. It is read now, because the parent can end while torch is imported."""
STUCK_S = 4.0
LEFT_S = 30.0
"""Time until a rank ends that another rank left without a signal, seconds. It can be writing a last record."""
LOST_POLL_S = 1.0
"""Time that a rank has to begin its end after torchrun's signal."""
# with torchrun's variables a child would take itself for a trainer rank
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "MASTER_", "PET_", "ROLE_", "GROUP_")
RUN_ID = "TORCHELASTIC_RUN_ID"
TORCHRUN_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
"""Signals that ask a run to stop. SIGHUP, the end of a terminal, stays ignored under nohup."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOP_SIGNALS.append(signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the run to stop. Arguments: the reason, and the exit status.

    It is no Exception, because foreign code that runs at the time may catch every Exception.
    """

    def __str__(self) -> str:
        return self.args[0]


class RolloutEnded(RuntimeError):
    """No more responses can be sampled. The state of the run is valid, and can be saved."""


class CannotContinue(RuntimeError):
    """Rollout has ended on a node. All ranks raise it between the same two steps, so they can save the run."""


EXPECTED = (Interrupted, ValueError, OSError, RuntimeError)
"""Errors that end a run in one line. Any other error is a bug, and prints a traceback."""


def run_job(job: Callable[[], None]) -> None:
    """Run a job. Turn every expected error into one line and an exit status; 0 is for a finished job only."""
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        job()
    except EXPECTED as error:
        print_end(error)
        sys.exit(status_of(error))


def status_of(error: BaseException) -> int:
    """Return the exit status of a run that an error ends."""
    if isinstance(error, Interrupted):
        return error.args[1]
    if isinstance(error, SystemExit) and error.code in range(1, 256):
        return error.code
    return 2 if isinstance(error, ValueError) else 1


def _interrupt(number: int, frame) -> None:
    # Foreign code may lose the exception, so the handler stays for the next signal.
    raise Interrupted(f"stopped by {signal.Signals(number).name}", 128 + number)


def print_end(error: BaseException) -> None:
    """Print why the run ends. torchrun prints it again in its own report. A stop that was asked for is no error."""
    reason = str(error) if isinstance(error, EXPECTED) else repr(error)
    line = reason if isinstance(error, Interrupted) else f"error: {reason}"
    print(line, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the disk may be full
            Path(path).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))


def end_by(error: BaseException, take_down: Callable[[], None]) -> NoReturn:
    """End this rank, one of several, by an error. Print it, call `take_down`, and destroy no process group.

    NCCL's destruction waits for ranks that may be waiting for this one (pytorch#141510).
    """
    try:
        print_end(error)
        if not isinstance(error, EXPECTED):
            traceback.print_exception(error)
        take_down()
        sys.stdout.flush()
    finally:
        os._exit(status_of(error))


def folder_of_sockets() -> tempfile.TemporaryDirectory:
    """Make a temporary folder for engines' files, in /tmp if a socket's path in TMPDIR would be too long."""
    folder = tempfile.gettempdir()
    place = folder if len(os.fsencode(folder)) <= LONGEST_TMPDIR else "/tmp"
    return tempfile.TemporaryDirectory(prefix="vllm-", dir=place, ignore_cleanup_errors=True)


def end_session() -> NoReturn:
    """End this process at once, and if it leads a session, all processes of its group.

    An engine that is split over GPUs watches no parent, and would keep their memory.
    """
    if os.getsid(0) == os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def exit_with_parent(poll_s: float = 1.0) -> None:
    """Start a daemon thread that ends this session within `poll_s` seconds of its parent's death, also an earlier one.

    PR_SET_PDEATHSIG would fire when the *thread* ends that started this process.
    """
    starter = multiprocessing.parent_process()  # known even if it is dead
    parent = FIRST_PARENT if starter is None else starter.pid

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        end_session()

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def end_if_stuck() -> None:
    """Start a daemon thread that ends this rank if a rank is lost and a signal has no effect.

    No signal handler runs while the main thread is in a collective of NCCL. If a rank is lost, torchrun signals each
    rank. After Ctrl-C it sends no second signal, so the thread looks for a lost rank then.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        os.read(reader, 1)
        wait_s = STUCK_S
        while not has_lost_a_rank():
            is_signalled, _, _ = select.select([reader], [], [], LOST_POLL_S)
            wait_s = STUCK_S if is_signalled and os.read(reader, 1) else LEFT_S
        time.sleep(wait_s)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            os._exit(1)

    threading.Thread(target=watch, name="end-if-stuck", daemon=True).start()


def ignore_signals() -> None:
    """Ignore further signals while the run ends. Otherwise processes would be left behind."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def freeze_garbage() -> None:
    """Exempt all current objects from garbage collection: a million of torch, transformers and vllm."""
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory, in this process and processes that it forks.

    Each step frees and allocates the same tensors. Page faults would make a small step some percent longer.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
    libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def run_on(pid: int, cores: Iterable[int]) -> None:
    """Restrict all threads of a process, and threads that they start, to these CPU cores."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def without_torchrun(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN_PREFIXES)
    }


def kill_session(pid: int, timeout_s: float = 10.0) -> None:
    """Kill a process that called os.setsid, and all processes that it started. Wait until they have ended.

    A dying engine still holds memory of its GPU. Processes that have ended already are no error.
    """
    members = _session_members(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # reaches children of dead parents, too
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    deadline = time.monotonic() + timeout_s
    while any(map(_has_not_ended, members)) and time.monotonic() < deadline:
        time.sleep(0.01)


def kill_with_sessions(process: subprocess.Popen, grace_s: float = 0.0) -> None:
    """Kill a process that leads a session, and its descendants, also descendants in other sessions.

    With `grace_s` the process first gets SIGTERM and this time to end.
    """
    descendants = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        descendants = psutil.Process(process.pid).children(recursive=True)
    if grace_s:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    for pid in (process.pid, *(descendant.pid for descendant in descendants)):
        kill_session(pid)
    process.wait()


def _has_not_ended(process: psutil.Process) -> bool:
    """Return whether a process can still hold memory. A zombie does not: only its parent has not noticed its end."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _session_members(pid: int) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if process.pid == pid or os.getsid(process.pid) == pid:
                members.append(process)
    return members


def has_lost_a_rank() -> bool:
    """Return whether a rank of this node has ended. torchrun then ends the other ranks by SIGTERM."""
    if RUN_ID not in os.environ:
        return False
    num_alive = sum(map(_has_not_ended, psutil.Process(os.getppid()).children()))
    return num_alive < int(os.environ["LOCAL_WORLD_SIZE"])
