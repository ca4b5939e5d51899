"""What runs in the processes that score: a template that has imported what is slow, and the scorers forked from it.

A scorer reads text that a model wrote, so it runs under limits, which hold for whatever it starts as well:

memory      address space: MEMORY_BYTES beyond what the template has
files       no byte is written to any (RLIMIT_FSIZE), 64 are open at most, and where namespaces are allowed all file
            systems are read-only
processes   none can be started (RLIMIT_NPROC, which does not bind root); root's end with the response, whatever they
            do, where namespaces are allowed, and elsewhere with the run
network     none, where namespaces are allowed
privileges  none to be had by exec (no_new_privs); where namespaces are allowed no capability either, and no other
            process can be seen or signalled
time        the pool kills one that takes too long; RLIMIT_CPU ends what is left of it soon after

Async functions of the user's own keep the network, may open more files and start threads, which look up names, and so
processes; the pool alone keeps their time. RLIMIT_NOFILE and RLIMIT_CPU are not set for them.

Not contained: reading files and environment variables, sockets in the file system of the same user (an engine's are
some), the time of a core up to the limit, and as root a burst of forks until then. Namespaces (user, mount, network,
process, IPC) want Linux 5.12, and many containers forbid them; the log says so then.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import math
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable

import psutil
from setproctitle import setproctitle

from asyncrl.cluster.processes import freeze_garbage
from asyncrl.engine.score import Score, Scored, load_score, one_line

MEMORY_BYTES = 2 << 30
_LIMITS_OF_ASYNC = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
_LIMITS = {**_LIMITS_OF_ASYNC, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 0}
# user, mount, pid, ipc: sched.h
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000
_NEW_NETWORK = 0x40000000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the same number on all machines
# struct mount_attr: MOUNT_ATTR_RDONLY, MS_PRIVATE
_READ_ONLY_AND_PRIVATE = struct.pack("4Q", 1, 0, 1 << 18, 0)
# capset's header (version 3) and sets
_NO_CAPABILITIES = struct.pack("2I", 0x20080522, 0), bytes(24)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_libc = ctypes.CDLL(None, use_errno=True)


def run_template(
    descriptor: int, task: str, rewards: list[str], is_async: bool, title: str
) -> None:
    """Import what scoring needs, by plain functions or by async ones, then fork a scorer for each socket that comes
    over the socket of that descriptor, until that closes.

    The scorer's pid is the first line on that socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle(title)
    control = socket.socket(fileno=descriptor)
    if slow := {"gsm8k": "math_verify", "reasoning_gym": "reasoning_gym"}.get(
        task.partition(":")[0]
    ):
        importlib.import_module(slow)  # it must not eat the time of the first response
    score = load_score(task, rewards).of(is_async)
    freeze_garbage()
    if reason := _why_no_namespaces(is_async):
        print(
            f"warning: {title}: no namespaces ({reason}): network and files are not contained",
            flush=True,
        )
    while True:
        _, sockets, _, _ = socket.recv_fds(control, 4, 1)
        if not sockets:
            os._exit(0)  # whoever asks is gone, and scorers go with this process
        with contextlib.suppress(ChildProcessError):  # it has no child
            while os.waitpid(-1, os.WNOHANG)[0]:  # bury the dead
                pass
        pid = os.fork()
        if pid == 0:
            _run_scorer(sockets[0], score, not reason)
        os.write(sockets[0], b"%d\n" % pid)
        os.close(sockets[0])


def _why_no_namespaces(keeps_network: bool = False) -> str:
    """What the kernel says when a process asks for namespaces; empty if it gives them."""
    if (pid := os.fork()) == 0:
        status = 0
        try:
            _enter_namespaces(keeps_network)
        except OSError as error:
            status = error.errno
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return os.strerror(code) if code else ""


