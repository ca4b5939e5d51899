"""What a process that scores is kept from, as it reads text that a model wrote. Limits hold for all that it starts.

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

import contextlib
import ctypes
import os
import resource
import struct

import psutil

from asyncrl.engine.reward_process import die_with_parent

MEMORY_BYTES = 2 << 30
LIMITS_OF_ASYNC = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
LIMITS = {**LIMITS_OF_ASYNC, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 0}
# user, mount, pid, ipc: sched.h
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000
_NEW_NETWORK = 0x40000000
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the same number on all machines
# struct mount_attr: MOUNT_ATTR_RDONLY, MS_PRIVATE
_READ_ONLY_AND_PRIVATE = struct.pack("4Q", 1, 0, 1 << 18, 0)
# capset's header (version 3) and sets
_NO_CAPABILITIES = struct.pack("2I", 0x20080522, 0), bytes(24)
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def why_no_namespaces(keeps_network: bool = False) -> str:
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
    mount = _AT_FDCWD, b"/", _AT_RECURSIVE, _READ_ONLY_AND_PRIVATE, len(_READ_ONLY_AND_PRIVATE)
    _call(_libc.syscall, _SYS_MOUNT_SETATTR, *mount)


def _call(function, *arguments) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def contain(is_async: bool, in_namespaces: bool) -> None:
    """Put this process under all limits; returns in a process forked from it where there are namespaces."""
    memory = psutil.Process().memory_info().vms + MEMORY_BYTES
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as badness:
        badness.write("1000")  # the first to go when memory runs out
    if in_namespaces:
        _enter_namespaces(is_async)
        if scorer := os.fork():  # the first process of its space: all others there end with it
            die_with_parent()
            os._exit(bool(os.waitpid(scorer, 0)))
        die_with_parent()
        _call(_libc.capset, *_NO_CAPABILITIES)
    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = LIMITS_OF_ASYNC if is_async else LIMITS
    for limit, most in {**limits, resource.RLIMIT_AS: memory}.items():
        resource.setrlimit(limit, (most, most))
