"""The reward of a response: the score of its task, or the weighted sum of the user's reward functions.

A reward function is called as `f(response=TEXT, **row)`. `row` has the problem's columns that the function names, or
all if it takes `**`. The response hides a column called `response`. The function returns a number up to MAX_REWARD, or
a dict of such numbers, its parts. Their sum is the reward. With `async def` it can wait for a service, such as a judge.
"""

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import reprlib
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config import nearest
from asyncrl.tasks import score_of
from asyncrl.user_code import is_user_code, load
from data.problem import Problem

Reward = tuple[float, dict[str, float]]
"""A reward, and its parts by name. They are logged as reward/NAME."""
MAX_PARTS = 64
MAX_NAME = 128
"""Characters of a part's name."""
_RESERVED_NAMES = ("mean", "std", "zero_variance_groups", "overlong_penalty")
"""Other metrics with the prefix reward/."""
_MAX_REASON = 500
"""Characters of an error's text. An error can quote a whole response."""
MAX_FAILURE = 1000
"""Characters of a failure's message."""
MAX_REWARD = 1e12
"""Largest absolute value of a reward and of its parts. The trainer adds squares in float32, up to 3e38. A square of
1e24 leaves room for the gradients of log-probs, and for their number."""


class Failed(Exception):
    """A reward or an environment raised, hung, died or returned an invalid value. The message is one line."""

    def __init__(self, reason: str):
        # foreign code may quote lone surrogates
        text = reason.encode(errors="backslashreplace").decode()
        super().__init__(" ".join(text[:MAX_FAILURE].split()) or "no reason was given")


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores."""

    call: Callable[[str, str], Any]
    """Takes a problem's answer and a response. Returns the function's value, or its coroutine."""
    is_async: bool
    """True if `call` returns a coroutine."""
    text: str = ""
    """FILE.py:NAME; empty for the score of a shipped task."""
    weight: float = 1.0
    label: str = ""
    """Name of its reward in the log; empty if it is the only function."""
    needed: Sequence[str] = ()
    """Columns without a default."""

    async def score(self, answer: str, response: str) -> Reward:
        """Return the weighted reward and its parts. Raises Failed for anything that the function raises."""
        try:
            returned = self.call(answer, response)
            if self.is_async:
                returned = await returned
            return self._read(returned)
        except BaseException as error:  # foreign code can raise anything
            raise Failed(self._describe(error)) from None

    def _read(self, returned: Any) -> Reward:
        """Return the weighted reward and the parts in the function's value."""
        parts = {}
        if isinstance(returned, dict):
            parts = {
                name: number_of(part, f"the part {brief(name)}") for name, part in returned.items()
            }
        reward = number_of(sum(parts.values()) if parts else returned, "the reward")
        if self.label:
            named = {f"{self.label}.{name}": part for name, part in parts.items()}
            parts = {self.label: reward, **named}
        return self.weight * reward, parts

    def _describe(self, error: BaseException) -> str:
        """Return file, function, line and text of an error."""
        file = self.text.rpartition(":")[0]
        place = self.text
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == file:
                place = f"{self.text}, line {line}"
        return f"{place}: {one_line(error)}" if place else one_line(error)


class RewardScorer:
    """Scores responses by some functions."""

    def __init__(self, functions: Sequence[RewardFunction]):
        self.functions = functions
        self.is_async = any(function.is_async for function in functions)

    def only(self, is_async: bool) -> "RewardScorer":
        """Return the scorer that has only the async functions, or only the plain ones."""
        return RewardScorer(
            [function for function in self.functions if function.is_async == is_async]
        )

    def __str__(self) -> str:
        """Return the first words of a message about the user's functions; empty for a shipped task."""
        return "".join(f"{function.text}: " for function in self.functions if function.text)

    def check(self, problem: Problem) -> None:
        """Raise ValueError for a problem that lacks a needed column, or whose answer a shipped task refuses.

        A column that is null is missing.
        """
        columns = sorted(name for name, value in _row(problem.answer).items() if value is not None)
        place = f"{problem.place}: " * bool(problem.place)
        for function in self.functions:
            scored = f"--reward {function.text}" if function.text else "a row without --reward"
            for name in function.needed:
                if name not in ("response", *columns):
                    advice = "fill or rename it, or give --reward FILE.py:FUNCTION"
                    if function.text:
                        advice = "fill or rename it, or give the parameter a default"
                    raise ValueError(
                        f"{place}{scored} needs the column {name}, and the row has values in {', '.join(columns)}; "
                        f"{advice}{nearest(name, columns)}"
                    )
            if not function.text:
                try:
                    function.call(problem.answer, "")
                except ValueError as error:
                    raise ValueError(f"{place}{error}") from None

    def score(self, answer: str, response: str) -> Reward:
        """Return reward and parts by plain functions. Raises Failed."""
        rewards = [_result(function.score(answer, response)) for function in self.functions]
        return add_rewards(rewards, str(self))

    async def gather(self, answer: str, response: str) -> Reward:
        """Return reward and parts by async functions. They wait together. Raises Failed."""
        scoring = (function.score(answer, response) for function in self.functions)
        return add_rewards(await asyncio.gather(*scoring), str(self))


