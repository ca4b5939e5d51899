"""Limits of a process that scores text from a model. They hold for all processes that it starts.

memory      address space: MEMORY_BYTES beyond that of the template
files       no byte is written (RLIMIT_FSIZE), 64 are open at most; with namespaces all file systems are read-only
processes   not started (RLIMIT_NPROC; it does not bind root); with namespaces they end with the response
network     no access with namespaces
privileges  none by exec (no_new_privs); with namespaces no capability, and no other process can be signalled
time        the pool kills a process that takes too long; RLIMIT_CPU ends its descendants soon after

A process of async functions keeps the network. It may open more files and start threads, and so processes; only the
pool limits its time.

A process can still read files and environment variables. It can connect to the same user's sockets in the file system,
for example an engine's. It can use a core up to the limit of time, and as root fork in a burst. Namespaces (user,
mount, network, process, IPC) need Linux 5.12. Many containers forbid them; the worker's log then has a warning.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct

import psutil

MEMORY_BYTES = 2 << 30
ASYNC_LIMITS = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
LIMITS = {**ASYNC_LIMITS, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_NPROC: 0}
# sched.h: user, mount, process, IPC
_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000
_NEW_NETWORK = 0x40000000
# the number of the system call is the same on all architectures
_MOUNT_SETATTR, _CURRENT_FOLDER, _RECURSIVE = 442, -100, 0x8000
# struct mount_attr: MOUNT_ATTR_RDONLY, MS_PRIVATE
_READ_ONLY_AND_PRIVATE = struct.pack("4Q", 1, 0, 1 << 18, 0)
# the header of capset, version 3, and empty sets
_NO_CAPABILITIES = struct.pack("2I", 0x20080522, 0), bytes(24)
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_libc = ctypes.CDLL(None, use_errno=True)


def _call(function, *arguments) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def die_with_parent() -> None:
    """Tell the kernel to end this process with the thread that forked it."""
    _call(_libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def namespace_error(keeps_network: bool = False) -> str:
    """Return the kernel's error when a process asks for namespaces; empty if it gets them."""
    process = os.fork()
    if process == 0:
        status = 0
        try:
            _enter_namespaces(keeps_network)
        except OSError as error:
            status = error.errno
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return os.strerror(status) if status else ""


def _enter_namespaces(keeps_network: bool) -> None:
    """Make file systems read-only, remove the network unless it is kept, and put later forks in a process namespace."""
    _call(_libc.unshare, _NEW_NAMESPACES if keeps_network else _NEW_NAMESPACES | _NEW_NETWORK)
    attributes = _READ_ONLY_AND_PRIVATE, len(_READ_ONLY_AND_PRIVATE)
    _call(_libc.syscall, _MOUNT_SETATTR, _CURRENT_FOLDER, b"/", _RECURSIVE, *attributes)


def contain(is_async: bool, in_namespaces: bool) -> None:
    """Put this process under all limits. With namespaces it returns in a fork of this process."""
    memory = psutil.Process().memory_info().vms + MEMORY_BYTES
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as badness:
        badness.write("1000")  # the kernel ends it first when memory runs out
    if in_namespaces:
        _enter_namespaces(keeps_network=is_async)
        scorer = os.fork()
        if scorer:  # the first process of its namespace: all others there end with it
            die_with_parent()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(scorer, 0)
            os._exit(0)
        _call(_libc.capset, *_NO_CAPABILITIES)
    _call(_libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    limits = ASYNC_LIMITS if is_async else LIMITS
    for limit, most in {**limits, resource.RLIMIT_AS: memory}.items():
        resource.setrlimit(limit, (most, most))
    die_with_parent()  # last, because the kernel forgets it when a process enters namespaces
