"""Environments of several turns, by gymnasium's API: they run off the event loop with a timeout.

Whatever such an environment does fails only its own trajectory.
"""

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from asyncrl.engine.environments import Step
from asyncrl.engine.rewards import Failed, brief, number_of, one_line
from asyncrl.records import Completion
from extras.conversation import Conversation

MAX_OBSERVATION = 100_000  # characters: fast to tokenise, and a thousand of them may be remembered


@dataclass(eq=False)
class MultiTurn:
    """A gymnasium environment of text, called off the event loop and with a timeout.

    Its results are checked and tokenised in the same call. So a fault of the environment is not a fault of this code. A
    long observation does not delay other trajectories.
    """

    pool: "EnvironmentPool"
    seed: int
    environment: Any = None

    async def reset(self) -> list[int]:
        return await call_in_thread(self._reset, timeout_s=self.pool.timeout_s)

    def _reset(self) -> list[int]:
        self.environment = self.pool.take()
        observation, _ = _items(
            self.environment.reset(seed=self.seed), "reset", "observation, info"
        )
        return self.pool.conversation.first(_text(observation))

    async def step(self, turn: Completion) -> Step:
        response = self.pool.tokenizer.decode(turn.text_tokens)
        ended_turn = turn.tokens[-1:] == [self.pool.conversation.end_of_turn]
        return await call_in_thread(self._step, response, ended_turn, timeout_s=self.pool.timeout_s)

    def end(self, *, is_idle: bool) -> None:
        """Keep the environment for the next episode, or close it."""
        if is_idle:
            self.pool.idle.append(self.environment)
        elif self.environment is not None:
            self.pool.close_in_thread(self.environment)

    def _step(self, response: str, ended_turn: bool) -> Step:
        names = "observation, reward, terminated, truncated, info"
        observation, reward, terminated, truncated, _ = _items(
            self.environment.step(response), "step", names
        )
        reward = number_of(reward, "the step's reward")
        if _flag(terminated, "terminated") | _flag(truncated, "truncated"):
            return Step([], reward, ended=True, observation=_readable(observation))
        text = _text(observation)
        tokens = self.pool.conversation.reply(text, ended_turn)
        return Step(tokens, reward, ended=False, observation=text)


def _items(returned: Any, method: str, names: str) -> tuple | list:
    if isinstance(returned, tuple | list) and len(returned) == names.count(",") + 1:
        return returned
    raise Failed(f"{method} returned {brief(returned)}, expected ({names})")


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise Failed(f"the observation is {brief(observation)}, expected a str")
    if len(observation) > MAX_OBSERVATION:
        raise Failed(
            f"the observation has {len(observation)} characters, at most {MAX_OBSERVATION} fit"
        )
    try:
        observation.encode()
    except UnicodeEncodeError as error:
        where = f"{observation[error.start]!r} at character {error.start}"
        raise Failed(
            f"the observation has {where}, expected text without lone surrogates"
        ) from None
    return observation


def _readable(observation: Any) -> str:
    """Return the last observation for people. The policy does not read it, so it can be anything."""
    if not isinstance(observation, str):
        return ""
    return observation[:MAX_OBSERVATION].encode(errors="replace").decode()


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise Failed(f"{name} is {brief(value)}, expected True or False")
    return bool(value)


class EnvironmentPool:
    """Environments of one kind. One whose episode ended is used again. One that failed or hangs is closed."""

    def __init__(self, make: Callable[[], Any], tokenizer, timeout_s: float):
        """`make()` returns a new environment. Raises ValueError for a tokenizer that cannot hold a conversation."""
        self.tokenizer, self.timeout_s = tokenizer, timeout_s
        self.conversation = Conversation(tokenizer)
        self.idle: list = []
        """Environments for the next episodes."""
        self._make = make

    def take(self):
        """Return an unused environment. Any thread may call it, because making an environment is foreign code, too."""
        try:
            return self.idle.pop()
        except IndexError:
            return self._make()

    @staticmethod
    def close_in_thread(environment: Any) -> None:
        """Close an environment, as far as it can be closed: this does not wait, and no error counts."""

        def close() -> None:
            with contextlib.suppress(BaseException):  # foreign code may raise anything
                environment.close()

        threading.Thread(target=close, name="close environment", daemon=True).start()

    def close(self) -> None:
        """Close all environments that play no episode."""
        while self.idle:
            self.close_in_thread(self.idle.pop())


async def call_in_thread(function: Callable, *arguments, timeout_s: float) -> Any:
    """Return the function's result, off the event loop, in a daemon thread.

    A thread that hangs does not stop the process, not even at exit.
    Raises Failed if the function raises anything at all, or takes too long.
    """
    result: Future = Future()
    result.set_running_or_notify_cancel()  # from here on it cannot be stopped; a caller can only stop waiting

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:  # foreign code may raise anything
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = "" if type(error) is Failed else f"{frame.filename}, line {frame.lineno}: "
            result.set_exception(Failed(f"{place}{one_line(error)}"))

    threading.Thread(target=run, name="environment", daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(result)
    except TimeoutError:
        raise Failed(f"timed out after {timeout_s:g} s") from None
