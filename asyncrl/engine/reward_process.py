"""The processes that score: a template that has imported everything, and the processes that are forked from it.

They read text from a model, so they run under the limits of containment.py. A request is a line of JSON: [number, limit
in seconds, answer, response]. The reply is [number, reward, parts] or [number, reason of the failure].
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
import sys
import time
from collections.abc import Callable
from typing import Any

from setproctitle import setproctitle

from asyncrl.cluster.processes import freeze_garbage
from asyncrl.engine.containment import contain, namespace_error
from asyncrl.engine.rewards import Reward, RewardScorer, load_scorer, one_line

SLOW_IMPORTS = {"gsm8k": "math_verify", "reasoning_gym": "reasoning_gym"}
"""Modules of a task that would take the time of the first response."""
MAX_LINE = 1 << 30
"""Bytes of an answer and a response."""


def run_template(task: str, rewards: list[str], is_async: bool, title: str) -> None:
    """Fork a process for each socket that arrives over standard input, until that closes.

    The first line on the socket is the pid. The process calls the async functions only, or the plain ones only.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle(title)
    module = SLOW_IMPORTS.get(task.partition(":")[0])
    if module:
        importlib.import_module(module)
    scorer = load_scorer(task, rewards).only(is_async)
    freeze_garbage()
    reason = namespace_error(is_async)
    if reason:
        print(
            f"warning: {title}: no namespaces ({reason}): network and files are not contained",
            flush=True,
        )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes that end leave no zombies
    control = socket.socket(fileno=0)
    while True:
        _, sockets, _, _ = socket.recv_fds(control, 4, 1)
        if not sockets:
            os._exit(0)  # the pool is gone, and the forked processes end with this one
        pid = os.fork()
        if pid == 0:
            try:
                _serve(_keep_only(sockets[0]), scorer, in_namespaces=not reason)
            finally:
                os._exit(0)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        # A cancelled caller has closed its end. The forked process then ends, too.
        with contextlib.suppress(BrokenPipeError):
            os.write(sockets[0], b"%d\n" % pid)
        os.close(sockets[0])


def _keep_only(descriptor: int) -> socket.socket:
    """Close all other files, because printed text would fill a log. Return the socket."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return socket.socket(fileno=descriptor)


def _serve(connection: socket.socket, scorer: RewardScorer, *, in_namespaces: bool) -> None:
    """Score one response after the other, under the limits. The pool ends this process if one takes too long."""
    contain(scorer.is_async, in_namespaces)
    if scorer.is_async:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asyncio.run(_serve_together(connection, scorer))
        return
    for line in connection.makefile("rb"):
        number, timeout_s, answer, response = json.loads(line)
        cpu_s = math.ceil(time.process_time() + timeout_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
        try:
            outcome: Reward | tuple[str] = scorer.score(answer, response)
        except BaseException as error:  # also one that comes late, for example from an alarm
            outcome = (one_line(error),)
        if os.getpid() == 1:  # all other processes in this namespace were started by the response
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
        _answer(connection.sendall, number, outcome)


async def _serve_together(connection: socket.socket, scorer: RewardScorer) -> None:
    """Score by async functions. All responses wait together, each at most as long as its limit."""

    async def serve(number: int, timeout_s: float, answer: str, response: str) -> None:
        scoring = asyncio.create_task(scorer.gather(answer, response))
        await asyncio.wait({scoring}, timeout=timeout_s)
        if not scoring.done():
            scoring.cancel()
            outcome = (f"{scorer}timed out after {timeout_s:g} s",)
        else:
            error = scoring.exception()
            outcome = scoring.result() if error is None else (one_line(error),)
        _answer(writer.write, number, outcome)

    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
    async with asyncio.TaskGroup() as tasks:
        while line := await reader.readline():
            tasks.create_task(serve(*json.loads(line)))


def _answer(send: Callable[[bytes], Any], number: int, outcome: Reward | tuple[str]) -> None:
    send(json.dumps([number, *outcome]).encode() + b"\n")
    if "MemoryError" in str(outcome[0]):
        os._exit(0)  # the response may still hold its memory


if __name__ == "__main__":
    run_template(*json.loads(sys.argv[1]))