def _enter_namespaces(keeps_network: bool) -> None:
    """Have all file systems read-only, no network unless it is kept, and what is forked from here on in a process space
    of its own."""
    _call(_libc.unshare, _NEW_NAMESPACES if keeps_network else _NEW_NAMESPACES | _NEW_NETWORK)
    of_mount = _AT_FDCWD, b"/", _AT_RECURSIVE, _READ_ONLY_AND_PRIVATE, len(_READ_ONLY_AND_PRIVATE)
    _call(_libc.syscall, _SYS_MOUNT_SETATTR, *of_mount)


def _call(function, *arguments) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run_scorer(descriptor: int, score: Score, in_namespaces: bool) -> None:
    """Serve one socket under all limits, or answer with what forbids them; never returns."""
    connection = socket.socket(fileno=descriptor)
    try:
        _keep_only(descriptor)
        _contain(score.is_async, in_namespaces)
        if score.is_async:
            asyncio.run(_serve_together(connection, score))
        else:
            _serve(connection, score)
    except (OSError, MemoryError) as error:  # it cannot be set up, or whoever asks is gone
        _send(connection.sendall, 0, one_line(error))
    finally:
        os._exit(0)


def _contain(is_async: bool, in_namespaces: bool) -> None:
    """Put this process under all limits; returns in a process forked from it where there are namespaces."""
    memory = psutil.Process().memory_info().vms + MEMORY_BYTES
    os.setpgid(0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as badness:
        badness.write("1000")  # the first to go when memory runs out
    if in_namespaces:
        _enter_namespaces(is_async)
        if scorer := os.fork():  # the first process of its space: all others there end with it
            _die_with_parent()
            os._exit(bool(os.waitpid(scorer, 0)))
        _call(_libc.capset, *_NO_CAPABILITIES)
    _die_with_parent()
    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = _LIMITS_OF_ASYNC if is_async else _LIMITS
    for limit, most in {**limits, resource.RLIMIT_AS: memory}.items():
        resource.setrlimit(limit, (most, most))


def _keep_only(descriptor: int) -> None:
    """Close all files but one; what a scorer prints would fill a log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != descriptor:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


def _die_with_parent() -> None:
    """Have the kernel end this process with the one that forked it, which has one thread."""
    _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(connection: socket.socket, score: Score) -> None:
    """Read lines of JSON, [number, limit in seconds, answer, response]; answer each with [number, reward, parts], or
    with [number, why there is no reward]."""
    # nobody else would bury what a response has started
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in connection.makefile("rb"):
        number, timeout_s, answer, response = json.loads(line)
        cpu_s = math.ceil(time.process_time() + timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        try:
            outcome = score(answer, response)
        except BaseException as error:
            # foreign code may have set an alarm, say, that comes after it
            outcome = (one_line(error),)
        # in a process space of its own: what a response has started ends with it
        if os.getpid() == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        _send(connection.sendall, number, *outcome)


async def _serve_together(connection: socket.socket, score: Score) -> None:
    """As _serve by async functions: all responses at once, each with its own limit."""

    async def serve(number: int, timeout_s: float, answer: str, response: str) -> None:
        scoring = asyncio.ensure_future(score.wait(answer, response))
        await asyncio.wait({scoring}, timeout=timeout_s)
        outcome: Scored | tuple[str] = (f"{score}timed out after {timeout_s:g} s",)
        if not scoring.cancel():  # it has ended
            outcome = (str(scoring.exception()),) if scoring.exception() else scoring.result()
        _send(writer.write, number, *outcome)

    reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 30)
    async with asyncio.TaskGroup() as serving:
        while line := await reader.readline():
            serving.create_task(serve(*json.loads(line)))


def _send(send: Callable[[bytes], object], number: int, *outcome) -> None:
    """Answer a response. After one that took all memory the process ends, and the next response has another."""
    send(json.dumps([number, *outcome]).encode() + b"\n")
    if "MemoryError" in str(outcome[0]):
        os._exit(0)
