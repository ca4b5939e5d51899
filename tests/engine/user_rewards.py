"""Reward functions as a user would write them: good ones, and two that do whatever a response says."""

import asyncio
import contextlib
import ctypes  # noqa: F401, for responses, as the next ones
import inspect
import os
import resource
import socket  # noqa: F401
import subprocess  # noqa: F401
import sys  # noqa: F401
import time
from pathlib import Path

from setproctitle import setproctitle

from asyncrl.engine.containment import LIMITS, MEMORY_BYTES

FILE = str(Path(__file__))


def texts(*names: str) -> list[str]:
    """Reward functions as --reward names them."""
    return [f"{FILE}:{name}" for name in names]


def exact(response, answer):
    return response == answer


def keywords(response, **row):
    return float(len(row))


def by_columns(response, length, colour="red"):
    return float(length + (colour == "blue"))


def parts(response, answer, **row):
    return {"right": float(response == answer), "short": 0.5}


def short(response):
    return 1 / len(response)


class Judge:
    async def __call__(self, response, answer):
        await asyncio.sleep(0)
        return {"wise": 2.0}


judge = Judge()


class UserTask:
    def train_problem(self, index): ...

    def eval_problems(self, count): ...

    @staticmethod
    def score(answer, response):
        return {"right": float(response == answer), "digits": len(response) / len(answer)}


def evaluated(response):
    """What the response is, as an expression of Python."""
    return eval(response)


async def evaluated_async(response, **row):
    """The same, a little later, so that other responses are scored meanwhile."""
    await asyncio.sleep(0.2)
    value = eval(response)
    return await value if inspect.isawaitable(value) else value


# What responses may say


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("no words")


def throw(error):
    raise error


async def ask(host, port):
    """Ask a server, and wait until it has closed the connection."""
    reader, writer = await asyncio.open_connection(host, port)
    await reader.read()
    writer.close()
    return 1.0


async def ignore_cancellation():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def connect(host, port):
    """Connect by a name, which a thread looks up."""
    _, writer = await asyncio.open_connection(host, port)
    writer.close()
    return 1.0


def spoil_replies(reply):
    """Write to every socket that there is."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, reply)
    return 1.0


def start_daemon(title):
    """Start a process that leaves its parent and its session, and wait until it has its title."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            setproctitle(title)
            os.write(writer, b"1")
            time.sleep(600)
        os._exit(0)
    os.read(reader, 1)
    return 1.0


def fork_without_end(title):
    setproctitle(title)
    while True:
        os.fork()


def has_limits():
    limits = [resource.getrlimit(limit) == (most, most) for limit, most in LIMITS.items()]
    _, memory = resource.getrlimit(resource.RLIMIT_AS)
    cpu_s, _ = resource.getrlimit(resource.RLIMIT_CPU)
    has_no_new_privileges = "NoNewPrivs:\t1" in Path("/proc/self/status").read_text()
    is_memory_limited = MEMORY_BYTES < memory < MEMORY_BYTES + (64 << 30)
    # the standard ones, a socket, and the folder that is being listed
    has_few_files = len(os.listdir("/proc/self/fd")) == 5
    are_others = has_no_new_privileges and is_memory_limited and has_few_files and cpu_s < 100
    return all(limits) and are_others
