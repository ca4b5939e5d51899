"""A pool of processes that score responses, each of which can be killed alone and is replaced within milliseconds.

Every process has a socket of its own and a thread here that waits for it. So one that hangs, dies or is stopped costs
the response that it scores, and keeps only one thread waiting; the others go on. What runs there, and what it is kept
from, is in reward_process.py. They send JSON and nothing else, as a hostile one could send anything.

One with async functions has many responses at once. If it dies, or its event loop stands still, nobody knows by whose
fault, so all of them are scored once more, each alone.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from asyncrl.engine.reward_process import READY
from asyncrl.engine.score import MAX_REWARD, Failed, Scored, add, are_parts, load_score

_MAX_BATCH = 64
"""Responses sent at once: scoring a short one takes less time than sending it."""
_MAX_START_S = 60.0
"""Longest start of the template, imports included; they compete with vLLM's for the CPU."""
_MAX_FORK_S = 5.0
"""Longest wait for a process forked from it: it has all imports and copies nothing."""
_MAX_REPLY = 1 << 16  # bytes: a message of 500 characters is far below
_GRACE_S = 2.0  # an event loop that is silent so much longer than its own limit stands still
_TEMPLATE = """import json, sys
sys.path, *arguments = json.loads(sys.argv[1])
from asyncrl.engine.reward_process import run_template
run_template(*arguments)"""


@dataclass(eq=False)
class _Item:
    answer: str
    response: str
    reward: Future = field(default_factory=Future)
    died: bool = False
    """Whether a process died with it. That may have been killed by somebody else, so it is scored once more."""


class Rewards:
    """Scores responses to a task in processes that can be killed: by plain functions and by async ones."""

    def __init__(self, task: str, rewards: Sequence[str], timeout_s: float, num_processes: int, title: str = "rewards"):
        """As of RewardPool."""
        kinds = {function.is_async for function in load_score(task, rewards).functions}
        self._pools = [RewardPool(task, rewards, timeout_s, num_processes, title, kind) for kind in sorted(kinds)]

    async def score(self, answer: str, response: str) -> Scored:
        """As of RewardPool."""
        return add(await asyncio.gather(*(pool.score(answer, response) for pool in self._pools)))

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for pool in self._pools:
            pool.close()


