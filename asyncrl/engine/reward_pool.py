"""Score responses in processes that can be killed one by one, and that are replaced within milliseconds.

A response that hangs or kills its process fails alone. Each process has a socket of its own. What runs in
a process is in reward_process.py, and its limits are in containment.py. Processes answer in JSON only, as
a hostile one could send anything.

A process has several responses at once. It scores them one after the other by plain functions, and side by side by
async ones. If a process dies, nobody knows which response is to blame. It may also have been killed from outside. So
all its responses are scored once more, each in a new process of its own. The same happens to those that wait behind one
that hangs, once its time is over.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from asyncrl.engine.score import MAX_REWARD, Failed, Scored, add, are_parts, load_score

_MAX_START_S = 60.0
"""Longest start of the template, imports included; they compete with vLLM's for the CPU."""
_MAX_FORK_S = 5.0
"""Longest wait for a process forked from it: it has all imports and copies nothing."""
_MAX_REPLY = 1 << 16  # bytes: a message of 500 characters is far below
_MAX_QUEUED = 8
"""Responses that a process of plain functions has at once. To wait for each reply would take longer than to score."""
_MAX_TOGETHER = 1024
"""Responses that a process of async functions has at once."""
_GRACE_S = 2.0
"""Processes of async functions keep the limit themselves. One that is silent for so much longer has a blocked loop."""
_TEMPLATE = """import json, sys
sys.path, *arguments = json.loads(sys.argv[1])
from asyncrl.engine.reward_process import run_template
run_template(*arguments)"""


class _Died(Exception):
    """A process ended, or sent what it must not, before it answered."""


class RewardPool:
    """Scores responses to a task in processes that can be killed: some for plain functions, others for async ones."""

    def __init__(
        self,
        task: str,
        rewards: Sequence[str],
        timeout_s: float,
        num_processes: int = 4,
        title: str = "rewards",
    ) -> None:
        """`rewards` are those of load_score; `title` is for ps; `num_processes` is the number for each kind.

        Raises ValueError for a file that cannot be loaded and for what is no reward function.
        """
        score = load_score(task, rewards)
        self._lanes = [
            _Lane(
                str(score.of(is_async)),
                _Template(task, rewards, is_async, title),
                timeout_s,
                num_processes,
                is_async=is_async,
            )
            for is_async in sorted({function.is_async for function in score.functions})
        ]

    async def score(self, answer: str, response: str) -> Scored:
        """Return the reward of one response, and its parts. `timeout_s` bounds its scoring, not the wait for its turn.

        Raises Failed if a reward raises, hangs, kills its process, or is neither a finite number nor a dict.
        """
        return add(await asyncio.gather(*(lane.score(answer, response) for lane in self._lanes)))

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for lane in self._lanes:
            lane.template.close()


class _Lane:
    """The processes that score by plain functions, or those that score by async ones."""

    def __init__(
        self,
        functions: str,
        template: "_Template",
        timeout_s: float,
        num_processes: int,
        *,
        is_async: bool,
    ) -> None:
        self.template = template
        self._functions = functions
        self._timeout_s = timeout_s
        self._is_async = is_async
        self._retries = asyncio.Semaphore(num_processes)
        self._room = asyncio.Semaphore(num_processes * (_MAX_TOGETHER if is_async else _MAX_QUEUED))
        self._scorers: list[_Scorer | None] = [None] * num_processes
        self._num_open = [0] * num_processes
        """Responses that each scorer has, or waits for its start with."""
        self._starting = [asyncio.Lock() for _ in range(num_processes)]

    async def score(self, answer: str, response: str) -> Scored:
        if self.template.is_closed:
            raise RuntimeError("the reward pool is closed")
        request = [self._timeout_s, answer, response]
        try:
            try:
                return await self._score_beside_others(request)
            except _Died:
                return await self._score_alone(request)
        except TimeoutError:
            raise Failed(f"{self._functions}timed out after {self._timeout_s:g} s") from None
        except _Died:
            raise Failed(f"{self._functions}its process died") from None

    async def _score_beside_others(self, request: list) -> Scored:
        """Score in a process that has others as well."""
        async with self._room:
            index = self._num_open.index(min(self._num_open))
            self._num_open[index] += 1
            try:
                return await (await self._scorer_at(index)).score(request)
            finally:
                self._num_open[index] -= 1

    async def _scorer_at(self, index: int) -> "_Scorer":
        """Return the scorer of that index, started if it is not there or dead."""
        async with self._starting[index]:
            scorer = self._scorers[index]
            if scorer is None or scorer.is_dead:
                scorer = await self._start_scorer(is_order_known=not self._is_async)
                self._scorers[index] = scorer
            return scorer

    async def _score_alone(self, request: list) -> Scored:
        async with self._retries:
            scorer = await self._start_scorer(is_order_known=True)
            try:
                return await scorer.score(request)
            finally:
                scorer.kill()

    async def _start_scorer(self, *, is_order_known: bool) -> "_Scorer":
        try:
            streams = await self.template.fork()
        except (OSError, ValueError):
            reason = "its process cannot be started; the log of its worker says why"
            raise Failed(f"{self._functions}{reason}") from None
        limit_s = self._timeout_s + _GRACE_S * self._is_async
        return _Scorer(*streams, limit_s=limit_s, is_order_known=is_order_known)


