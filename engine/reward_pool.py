"""A pool of killable processes that score responses.

They import no torch, and a response whose reward fails is reported alone: the other responses keep theirs.
"""

import asyncio
import importlib
import math
import reprlib
import sys
import threading
import traceback
import types
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.util import Finalize

from pebble import ProcessExpired, ProcessPool
from setproctitle import setproctitle

from cluster.processes import exit_with_parent
from data.rewards import ScoreFunction, score

_MAX_BATCH = 64
"""Responses sent at once; all of them wait for the slowest, and are scored again if one hangs."""
_MAX_START_S = 60.0
"""Longest start of a reward process, imports included; they compete with vLLM's for the CPU."""
_MAX_REASON = 500  # characters: an error message may quote a whole response
_MAIN_LOCK = threading.Lock()


class RewardError(Exception):
    """The reward of one response raised, hung, died or was no number; the message is one line."""


class RewardPool:
    """Scores responses in processes that can be killed; used from one asyncio loop.

    Calls made while all processes are busy, or in one tick of the loop, travel together: one message costs as much as
    scoring hundreds of short responses.
    """

    def __init__(
        self,
        task: str,
        timeout_s: float,
        num_processes: int = 1,
        score_function: ScoreFunction = score,
        title: str = "rewards",
    ) -> None:
        """`title`: what the processes are called by ps."""
        if score_function.__module__ == "__main__":
            raise ValueError("score_function must live in a module that reward processes can import, not in __main__")
        self._task, self._title = task, title
        self._timeout_s = timeout_s
        self._num_processes = num_processes
        self._score_function = score_function
        self._slots = asyncio.Semaphore(num_processes)
        self._open: _Batch | None = None
        self._closed = False
        self._start()

    async def score(self, answer: str, response: str) -> float:
        """Reward of one response; `timeout_s` bounds its scoring, not the time it waits for its turn.

        Raises RewardError if the reward raises, hangs, kills its process, or is not a finite number.
        """
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        if self._open is None or len(self._open.items) == _MAX_BATCH:
            self._open = _Batch()
            self._open.outcomes = asyncio.create_task(self._score_when_free(self._open))
        batch = self._open
        batch.items.append((answer, response))
        position = len(batch.items) - 1
        outcomes = await asyncio.shield(batch.outcomes)  # one cancelled caller must not cancel the others
        if isinstance(outcomes[position], str):
            raise RewardError(outcomes[position])
        return outcomes[position]

    def begin(self, answer: str, response: str) -> Future:
        """Begin to score one response, outside of any event loop: the future of a list with its reward, or with one
        line that says why there is none. It fails if scoring hangs or dies; after close it may never end."""
        arguments = (self._score_function, self._task, [(answer, response)])
        return self._running_pool().schedule(_score_items, arguments, timeout=self._timeout_s)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._closed = True
        self._stop()

    async def _score_when_free(self, batch: "_Batch") -> list[float | str]:
        async with self._slots:
            if self._open is batch:
                self._open = None
            try:
                return await self._send(batch.items)
            except RewardError as error:
                if len(batch.items) == 1:
                    return [str(error)]
            return [await self._send_alone(item) for item in batch.items]

    async def _send_alone(self, item: tuple[str, str]) -> float | str:
        try:
            return (await self._send([item]))[0]
        except RewardError as error:
            return str(error)

    async def _send(self, items: list[tuple[str, str]]) -> list[float | str]:
        """One outcome per item. Raises RewardError if the whole message timed out or its process died."""
        arguments = (self._score_function, self._task, items)
        reply = asyncio.wrap_future(self._running_pool().schedule(_score_items, arguments, timeout=self._timeout_s))
        limit_s = self._timeout_s + _MAX_START_S
        done, _ = await asyncio.wait([reply], timeout=limit_s)
        if not done:  # pebble lost it: a process died while it held the lock of their pipe
            self._stop()
            raise RewardError(f"no word from its process for {limit_s:g} s")
        try:
            return reply.result()
        except TimeoutError:
            raise RewardError(f"timed out after {self._timeout_s:g} s") from None
        except ProcessExpired as error:
            raise RewardError(f"its process died with exit code {error.exitcode}") from None
        except BrokenProcessPool:
            raise RewardError("its process died") from None

    def _running_pool(self) -> ProcessPool:
        """The pool, started again if pebble gave it up, as it does when a process dies between two messages."""
        if not self._pool.active and not self._closed:
            self._stop()
            self._start()
        return self._pool

    def _start(self) -> None:
        self._pool = ProcessPool(
            max_workers=self._num_processes,
            initializer=_start_process,
            initargs=(self._task, self._title),
            context=_Context(),
        )
        self._pool.schedule(_do_nothing)  # pebble starts processes at the first message
        # A process that ends by an exception waits for its children: unless they are stopped first, for ever.
        self._stop = Finalize(None, _stop_pool, args=(self._pool,), exitpriority=100)


class _Batch:
    """Responses that travel together."""

    def __init__(self) -> None:
        self.items: list[tuple[str, str]] = []
        self.outcomes: asyncio.Task[list[float | str]]


class _Process(SpawnProcess):
    """A spawned process that does not import its parent's __main__, which may import torch and vllm."""

    @staticmethod
    def _Popen(process):
        # multiprocessing has no option for this; it reads the path of the main module off this entry.
        with _MAIN_LOCK:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                return SpawnProcess._Popen(process)
            finally:
                sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


def _stop_pool(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _start_process(task: str, title: str) -> None:
    """Runs first in a reward process: slow imports must not eat the time of the first response."""
    exit_with_parent()
    setproctitle(title)
    if task == "gsm8k":
        importlib.import_module("math_verify")
    elif task.startswith("reasoning_gym:"):
        importlib.import_module("reasoning_gym")


def _do_nothing() -> None:
    pass


def _score_items(score_function: ScoreFunction, task: str, items: list[tuple[str, str]]) -> list[float | str]:
    """Runs in a reward process: one reward per item, or one line that says why there is none."""
    return [_score_item(score_function, task, answer, response) for answer, response in items]


def _score_item(score_function: ScoreFunction, task: str, answer: str, response: str) -> float | str:
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