class RewardPool:
    """Scores responses by plain functions, or by async ones, in processes that can be killed."""

    def __init__(
        self, task: str, rewards: Sequence[str], timeout_s: float, num_processes=4, title="rewards", is_async=False
    ) -> None:
        """`rewards` are those of load_score, here without the functions of the other kind; `title` is for ps.

        Raises ValueError for a file that cannot be loaded and for what is no reward function.
        """
        self._functions = str(load_score(task, rewards).of(is_async))
        self._timeout_s, self._num_processes, self._is_async = timeout_s, num_processes, is_async
        self._template = _Template(task, rewards, is_async, title)
        self._changed = threading.Condition()
        self._waiting: collections.deque[_Item] = collections.deque()
        self._closed = False
        for _ in range(num_processes):
            threading.Thread(target=self._score_waiting, name=title, daemon=True).start()

    async def score(self, answer: str, response: str) -> Scored:
        """Reward of one response, and its parts; `timeout_s` bounds its scoring, not the time it waits for its turn.

        Raises Failed if the reward raises, hangs, kills its process, or is neither a finite number nor a dict.
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

    def _take(self, is_free: bool = True) -> list[_Item]:
        """Wait for responses, unless others are scored, and take this thread's share; none when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed or not is_free)
            share = min(_MAX_BATCH, -(-len(self._waiting) // self._num_processes))
            if self._is_async and share and self._waiting[0].died:
                share = int(is_free)  # it is to be alone
            return [] if self._closed else [self._waiting.popleft() for _ in range(share)]

    def _score_waiting(self) -> None:
        """Have one process score what waits, and replace it when it fails; runs in a thread."""
        scorer, dead, numbers = None, 0, itertools.count()  # none twice, as a hostile one may answer twice
        while taken := self._take():
            items = {number: item for item, number in zip(taken, numbers, strict=False)}
            try:
                scorer = scorer or self._template.fork(dead)
                self._score(scorer, items, numbers)
            except (OSError, EOFError, ValueError, RecursionError) as error:  # the last two by hostile JSON
                self._on_failure(items, None if scorer is None else error)
                dead, scorer, numbers = scorer.kill() if scorer else 0, None, itertools.count()
            if items:
                with self._changed:
                    self._waiting.extendleft(reversed(items.values()))
                    self._changed.notify_all()
        if scorer is not None:
            scorer.kill()

    def _score(self, scorer: "_Scorer", items: dict[int, _Item], numbers: Iterator[int]) -> None:
        """Settle items, and beside async ones what comes meanwhile; those that an error leaves are not scored."""
        scorer.connection.settimeout(self._timeout_s + _GRACE_S * self._is_async)
        scorer.send(items, self._timeout_s)
        while items:
            number, outcome = scorer.receive(items)
            _settle(items.pop(number), outcome)
            if self._is_async and (taken := self._take(is_free=False)):
                items |= (more := {number: item for item, number in zip(taken, numbers, strict=False)})
                scorer.send(more, self._timeout_s)

    def _on_failure(self, items: dict[int, _Item], error: Exception | None) -> None:
        """Say of the item that was scored why it has no reward, unless it is worth another try."""
        first = next(iter(items))
        if error is None:
            _settle(items.pop(first), f"{self._functions}its process cannot be started; the log of its worker says why")
        elif self._is_async and len(items) > 1:
            for item in items.values():
                item.died = True
        elif isinstance(error, TimeoutError):
            _settle(items.pop(first), f"{self._functions}timed out after {self._timeout_s:g} s")
        elif items[first].died:
            _settle(items.pop(first), f"{self._functions}its process died")
        else:
            items[first].died = True


def _settle(item: _Item, outcome: Scored | str) -> None:
    if not item.reward.set_running_or_notify_cancel():
        return
    if isinstance(outcome, str):
        item.reward.set_exception(Failed(outcome))
    else:
        item.reward.set_result(outcome)


class _Scorer:
    """One process that scores, seen from here."""

    def __init__(self, pid: int, connection: socket.socket):
        self._pid, self.connection = pid, connection
        self._replies = connection.makefile("rb")

    def send(self, items: dict[int, _Item], timeout_s: float) -> None:
        """Ask for the rewards of items, by numbers."""
        request = json.dumps([timeout_s, [[number, item.answer, item.response] for number, item in items.items()]])
        self.connection.sendall(request.encode() + b"\n")

    def receive(self, items: dict[int, _Item]) -> tuple[int, Scored | str]:
        """The number of an item, with its reward and parts, or one line that says why there are none.

        Raises TimeoutError if that takes too long, and OSError, EOFError, ValueError or RecursionError if the process
        dies or says what it should not.
        """
        line = self._replies.readline(_MAX_REPLY)
        if not line.endswith(b"\n"):
            raise EOFError
        match json.loads(line):
            case [int(number), str(why)] if number in items:
                return number, why
            case [int(number), float(reward), dict(parts)] if number in items and are_parts(parts):
                if abs(reward) <= MAX_REWARD:
                    return number, (reward, parts)
        raise ValueError(f"a reward process sent {line[:100]!r}")

    def kill(self) -> int:
        """End the process and what it has started. Returns its pid, which nobody has before it is reaped."""
        for kill in (os.killpg, os.kill):  # it is no group before it has made itself one
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        self.connection.close()
        return self._pid


class _Template:
    """The process from which scorers are forked; it never sees a response. Safe to use from several threads."""

    def __init__(self, *arguments):
        """`arguments` are those of run_template after the socket's descriptor."""
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
        with theirs:  # a plain process: multiprocessing's would import this one's __main__, and torch and vllm with it
            arguments = json.dumps([sys.path, theirs.fileno(), *self._arguments])
            command = [sys.executable, "-c", _TEMPLATE, arguments]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
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
        self._process.wait()
        self._control.close()

    def close(self) -> None:
        """End the template, and with it all scorers."""
        self._closed = True
        self._process.kill()  # whoever waits for it sees its end
        with self._lock:
            self._end()
