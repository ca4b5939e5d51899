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

Not contained: reading files and environment variables, sockets in the file system of the same user (an engine's are
some), the time of a core up to the limit, and as root a burst of forks until then. Namespaces (user, mount, network,
process, IPC) want Linux 5.12, and many containers forbid them; the log says so then.
"""

import contextlib
import ctypes
import importlib
import json
import math
import os
import reprlib
import resource
import signal
import socket
import struct
import time
import traceback

from setproctitle import setproctitle

from cluster.processes import freeze_garbage
from data.rewards import ScoreFunction

MEMORY_BYTES = 2 << 30
MAX_OPEN_FILES = 64
READY = b"ready"
_LIMITS = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MAX_OPEN_FILES}
_LIMITS |= {resource.RLIMIT_NPROC: 0}
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000  # user, mount, net, pid, ipc: sched.h
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the same number on all machines
_READ_ONLY_AND_PRIVATE = struct.pack("4Q", 1, 0, 1 << 18, 0)  # struct mount_attr: MOUNT_ATTR_RDONLY, MS_PRIVATE
_NO_CAPABILITIES = struct.pack("2I", 0x20080522, 0), bytes(24)  # capset's header (version 3) and sets
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_MAX_REASON = 500  # characters: an error message may quote a whole response
_libc = ctypes.CDLL(None, use_errno=True)


def run_template(control: socket.socket, score_function: ScoreFunction, task: str, title: str) -> None:
    """Import what scoring needs, then fork a scorer for each socket that comes over `control`, until that closes.

    With each comes the pid of a scorer that was killed, to be reaped, or 0; its own goes back.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle(title)
    _import(task)
    freeze_garbage()
    if reason := _why_no_namespaces():
        print(f"warning: {title}: no namespaces ({reason}): network and files are not contained", flush=True)
    control.sendall(READY)
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 64, 1)
        if not message:
            os._exit(0)  # whoever asks is gone, and scorers go with this process
        if dead := int(message):
            with contextlib.suppress(ChildProcessError):  # a template before this one had it
                os.waitpid(dead, 0)
        if (pid := os.fork()) == 0:
            _run_scorer(sockets[0], score_function, task, not reason)
        os.close(sockets[0])
        control.sendall(b"%d" % pid)


def _import(task: str) -> None:
    """Slow imports must not eat the time of the first response."""
    if task == "gsm8k":
        importlib.import_module("math_verify")
    elif task.startswith("reasoning_gym:"):
        importlib.import_module("reasoning_gym")


def _why_no_namespaces() -> str:
    """What the kernel says when a process asks for namespaces; empty if it gives them."""
    if (pid := os.fork()) == 0:
        status = 0
        try:
            _enter_namespaces()
        except OSError as error:
            status = error.errno
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return os.strerror(code) if code else ""


def _enter_namespaces() -> None:
    """Have all file systems read-only, no network, and what is forked from here on in a process space of its own."""
    _call(_libc.unshare, _NEW_NAMESPACES)
    of_mount = _AT_FDCWD, b"/", _AT_RECURSIVE, _READ_ONLY_AND_PRIVATE, len(_READ_ONLY_AND_PRIVATE)
    _call(_libc.syscall, _SYS_MOUNT_SETATTR, *of_mount)


def _call(function, *arguments) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run_scorer(descriptor: int, score_function: ScoreFunction, task: str, in_namespaces: bool) -> None:
    """Serve one socket under all limits, or answer with what forbids them; never returns."""
    connection = socket.socket(fileno=descriptor)
    try:
        memory = _address_space() + MEMORY_BYTES
        os.setpgid(0, 0)
        _keep_only(descriptor)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")  # the first to go when memory runs out
        if in_namespaces:
            _enter_namespaces()
            if scorer := os.fork():  # the first process of its space: all others there end with it
                _die_with_parent()
                os._exit(bool(os.waitpid(scorer, 0)))
            _call(_libc.capset, *_NO_CAPABILITIES)
        _die_with_parent()
        _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for limit, most in {**_LIMITS, resource.RLIMIT_AS: memory}.items():
            resource.setrlimit(limit, (most, most))
        _serve(connection, score_function, task)
    except (OSError, MemoryError) as error:  # it cannot be set up, or whoever asks is gone
        connection.sendall(json.dumps(one_line(error)).encode() + b"\n")
    finally:
        os._exit(0)


def _address_space() -> int:
    """Bytes that this process has mapped."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


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


def _serve(connection: socket.socket, score_function: ScoreFunction, task: str) -> None:
    """Read a line of JSON, [limit in seconds, [[answer, response], …]], and write one with each one's outcome."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody else would bury what a response has started
    for line in connection.makefile("rb"):
        timeout_s, items = json.loads(line)
        cpu_s = math.ceil(time.process_time() + timeout_s * len(items)) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        for answer, response in items:
            outcome = _score_item(score_function, task, answer, response)
            if os.getpid() == 1:  # in a process space of its own: what a response has started ends with it
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            connection.sendall(json.dumps(outcome).encode() + b"\n")
            if isinstance(outcome, str) and outcome.startswith("MemoryError"):
                return  # the next one is to have all its memory; the pool starts another


def _score_item(score_function: ScoreFunction, task: str, answer: str, response: str) -> float | str:
    """The reward, or one line that says why there is none."""
    try:
        reward = score_function(task, answer, response)
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            return f"the reward is {brief(reward)}, not a finite number"
        return float(reward)
    except BaseException as error:  # foreign code may raise anything, and all of it becomes a RewardError
        return one_line(error)


def one_line(error: BaseException) -> str:
    """Type and message of what foreign code raised, on one line, even where its `__str__` raises too."""
    return " ".join("".join(traceback.format_exception_only(error))[:_MAX_REASON].split())


def brief(value: object) -> str:
    """What foreign code returned, in a few words on one line."""
    return " ".join(reprlib.repr(value).split())