def _result(coroutine: Coroutine) -> Any:
    """Run a coroutine that never waits, without an event loop, because a plain function may start its own."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value


def load_scorer(task: str, rewards: Sequence[str] = ()) -> RewardScorer:
    """Return the scorer of a task, or of reward functions instead: `FILE.py:NAME` or `FILE.py:NAME*WEIGHT` each.

    Raises ValueError for a file that cannot be loaded, and for an object that is no reward function.
    """
    if not rewards:
        call = score_of(task)
        text = f"{task}.score" * is_user_code(task)
        return RewardScorer([RewardFunction(call, _is_async(call), text, needed=["answer"])])
    functions = [_load(reward, is_only=len(rewards) == 1) for reward in rewards]
    labels = [function.label for function in functions if function.label]
    for function in functions:
        if function.label in _RESERVED_NAMES or labels.count(function.label) > 1:
            raise ValueError(
                f"--reward {function.text} would be reward/{function.label}, as another metric; rename it"
            )
    return RewardScorer(functions)


def _load(reward: str, is_only: bool) -> RewardFunction:
    text, _, weight = reward.partition("*")
    function = load(text, "--reward")
    if not callable(function):
        raise ValueError(
            f"--reward {text} is {brief(function)}, not a function: write `def NAME(response, answer, **row)`"
        )
    parameters = inspect.signature(function).parameters.values()
    columns = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "response" not in columns and not takes_all:
        raise ValueError(
            f"--reward {text} takes {sorted(columns)}, and not `response`, the text that it must score"
        )

    needed = [p.name for p in parameters if p.name in columns and p.default is p.empty]

    def call(answer: str, response: str) -> Any:
        row = _row(answer)
        taken = row if takes_all else {name: row[name] for name in columns & row.keys()}
        return function(**{**taken, "response": response})

    label = "" if is_only else text.rpartition(":")[2]
    return RewardFunction(call, _is_async(function), text, float(weight or 1), label, needed)


def _is_async(function: Callable) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, function.__call__)))


def _row(answer: str) -> dict:
    if answer.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(answer)
    return {"answer": answer}


def number_of(value: Any, name: str) -> float:
    """Return a finite number up to MAX_REWARD, also from an array without dimensions.

    Raises Failed for other values, with the `name` of the value.
    """
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not (isinstance(value, numbers.Real) and math.isfinite(value)):
        raise Failed(
            f"{name} is {brief(value)}, not a finite number{' or a dict of them' * (name == 'the reward')}"
        )
    if abs(value) > MAX_REWARD:
        raise Failed(
            f"{name} is {value:g}, allowed is {-MAX_REWARD:g} to {MAX_REWARD:g}; scale it down"
        )
    return float(value)


def add_rewards(rewards: Sequence[Reward], functions: str = "") -> Reward:
    """Return the sum of rewards, and all their parts. Raises Failed for parts that no log can have."""
    parts = {name: part for _, parts_of_one in rewards for name, part in parts_of_one.items()}
    if not are_parts(parts):
        raise Failed(
            f"{functions}the reward has {len(parts)} parts, {brief([*parts])}; allowed are {MAX_PARTS} printable names "
            f"of at most {MAX_NAME} characters, none of them {', '.join(_RESERVED_NAMES)}"
        )
    return number_of(sum(reward for reward, _ in rewards), f"{functions}the sum of rewards"), parts


def are_parts(parts: dict) -> bool:
    """Return whether a log can have these names of parts, and rewards these values."""
    return len(parts) <= MAX_PARTS and all(
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name) <= MAX_NAME
        and name not in _RESERVED_NAMES
        and isinstance(part, float)
        and abs(part) <= MAX_REWARD
        for name, part in parts.items()
    )


def one_line(error: BaseException) -> str:
    """Return type and message of an error of foreign code on one line, even if its `__str__` raises."""
    if isinstance(error, Failed):
        return str(error)
    return " ".join("".join(traceback.format_exception_only(error))[:_MAX_REASON].split())


def brief(value: object) -> str:
    """Return a value of foreign code in a few words on one line."""
    return " ".join(reprlib.repr(value).split())
