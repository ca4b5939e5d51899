"""Small facts about processes that several of ours need: how they end, with the parent or all together, memory, and
cores."""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
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
"""Objects made and not freed until Python looks for cycles; by default 700. Set before torch and vLLM are imported:
they make a million objects that stay, and to look among them again and again took a tenth of the time."""
gc.set_threshold(GARBAGE_THRESHOLD)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES, LARGEST_KEPT = 1 << 30, 32 << 20
"""Freed memory that malloc keeps at the top of its heap; largest piece that it takes from there, the most it allows."""
LONGEST_TMPDIR = 50
"""Bytes of a path to which a folder, 14, and a socket, 37, can be added. A socket has at most 107."""
FIRST_PARENT = os.getppid()
"""Of this process, if it was not forked: an orphan has another one by the time that torch and the rest are imported."""
STUCK_S = 4.0
"""Time in which a rank must have begun its way down after torchrun's signal."""
# torchrun's variables would make a child believe that it is a trainer rank.
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
"""Signals that ask a run to stop. nohup has SIGHUP, the end of a terminal, ignored: then it stays so."""
if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
    STOP_SIGNALS.append(signal.SIGHUP)


class Interrupted(BaseException):
    """Somebody asked the run to stop: what to say, and its exit status.

    No Exception: a signal may come while code of others runs, which catches those.
    """

    def __str__(self) -> str:
        return self.args[0]


class RolloutEnded(RuntimeError):
    """No more can be sampled, by no fault of this code. The state of the run is as it should be, and can be saved."""


class CannotContinue(RuntimeError):
    """Rollout has ended on a node. All ranks raise it together, between two steps, so they can save the run."""


EXPECTED = (Interrupted, ValueError, OSError, RuntimeError)
"""Errors that end a run in one line; any other is a fault of the code, and shows where."""


def run_job(job: Callable[[], None]) -> None:
    """Run a job, and turn every way to end into one line and an exit status: 0 is for a finished job only."""
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)
    try:
        job()
    except EXPECTED as error:
        print_error(str(error))
        sys.exit(status_of(error))


def status_of(error: BaseException) -> int:
    """Return the exit status of a run that an error ends."""
    if isinstance(error, Interrupted):
        return error.args[1]
    if isinstance(error, SystemExit) and error.code in range(1, 256):
        return error.code
    return 2 if isinstance(error, ValueError) else 1


def _interrupt(number: int, frame) -> None:
    # What runs may lose the exception, so the next signal is heard until somebody has caught one.
    raise Interrupted(f"stopped by {signal.Signals(number).name}", 128 + number)


def print_error(reason: str) -> None:
    """Print why the run ends, and have torchrun say it again at the end of its own report."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": f"error: {reason}", "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the disk may be full
            Path(path).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))


def end_by(error: BaseException, take_down: Callable[[], None]) -> NoReturn:
    """End this rank, one of several, by an error: its reason comes first, and no process group is destroyed.

    NCCL's destruction waits for ranks that may be waiting for this one (pytorch#141510).
    """
    is_expected = isinstance(error, EXPECTED)
    try:
        print_error(str(error) if is_expected else repr(error))
        if not is_expected:
            traceback.print_exception(error)
        take_down()
        sys.stdout.flush()
    finally:
        os._exit(status_of(error))


def folder_of_sockets() -> tempfile.TemporaryDirectory:
    """Make a temporary folder for the files of engines, in /tmp if the path of a socket in TMPDIR would be too long."""
    folder = tempfile.gettempdir()
    place = folder if len(os.fsencode(folder)) <= LONGEST_TMPDIR else "/tmp"
    return tempfile.TemporaryDirectory(prefix="vllm-", dir=place, ignore_cleanup_errors=True)


def exit_with_parent(poll_s: float = 1.0) -> None:
    """Start a daemon thread that ends this process within `poll_s` seconds of its parent's death, also an earlier one.

    A thread and not PR_SET_PDEATHSIG: that one fires when the *thread* ends that started us, which may be a short one.
    """
    starter = multiprocessing.parent_process()  # known even if it died before this process got here
    parent = FIRST_PARENT if starter is None else starter.pid

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def end_if_stuck() -> None:
    """Start a daemon thread that ends this rank if torchrun's signal for a lost one has no effect.

    The main thread may stand in a collective of NCCL, where no handler of a signal runs.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reader, 1) and not has_lost_a_rank():
            pass
        time.sleep(STUCK_S)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
            os._exit(1)

    threading.Thread(target=watch, name="end-if-stuck", daemon=True).start()


def ignore_signals() -> None:
    """Let the way down not be interrupted again: processes would be left behind."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def freeze_garbage() -> None:
    """Take what is alive now out of garbage collection.

    The modules of torch, transformers and vllm are a million objects, and each full collection would walk them all.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Have malloc keep what this process frees, and processes forked from it; nothing where malloc is not glibc's.

    A step frees and takes the same tensors again. Whether glibc gives their pages back in between depends on what was
    freed before; where it does, each comes back by a page fault, which made a small step some percent longer.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def run_on(pid: int, cores: Iterable[int]) -> None:
    """Let all threads of a process, and those that they start, run on these CPU cores alone."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def without_torchrun(environment: dict[str, str]) -> dict[str, str]:
    """The environment with torchrun's variables taken out."""
    return {
        name: value
        for name, value in environment.items()
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN_PREFIXES)
    }


def kill_session(pid: int, timeout_s: float = 10.0) -> None:
    """SIGKILL a process that called os.setsid, and all that it started, and wait until they are gone.

    Waiting matters on a GPU: a dying engine still holds its memory. Processes already gone are no error.
    """
    members = _session_members(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # finds children whose parent is dead, too
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    deadline = time.monotonic() + timeout_s
    while any(map(_has_not_ended, members)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _has_not_ended(process: psutil.Process) -> bool:
    """Whether it may hold anything still; one that has ended does not, though whoever inherited it may not have
    noticed its end yet."""
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
    """Whether not all of torchrun's ranks of this node are alive; it then ends the others by SIGTERM."""
    if RUN_ID not in os.environ:
        return False
    num_alive = sum(map(_has_not_ended, psutil.Process(os.getppid()).children()))
    return num_alive < int(os.environ["LOCAL_WORLD_SIZE"])
