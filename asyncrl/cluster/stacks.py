"""The Python stacks of all processes of a run, in one file. A timeout writes them."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from asyncrl.cluster.processes import RUN_ID

STACKS_FILE = "ASYNC_RL_STACKS"
"""Environment variable with the file for the stacks of a run's processes."""
DUMP_S = 0.2
"""Time that a process has to write its stacks."""


def run_root() -> psutil.Process:
    """Return the first process of this node's run: torchrun's agent, or else the trainer or the joined host's process.

    Call it in a trainer rank, or in a process that a rank started.
    """
    process = psutil.Process()
    if multiprocessing.parent_process() is not None:
        process = process.parent()
    return process.parent() if RUN_ID in os.environ else process


def title(process: psutil.Process) -> str:
    """Return the title of a process in ps, at most 60 characters, and its pid."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline()).split()  # an argument can have several lines
        return f"{' '.join(words)[:60]} (pid {process.pid})"
    return f"process {process.pid}"


def write_stacks_to(path: Path | None = None) -> None:
    """Make this process, and processes that it starts later, append the stacks of all threads to a file at SIGUSR1.

    Without a path it is the parent's file, or stderr.
    """
    if path is not None:
        os.environ[STACKS_FILE] = str(path)
    name = os.environ.get(STACKS_FILE)
    file = open(name, "a", encoding="utf-8") if name else sys.stderr  # noqa: SIM115 (the handler keeps it)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def dump_stacks(pid: int | None = None) -> str:
    """Make a process and its descendants dump their Python stacks; by default all processes of this node's run.

    Only processes with a handler for SIGUSR1 get it: the signal would end other processes. This process dumps its
    stacks under the interpreter's lock, because frames may change during a signal's handler.
    Return the place of the stacks, for an error line. No error is raised if the file cannot be written.
    """
    name = os.environ.get(STACKS_FILE)
    with (
        contextlib.suppress(psutil.NoSuchProcess, OSError),
        open(name, "a") if name else os.fdopen(os.dup(2), "w") as file,
    ):
        root = run_root() if pid is None else psutil.Process(pid)
        for member in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                print(
                    f"\n=== {title(member)}, {member.status()}, {time.strftime('%H:%M:%S')}",
                    file=file,
                    flush=True,
                )
                if member.pid == os.getpid():
                    faulthandler.dump_traceback(file=file, all_threads=True)
                elif _handles_sigusr1(member.pid):
                    os.kill(member.pid, signal.SIGUSR1)
                    time.sleep(DUMP_S)
    return f"stacks of all processes are in {name or 'what this process printed'}"


def _handles_sigusr1(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)