class _Scorer:
    """One process that scores, seen from here."""

    def __init__(
        self,
        pid: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        limit_s: float,
        is_order_known: bool,
    ):
        """The process is killed if a response takes longer than `limit_s`.

        `is_order_known`: it scores responses in the order in which they were sent. So the time of one begins with the
        reply before it, and it is to blame if it takes too long.
        """
        self.is_dead = False
        self._pid = pid
        self._writer = writer
        self._limit_s = limit_s
        self._is_order_known = is_order_known
        self._numbers = itertools.count()  # none twice, as a hostile one may answer twice
        self._replies: dict[int, asyncio.Future[Scored | str]] = {}
        """By the number of the response, in the order in which they were sent."""
        self._sent_at: dict[int, float] = {}
        """When each was sent, on the clock of the event loop."""
        self._limit: asyncio.TimerHandle | None = None
        self._reading = asyncio.create_task(self._read(reader))

    async def score(self, request: list) -> Scored:
        """Return the reward and parts of one response.

        Raises Failed, _Died, or TimeoutError if this response is why the process was silent.
        """
        if self.is_dead:
            raise _Died
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        reply = self._replies[number] = loop.create_future()
        self._sent_at[number] = loop.time()
        if len(self._replies) == 1:
            self._limit_first()
        self._writer.write(json.dumps([number, *request]).encode() + b"\n")
        try:
            outcome = await reply
        except asyncio.CancelledError:
            if self._is_order_known and number == next(iter(self._replies), None):
                self.kill()  # it would keep the next response waiting
            raise
        if isinstance(outcome, str):
            raise Failed(outcome)
        return outcome

    def _limit_first(self) -> None:
        """Kill the process if the response that it has had for longest takes too long; without any, never."""
        if self._limit is not None:
            self._limit.cancel()
        if self._replies and not self.is_dead:
            loop = asyncio.get_running_loop()
            begun_at = self._sent_at[next(iter(self._replies))]
            if self._is_order_known:
                begun_at = loop.time()
            self._limit = loop.call_at(begun_at + self._limit_s, self._end_first)

    def _end_first(self) -> None:
        """Kill the process, and blame the response that it has had for longest, if that is known to be the cause."""
        first = next(iter(self._replies.values()))
        if self._is_order_known and not first.done():
            first.set_exception(TimeoutError())
        self.kill()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand every reply to whoever waits for it, until the process ends or sends what it must not."""
        # the last three by hostile JSON
        with contextlib.suppress(OSError, KeyError, ValueError, RecursionError):
            while (line := await reader.readline()).endswith(b"\n"):
                number, outcome = _parse(line)
                is_first = number == next(iter(self._replies), None)
                if self._is_order_known and not is_first:
                    raise ValueError("a reply out of order")
                reply = self._replies.pop(number)
                del self._sent_at[number]
                if is_first:
                    self._limit_first()
                if not reply.done():
                    reply.set_result(outcome)
        self.kill()

    def kill(self) -> None:
        """End the process and what it has started. All that wait for it learn that it died.

        If it ended before, its pid may be free. But the kernel gives pids out in turn, so nobody has it yet.
        """
        if self.is_dead:
            return
        self.is_dead = True
        if self._limit is not None:
            self._limit.cancel()
        for kill in (os.killpg, os.kill):  # it is no group before it has made itself one
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        self._writer.close()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_Died())


def _parse(line: bytes) -> tuple[int, Scored | str]:
    """Return the number in a reply, with the reward and its parts, or with the line that says why there are none.

    Raises ValueError, KeyError or RecursionError for what no process sends.
    """
    match json.loads(line):
        case [int(number), str(reason)]:
            return number, reason
        case [int(number), float(reward), dict(parts)] if abs(reward) <= MAX_REWARD and are_parts(
            parts
        ):
            return number, (reward, parts)
    raise ValueError(f"a reward process sent {line[:100]!r}")


class _Template:
    """The process from which scorers are forked; it never sees a response."""

    def __init__(self, *arguments):
        """`arguments` are those of run_template after the socket's descriptor."""
        self.is_closed = False
        self._arguments = arguments
        self._is_forking = asyncio.Lock()
        self._start()

    async def fork(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Fork a process. Returns its pid and streams to it. The template itself is replaced if need be.

        Raises OSError or ValueError if it cannot be started.
        """
        async with self._is_forking:
            try:
                return await self._fork()
            except (OSError, ValueError):  # the template was killed, or is stopped
                self._end()
                self._start()
                return await self._fork()

    def close(self) -> None:
        """End the template, and with it all scorers."""
        self.is_closed = True
        self._end()

    def _start(self) -> None:
        if self.is_closed:
            raise ConnectionAbortedError("the reward pool is closed")
        self._control, template_end = socket.socketpair()
        # a plain process: multiprocessing's would import this one's __main__, and so torch and vllm
        with template_end:
            descriptor = template_end.fileno()
            arguments = json.dumps([sys.path, descriptor, *self._arguments])
            self._process = subprocess.Popen(
                # -P: `-c` would look for modules in the current folder first
                [sys.executable, "-P", "-c", _TEMPLATE, arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
            )
        self._max_fork_s = _MAX_START_S

    async def _fork(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        connection, scorer_end = socket.socketpair()
        with scorer_end:
            socket.send_fds(self._control, [b"fork"], [scorer_end.fileno()])
        reader, writer = await asyncio.open_connection(sock=connection, limit=_MAX_REPLY)
        try:
            async with asyncio.timeout(self._max_fork_s):
                pid = int(await reader.readline())
        except BaseException:
            # also where the wait is cancelled: a process that comes too late ends with its socket
            writer.close()
            raise
        self._max_fork_s = _MAX_FORK_S
        return pid, reader, writer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()
