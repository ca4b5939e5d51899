"""Score responses in processes that can be killed, and that are replaced within milliseconds.

A process of plain functions has one response at a time, and a process of async functions many. No response fails
because another one hangs or kills its process. If a process dies, also from outside, its responses are scored once
more, each in a new process. The processes run reward_process.py. They answer in JSON only, because a hostile one could
send anything.
"""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.engine.rewards import (
    MAX_REWARD,
    Failed,
    Reward,
    RewardScorer,
    add_rewards,
    are_parts,
    load_scorer,
)

COMMAND = [sys.executable, "-P", "-m", "asyncrl.engine.reward_process"]
MAX_TOGETHER = 64
"""Most responses that a process of async functions has at once. They mostly wait for a service."""
GRACE_S = 2.0
"""A process of async functions keeps the time limit itself. If it is silent for longer, it is blocked."""
MAX_START_S = 60.0
"""Longest start of a template, imports included; it competes with vLLM for the CPU."""
MAX_FORK_S = 5.0
"""Longest wait for a process that a template forks."""
MAX_REPLY = 1 << 16
"""Bytes; the reason of a failure has far fewer."""
INVALID = (OSError, ValueError, RecursionError)
"""Errors of a connection to a process that died, and of a hostile reply."""


class _Died(Failed):
    """A process died, sent an invalid reply, or hung with several responses."""


class RewardPool:
    """Scores responses to a task in processes that can be killed."""

    def __init__(
        self,
        task: str,
        rewards: Sequence[str],
        timeout_s: float,
        num_processes: int = 4,
        title: str = "rewards",
    ) -> None:
        """`rewards`: see load_scorer. `title` is for ps. `num_processes` is for each kind of functions.

        Raises ValueError for a file that cannot be loaded, and for an object that is no reward function.
        """
        scorer = load_scorer(task, rewards)
        kinds = {function.is_async for function in scorer.functions}
        self._pools = [
            _PoolOfKind(
                scorer.only(is_async),
                _Template(task, rewards, is_async, title),
                timeout_s,
                num_processes,
            )
            for is_async in sorted(kinds)
        ]

    async def score(self, answer: str, response: str) -> Reward:
        """Return the reward of one response, and its parts. `timeout_s` does not include the wait for a process.

        Raises Failed if a function raises, hangs, kills its process, or returns neither a finite number nor a dict.
        """
        # Plain functions come first: a response that fails them asks no service.
        return add_rewards([await pool.score(answer, response) for pool in self._pools])

    def close(self) -> None:
        """End the processes at once."""
        for pool in self._pools:
            pool.close()


