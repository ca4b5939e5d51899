"""A pool of processes that score responses, each of which can be killed alone and is replaced within milliseconds.

Every process has a socket of its own and a thread here that waits for it. So one that hangs, dies or is stopped costs
the response that it scores, and keeps only one thread waiting; the others go on. What runs there, and what it is kept
from, is in reward_process.py. They send JSON and nothing else, as a hostile one could send anything.
"""

import asyncio
import collections
import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.context import SpawnContext, SpawnProcess

from data.rewards import ScoreFunction, score
from engine.reward_process import READY, run_template

_MAX_BATCH = 64
"""Responses sent at once: scoring a short one takes less time than sending it."""
_MAX_START_S = 60.0
"""Longest start of the template, imports included; they compete with vLLM's for the CPU."""
_MAX_FORK_S = 5.0
"""Longest wait for a process forked from it: it has all imports and copies nothing."""
_MAX_REPLY = 1 << 16  # bytes: a message of 500 characters is far below
_MAIN_LOCK = threading.Lock()


class RewardError(Exception):
    """The reward of one response raised, hung, died or was no number; the message is one line."""


@dataclass(eq=False)
class _Item:
    answer: str
    response: str
    reward: Future = field(default_factory=Future)
    died: bool = False
    """Whether a process died with it. That may have been killed by somebody else, so it is scored once more."""


class RewardPool:
    """Scores responses in processes that can be killed."""

    def __init__(
        self,
        task: str,
        timeout_s: float,
        num_processes: int = 4,
        score_function: ScoreFunction = score,
        title: str = "rewards",
    ) -> None:
        """`title`: what the processes are called by ps."""
        if score_function.__module__ == "__main__":
            raise ValueError("score_function must live in a module that reward processes can import, not in __main__")
        self._timeout_s, self._num_processes = timeout_s, num_processes
        self._template = _Template(score_function, task, title)
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Item] = collections.deque()
        self._closed = False
        for _ in range(num_processes):
            threading.Thread(target=self._score_waiting, name=title, daemon=True).start()

    async def score(self, answer: str, response: str) -> float:
        """Reward of one response; `timeout_s` bounds its scoring, not the time it waits for its turn.

        Raises RewardError if the reward raises, hangs, kills its process, or is not a finite number.
        """
        return await asyncio.wrap_future(self.begin(answer, response))

    def begin(self, answer: str, response: str) -> Future:
        """Begin to score one response, outside of any event loop: the future of what `score` gives or raises; after
        close it may never end."""
        item = _Item(answer, response)
        with self._changed:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            self._waiting.append(item)
            self._changed.notify()
        return item.reward

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._template.close()

    def _take(self) -> collections.deque[_Item]:
        """Wait for responses and take this thread's share of them; none when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            share = min(_MAX_BATCH, -(-len(self._waiting) // self._num_processes))
            return collections.deque(() if self._closed else [self._waiting.popleft() for _ in range(share)])

    def _put_back(self, items: collections.deque[_Item]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(items))
            self._changed.notify_all()

    def _score_waiting(self) -> None:
        """Have one process score what waits, and replace it when it fails; runs in a thread."""
        scorer, dead = None, 0
        while items := self._take():
            try:
                scorer = scorer or self._template.fork(dead)
                self._score(scorer, items)
            except (OSError, EOFError, ValueError, RecursionError) as error:  # the last two by hostile JSON
                self._on_failure(items, None if scorer is None else error)
                dead, scorer = (scorer.kill(), None) if scorer else (0, None)
            if items:
                self._put_back(items)
        if scorer is not None:
            scorer.kill()

    def _score(self, scorer: "_Scorer", items: collections.deque[_Item]) -> None:
        """Settle items one after the other; those that are left when an error ends it are not scored."""
        for outcome in scorer.outcomes(list(items), self._timeout_s):
            _settle(items.popleft(), outcome)

    def _on_failure(self, items: collections.deque[_Item], error: Exception | None) -> None:
        """Say of the item that was scored why it has no reward, unless it is worth another try."""
        if error is None:
            _settle(items.popleft(), "its process cannot be started; the log of its worker says why")
        elif isinstance(error, TimeoutError):
            _settle(items.popleft(), f"timed out after {self._timeout_s:g} s")
        elif items[0].died:
            _settle(items.popleft(), "its process died")
        else:
            items[0].died = True


def _settle(item: _Item, outcome: float | str) -> None:
    if not item.reward.set_running_or_notify_cancel():
        return
    if isinstance(outcome, str):
        item.reward.set_exception(RewardError(outcome))
    else:
        item.reward.set_result(outcome)


class _Scorer:
    """One process that scores, seen from here."""

    def __init__(self, pid: int, connection: socket.socket):
        self._pid, self._connection = pid, connection
        self._replies = connection.makefile("rb")

    def outcomes(self, items: list[_Item], timeout_s: float) -> Iterator[float | str]:
        """The reward of each item in turn, or one line that says why there is none.

        Raises TimeoutError if one takes too long, and OSError, EOFError, ValueError or RecursionError if the process
        dies or says what it should not.
        """
        self._connection.settimeout(timeout_s)
        request = json.dumps([timeout_s, [[item.answer, item.response] for item in items]])
        self._connection.sendall(request.encode() + b"\n")
        for _ in items:
            line = self._replies.readline(_MAX_REPLY)
            if not line.endswith(b"\n"):
                raise EOFError
            outcome = json.loads(line)
            if not isinstance(outcome, str) and not (type(outcome) is float and math.isfinite(outcome)):
                raise ValueError(f"a reward process sent {line[:100]!r}")
            yield outcome

    def kill(self) -> int:
        """End the process and what it has started. Returns its pid, which nobody has before it is reaped."""
        for kill in (os.killpg, os.kill):  # it is no group before it has made itself one
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        self._connection.close()
        return self._pid


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


class _Template:
    """The process from which scorers are forked; it never sees a response. Safe to use from several threads."""

    def __init__(self, *arguments):
        """`arguments` are those of run_template after the socket."""
        self._arguments, self._lock, self._closed = arguments, threading.Lock(), False
        self._start()

    def fork(self, dead: int) -> _Scorer:
        """A new process, in place of the one that was killed, or 0; the template itself is replaced if need be.

        Raises OSError if it cannot be started.
        """
        with self._lock:
            try:
                return self._fork(dead)
            except OSError:  # it was killed, or stands still
                self._end()
                self._start()
                return self._fork(0)

    def _start(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("the reward pool is closed")
        self._control, theirs = socket.socketpair()
        # Python ends daemon processes when it ends; others it would wait for.
        self._process = _Context().Process(target=run_template, args=(theirs, *self._arguments), daemon=True)
        with theirs:
            self._process.start()
        self._is_ready = False

    def _fork(self, dead: int) -> _Scorer:
        if not self._is_ready:
            self._control.settimeout(_MAX_START_S)
            self._is_ready = self._ask(len(READY)) == READY
        self._control.settimeout(_MAX_FORK_S)
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"%d" % dead], [theirs.fileno()])
        return _Scorer(int(self._ask(64)), ours)

    def _ask(self, num_bytes: int) -> bytes:
        if not (reply := self._control.recv(num_bytes)):
            raise ConnectionResetError("the template has ended")
        return reply

    def _end(self) -> None:
        self._process.kill()
        self._process.join()
        self._control.close()

    def close(self) -> None:
        """End the template, and with it all scorers."""
        self._closed = True
        self._process.kill()  # whoever waits for it sees its end
        with self._lock:
            self._end()
