"""What runs in the processes that score: a template that has imported what is slow, and the scorers forked from it.

A scorer reads text that a model wrote, so it runs under the limits of containment.py.
"""

import asyncio
import contextlib
import importlib
import json
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable

from setproctitle import setproctitle

from asyncrl.cluster.processes import freeze_garbage
from asyncrl.engine import containment
from asyncrl.engine.score import Score, Scored, load_score, one_line


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
    reason = containment.namespace_error(is_async)
    if reason:
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


def _run_scorer(descriptor: int, score: Score, in_namespaces: bool) -> None:
    """Serve one socket under the limits, or answer with what forbids them; never returns."""
    connection = socket.socket(fileno=descriptor)
    try:
        _keep_only(descriptor)
        os.setpgid(0, 0)
        containment.contain(score.is_async, in_namespaces)
        if score.is_async:
            asyncio.run(_serve_together(connection, score))
        else:
            _serve(connection, score)
    except (OSError, MemoryError) as error:  # it cannot be set up, or whoever asks is gone
        _send(connection.sendall, 0, one_line(error))
    finally:
        os._exit(0)


def _keep_only(descriptor: int) -> None:
    """Close all files but one; what a scorer prints would fill a log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != descriptor:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))


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
