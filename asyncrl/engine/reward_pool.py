"""Score responses in processes that can be killed, and that are replaced within milliseconds.

Each process has one response at a time. If the response hangs or kills its process, no other response fails. A process
may also be killed from outside, so a response whose process dies is scored once more, in a new process. The processes
run reward_process.py. They answer in JSON only, because a hostile one could send anything.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from asyncrl.engine.score import (
    MAX_REWARD,
    Failed,
    Reward,
    RewardScorer,
    add_rewards,
    are_parts,
    load_scorer,
)

COMMAND = [sys.executable, "-P", "-m", "asyncrl.engine.reward_process"]
ASYNC_FACTOR = 16
"""Async functions wait for other services, so they have so many times the processes of plain ones."""
MAX_START_S = 60.0
"""Longest start of a template, imports included; it competes with vLLM for the CPU."""
MAX_FORK_S = 5.0
"""Longest wait for a process that a template forks."""
MAX_REPLY = 1 << 16
"""Bytes; the reason of a failure has far fewer."""
INVALID = (OSError, ValueError, RecursionError)
"""Errors of a connection to a process that died, and of a hostile reply."""


class _Died(Failed):
    """A process died, or sent an invalid reply."""


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
        """`rewards` are those of load_scorer. `title` is for ps. `num_processes` is for plain functions.

        Raises ValueError for a file that cannot be loaded, and for an object that is no reward function.
        """
        scorer = load_scorer(task, rewards)
        kinds = {function.is_async for function in scorer.functions}
        self._parts = [
            _PoolOfKind(
                scorer.only(is_async),
                _Template(task, rewards, is_async, title),
                timeout_s,
                num_processes * (ASYNC_FACTOR if is_async else 1),
            )
            for is_async in sorted(kinds)
        ]

    async def score(self, answer: str, response: str) -> Reward:
        """Return the reward of one response, and its parts. `timeout_s` does not include the wait for a process.

        Raises Failed if a function raises, hangs, kills its process, or returns neither a finite number nor a dict.
        """
        scoring = [part.score(answer, response) for part in self._parts]
        return add_rewards(await asyncio.gather(*scoring))

    def close(self) -> None:
        """End the processes at once."""
        for part in self._parts:
            part.template.close()


class _Process:
    """One process that scores, as the pool sees it."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._pid = pid
        self._reader = reader
        self._writer = writer
        self._number = 0
        """Number of the newest response. A hostile process may answer twice, so a reply to another one is invalid."""

    async def ask(self, request: list) -> Reward | str:
        """Return the reward of a response and its parts, or the reason of its failure. Raises one of INVALID."""
        self._number += 1
        self._writer.write(json.dumps([self._number, *request]).encode() + b"\n")
        match json.loads(await self._reader.readline()):
            case [self._number, str(reason)]:
                return reason
            case [self._number, float(reward), dict(parts)]:
                if abs(reward) <= MAX_REWARD and are_parts(parts):
                    return reward, parts
        raise ValueError("a reward process sent an invalid reply")

    def kill(self) -> None:
        """End the process and its descendants.

        If it has ended, no other process has its pid yet, because the kernel gives pids out in turn.
        """
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._writer.close()


class _PoolOfKind:
    """The processes of the plain functions, or those of the async ones."""

    def __init__(
        self, scorer: RewardScorer, template: "_Template", timeout_s: float, num_processes: int
    ) -> None:
        self.template = template
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(num_processes)
        self._idle: list[_Process] = []

    async def score(self, answer: str, response: str) -> Reward:
        request = [self._timeout_s, answer, response]
        async with self._places:
            try:
                process = self._idle.pop() if self._idle else await self._fork()
                return await self._ask(process, request)
            except _Died:
                return await self._ask(await self._fork(), request)

    async def _ask(self, process: _Process, request: list) -> Reward:
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome = await process.ask(request)
        except BaseException as error:  # also a cancellation
            process.kill()
            if isinstance(error, TimeoutError):
                raise Failed(f"{self._scorer}timed out after {self._timeout_s:g} s") from None
            if isinstance(error, INVALID):
                raise _Died(f"{self._scorer}its process died") from None
            raise
        self._idle.append(process)
        if isinstance(outcome, str):
            raise Failed(outcome)
        return outcome

    async def _fork(self) -> _Process:
        try:
            return await self.template.fork()
        except INVALID:
            reason = "its process cannot be started; the log of its worker says why"
            raise Failed(f"{self._scorer}{reason}") from None


class _Template:
    """The process from which others are forked. It never reads a response."""

    def __init__(self, *arguments):
        """`arguments` are those of run_template."""
        self._arguments = json.dumps(arguments)
        self._is_closed = False
        self._is_forking = asyncio.Lock()
        self._start()

    async def fork(self) -> _Process:
        """Fork a process. A template that was killed or is stopped is replaced.

        Raises OSError or ValueError if the process cannot be started, RuntimeError if the pool is closed.
        """
        async with self._is_forking:
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
