"""Small facts about processes that several of ours need: dying with the parent, being stopped, and dumping stacks."""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

GARBAGE_THRESHOLD = 10_000
"""Objects made and not freed until Python looks for cycles; by default 700."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES, LARGEST_KEPT = 1 << 30, 32 << 20
"""Freed memory that malloc keeps at the top of its heap; largest piece that it takes from there, the most it allows."""
STACKS_FILE = "ASYNC_RL_STACKS"
"""Environment variable: the file to which the processes of a run write their stacks."""
DUMP_S = 0.2
"""Time that a process has to write its stacks."""
# torchrun's variables would make a child believe that it is a trainer rank.
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "MASTER_", "PET_", "ROLE_", "GROUP_")
RUN_ID = "TORCHELASTIC_RUN_ID"
TORCHRUN_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class Interrupted(Exception):
    """Somebody asked the run to stop: what to say, and its exit status."""

    def __str__(self) -> str:
        return self.args[0]


def exit_with_parent(poll_s: float = 1.0) -> None:
    """Start a daemon thread that ends this process within `poll_s` seconds of its parent's death.

    A thread and not PR_SET_PDEATHSIG: that one fires when the *thread* ends that started us, which may be a short one.
    """
    starter = multiprocessing.parent_process()  # known even if it died before this process got here
    parent = os.getppid() if starter is None else starter.pid

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def ignore_signals() -> None:
    """Let the way down not be interrupted again: processes would be left behind."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def freeze_garbage() -> None:
    """Take what is alive now out of garbage collection, and collect the rest less often.

    The modules of torch, transformers and vllm are a million objects, and each full collection would walk them all.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)


def keep_freed_memory() -> None:
    """Have malloc keep what this process frees, and processes forked from it; nothing where malloc is not glibc's.

    A step frees and takes the same tensors again. Whether glibc gives their pages back in between depends on what was
    freed before; where it does, each comes back by a page fault, which made a small step some percent longer.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


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


def run_root() -> psutil.Process:
    """The first process of this node's run: torchrun's agent; without one the trainer, or what it is on a joined
    machine. For trainer ranks, and workers that have not left torchrun's variables behind yet."""
    process = psutil.Process()
    if multiprocessing.parent_process() is not None:
        process = process.parent()
    return process.parent() if RUN_ID in os.environ else process


def end_what_is_stopped(limit_s: float) -> None:
    """Start a daemon thread that kills each process of this run that was stopped (SIGSTOP) for `limit_s` seconds, and
    says so on this process's present stderr.

    A stopped process looks alive to all who wait for it. As any may be stopped, trainer ranks and workers all watch. A
    debugger's stop is another. Looks are counted, not time: whoever looks may have been stopped with the others.
    """
    root, poll_s, voice = run_root(), max(0.1, min(10.0, limit_s / 10)), os.dup(sys.stderr.fileno())

    def watch() -> None:
        looks: Counter[psutil.Process] = Counter()
        while True:
            time.sleep(poll_s)
            with contextlib.suppress(psutil.NoSuchProcess):
                looks = Counter({p: looks[p] + 1 for p in [root, *root.children(recursive=True)] if _is_stopped(p)})
            for process in [process for process, times in looks.items() if times * poll_s >= limit_s]:
                reason = f"error: {_title(process)} was stopped (SIGSTOP) for {limit_s:g} s, and is killed"
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    os.write(voice, f"{reason}\n".encode())  # first: this process may end with that one
                    process.kill()

    threading.Thread(target=watch, name="end-what-is-stopped", daemon=True).start()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


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


_kept_open: list = []


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


def has_lost_a_rank(num_ranks: int) -> bool:
    """Whether fewer than torchrun's `num_ranks` ranks of this node are alive; it then ends the others by SIGTERM."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return False
    return sum(map(_has_not_ended, psutil.Process(os.getppid()).children())) < num_ranks


def _handles_sigusr1(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