class _Process:
    """One process that scores, as the pool sees it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.is_dead = False
        self._pid = pid
        self._writer = writer
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[Reward | str]] = {}
        """By the number of the response. A hostile process may answer twice; that is an invalid reply."""
        self._reading = asyncio.create_task(self._read(reader))

    async def ask(self, request: list) -> Reward | str:
        """Return the reward of a response and its parts, or the reason of its failure. Raises _Died."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps([number, *request]).encode() + b"\n")
        return await reply

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read replies until the process dies or sends an invalid one."""
        with suppress(KeyError, *INVALID):
            while True:
                number, outcome = _parse(await reader.readline())
                reply = self._replies.pop(number)
                if not reply.done():
                    reply.set_result(outcome)
        self.kill()

    def kill(self) -> None:
        """End the process and its descendants.

        If it has ended, no other process has its pid yet, because the kernel gives pids out in turn.
        """
        if self.is_dead:
            return
        self.is_dead = True
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._writer.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_Died("its process died"))


def _parse(line: bytes) -> tuple[int, Reward | str]:
    """Return the number of a response, and its outcome. Raises one of INVALID."""
    match json.loads(line):
        case [int(number), str(reason)]:
            return number, reason
        case [int(number), float(reward), dict(parts)]:
            if abs(reward) <= MAX_REWARD and are_parts(parts):
                return number, (reward, parts)
    raise ValueError("a reward process sent an invalid reply")


class _PoolOfKind:
    """The processes of the plain functions, or of the async functions."""

    def __init__(
        self, scorer: RewardScorer, template: "_Template", timeout_s: float, num_processes: int
    ) -> None:
        self._template = template
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._limit_s = timeout_s + GRACE_S * scorer.is_async
        self._capacity = MAX_TOGETHER if scorer.is_async else 1
        """Responses that a process has at once."""
        self._room = asyncio.Semaphore(num_processes * self._capacity)
        self._places: list[_Process] = []
        """Each process as often as it can take another response."""
        self._is_forking = asyncio.Lock()

    async def score(self, answer: str, response: str) -> Reward:
        request = [self._timeout_s, answer, response]
        async with self._room:
            try:
                process = await self._take_place()
                return await self._ask(process, request, is_alone=self._capacity == 1)
            except _Died:
                async with self._is_forking:
                    process = await self._fork()
                return await self._ask(process, request, is_alone=True)

    def close(self) -> None:
        self._places.clear()
        self._template.close()

    async def _take_place(self) -> _Process:
        """Return a process that can take a response. If there is no such process, fork one."""
        async with self._is_forking:
            while self._places:
                process = self._places.pop()
                if not process.is_dead:
                    return process
            process = await self._fork()
            self._places += [process] * (self._capacity - 1)
            return process

    async def _ask(self, process: _Process, request: list, *, is_alone: bool) -> Reward:
        """Score a response. Kill the process if it hangs. Raises _Died if another response may be the cause."""
        try:
            async with asyncio.timeout(self._limit_s):
                outcome = await process.ask(request)
        except TimeoutError:
            process.kill()
            kind = Failed if is_alone else _Died
            raise kind(f"{self._scorer}timed out after {self._timeout_s:g} s") from None
        except _Died as error:
            raise _Died(f"{self._scorer}{error}") from None
        except asyncio.CancelledError:
            if is_alone:
                process.kill()
            raise
        finally:
            self._places.append(process)
        if isinstance(outcome, str):
            raise Failed(outcome)
        return outcome

    async def _fork(self) -> _Process:
        try:
            return await self._template.fork()
        except INVALID:
            reason = "its process cannot be started; the log of its worker says why"
            raise Failed(f"{self._scorer}{reason}") from None


class _Template:
    """The process that forks scoring processes. It never reads a response."""

    def __init__(self, *arguments):
        """`arguments` of run_template."""
        self._arguments = json.dumps(arguments)
        self._is_closed = False
        self._start()

    async def fork(self) -> _Process:
        """Fork a process. A template that was killed or is stopped is replaced.

        Raises OSError or ValueError if the process cannot be started, RuntimeError if the pool is closed.
        """
        try:
            return await self._fork()
        except INVALID:
            if self._is_closed:
                raise RuntimeError("the reward pool is closed") from None
            self._end()
            self._start()
            return await self._fork()

    def close(self) -> None:
        """End the template, and with it all processes forked from it."""
        self._is_closed = True
        self._end()

    def _start(self) -> None:
        self._control, template_end = socket.socketpair()
        # no process of multiprocessing: that would import torch and vLLM with this one's __main__
        with template_end:
            self._process = subprocess.Popen(
                [*COMMAND, self._arguments],
                stdin=template_end,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._limit_s = MAX_START_S

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()

    async def _fork(self) -> _Process:
        connection, process_end = socket.socketpair()
        with process_end:
            socket.send_fds(self._control, [b"fork"], [process_end.fileno()])
        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_REPLY)
        try:
            async with asyncio.timeout(self._limit_s):
                pid = int(await reader.readline())
        except (
            BaseException
        ):  # also a cancellation: a process that starts too late ends with its socket
            writer.close()
            raise
        self._limit_s = MAX_FORK_S
        return _Process(pid, reader, writer)
