"""What a response is worth: the score of its task, or the user's reward functions, weighted and added up.

A reward function is called as `f(response=TEXT, **row)`. `row` has the columns of the response's problem: those that
the function names, or all if it takes `**`. The policy's response hides a column called `response`. The function
returns a number up to MAX_REWARD, or a dict of such numbers by name: its parts, whose sum counts. With `async def` it
may wait for others, such as a judge behind HTTP.
"""

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import reprlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.config import nearest
from asyncrl.tasks import score_of
from asyncrl.user_code import is_user_code, load
from data.problem import Problem

Scored = tuple[float, dict[str, float]]
"""A reward, and its parts by name, which are logged as reward/NAME."""
MAX_PARTS, MAX_NAME = 64, 128
_TAKEN = ("mean", "std", "zero_variance_groups")  # metrics that are called reward/…, too
_MAX_REASON = 500  # characters: an error message may quote a whole response
MAX_FAILURE = 1000
"""Characters of a failure's message."""
MAX_REWARD = 1e12
"""Largest absolute value of a reward and of its parts. The trainer adds squares in float32, which ends at 3e38. A
square of 1e24 leaves room for the gradients of log-probs, and for their number."""


class Failed(Exception):
    """A reward or an environment raised, hung, died or returned nonsense. The message is one line of UTF-8 text."""

    def __init__(self, reason: str):
        # foreign code may quote lone surrogates
        text = reason.encode(errors="backslashreplace").decode()
        super().__init__(" ".join(text[:MAX_FAILURE].split()) or "no reason was given")


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores."""

    call: Callable[[str, str], Any]
    """Returns what the function returns for a problem's answer and a response."""
    is_async: bool
    """Whether what it returns is to be awaited."""
    text: str = ""
    """FILE.py:NAME; empty for the score of a shipped task."""
    weight: float = 1.0
    label: str = ""
    """The name of its reward in the log; empty if it is the only function."""
    needed: Sequence[str] = ()
    """What it must be called with."""

    def score(self, answer: str, response: str) -> Scored:
        """Return the weighted reward and its parts. Raises Failed, whatever the function raises."""
        with self._blamed():
            return self._read(self.call(answer, response))

    async def wait(self, answer: str, response: str) -> Scored:
        """Return the same as `score`, by an async function."""
        with self._blamed():
            return self._read(await self.call(answer, response))

    def _read(self, returned: Any) -> Scored:
        """Return the weighted reward and the parts in what the function returned."""
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

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """Turn what the function raises into a Failed that names file, function and line."""
        try:
            yield
        except BaseException as error:  # foreign code may raise anything
            file = self.text.rpartition(":")[0]
            place = self.text
            for frame, line in traceback.walk_tb(error.__traceback__):
                if frame.f_code.co_filename == file:
                    place = f"{self.text}, line {line}"
            raise Failed(f"{place}: {one_line(error)}" if place else one_line(error)) from None


class Score:
    """Scores responses by some functions."""

    def __init__(self, functions: Sequence[RewardFunction]):
        self.functions = functions
        self.is_async = any(function.is_async for function in functions)

    def of(self, is_async: bool) -> "Score":
        """Return the score by the async functions alone, or by the plain ones."""
        return Score([function for function in self.functions if function.is_async == is_async])

    def __str__(self) -> str:
        """The user's functions, as the beginning of a message about all of them; empty for a shipped task."""
        return "".join(f"{function.text}: " for function in self.functions if function.text)

    def check(self, problem: Problem) -> None:
        """Raise ValueError for a problem that cannot be scored, whatever the response is.

        It lacks a column that a function needs, or the score of a shipped task refuses its answer.
        """
        row = {"response": "", **_row(problem.answer)}
        place = f"{problem.place}: " * bool(problem.place)
        for function in self.functions:
            what = f"--reward {function.text}" if function.text else "a row without --reward"
            for name in function.needed:
                if name not in row:
                    raise ValueError(
                        f"{place}{what} needs {name}, and has {', '.join(sorted(row))}; rename it{nearest(name, row)}"
                    )
                if row[name] is None:
                    raise ValueError(
                        f"{place}{what} needs {name}, and there it is null; fill it or leave the row out"
                        f"{', or give the parameter a default' * bool(function.text)}"
                    )
            if not function.text:
                try:
                    function.call(problem.answer, "")
                except ValueError as error:
                    raise ValueError(f"{place}{error}") from None

    def __call__(self, answer: str, response: str) -> Scored:
        """Return reward and parts by plain functions. Raises Failed, whatever they raise."""
        return add([function.score(answer, response) for function in self.functions], str(self))

    async def wait(self, answer: str, response: str) -> Scored:
        """Return reward and parts by async functions, which wait together. Raises Failed, whatever they raise."""
        waiting = [function.wait(answer, response) for function in self.functions]
        return add(await asyncio.gather(*waiting), str(self))


def load_score(task: str, rewards: Sequence[str] = ()) -> Score:
    """Return the score of a task, or of the reward functions that replace it: `FILE.py:NAME` or `FILE.py:NAME*WEIGHT`.

    Raises ValueError, in one line, for a file that cannot be loaded and for what is no reward function.
    """
    if not rewards:
        call = score_of(task)
        text = f"{task}.score" * is_user_code(task)
        return Score([RewardFunction(call, _is_async(call), text, needed=["answer"])])
    functions = [_load(reward, is_only=len(rewards) == 1) for reward in rewards]
    labels = [function.label for function in functions if function.label]
    for function in functions:
        if function.label in _TAKEN or labels.count(function.label) > 1:
            raise ValueError(
                f"--reward {function.text} would be reward/{function.label}, as another metric; rename it"
            )
    return Score(functions)


def _load(reward: str, is_only: bool) -> RewardFunction:
    """Return the function of FILE.py:NAME or FILE.py:NAME*WEIGHT."""
    text, star, weight = reward.partition("*")
    function = load(text, "--reward")
    if not callable(function):
        raise ValueError(
            f"--reward {text} is {brief(function)}, not a function: write `def NAME(response, answer, **row)`"
        )
    try:
        factor = float(weight if star else 1)
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ValueError(
            f"--reward {reward}: the weight is {weight!r}, not a finite number; write *0.5, say"
        )
    parameters = inspect.signature(function).parameters.values()
    columns = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "response" not in columns and not takes_all:
        raise ValueError(
            f"--reward {text} takes {sorted(columns)}, and not `response`, the text that it is to score"
        )

    needed = [p.name for p in parameters if p.name in columns and p.default is p.empty]

    def call(answer: str, response: str) -> Any:
        row = _row(answer)
        taken = row if takes_all else {name: row[name] for name in columns & row.keys()}
        return function(**{**taken, "response": response})

    label = "" if is_only else text.rpartition(":")[2]
    return RewardFunction(call, _is_async(function), text, factor, label, needed)


def _is_async(function: Callable) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, function.__call__)))


def _row(answer: str) -> dict:
    """Return the columns of a problem."""
    if answer.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(answer)
    return {"answer": answer}


def number_of(value: Any, what: str) -> float:
    """Return a number, also of an array without dimensions. Raises Failed for what is none, or larger than a reward may
    be."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not (isinstance(value, numbers.Real) and math.isfinite(value)):
        raise Failed(
            f"{what} is {brief(value)}, not a finite number{' or a dict of them' * (what == 'the reward')}"
        )
    if abs(value) > MAX_REWARD:
        raise Failed(
            f"{what} is {value:g}, allowed is {-MAX_REWARD:g} to {MAX_REWARD:g}; scale it down"
        )
    return float(value)


def add(scores: Sequence[Scored], whose: str = "") -> Scored:
    """Return the sum of rewards, and all their parts. Raises Failed for parts that no log can have."""
    parts = {name: part for _, parts_of_one in scores for name, part in parts_of_one.items()}
    if not are_parts(parts):
        raise Failed(
            f"{whose}the reward has {len(parts)} parts, {brief([*parts])}; allowed are {MAX_PARTS} printable names of "
            f"at most {MAX_NAME} characters, none of them {', '.join(_TAKEN)}"
        )
    return number_of(sum(reward for reward, _ in scores), f"{whose}the sum of rewards"), parts


def are_parts(parts: dict) -> bool:
    """Whether a reward may have these parts: names that a log can have, and numbers that rewards may be."""
    return len(parts) <= MAX_PARTS and all(
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name) <= MAX_NAME
        and name not in _TAKEN
        and abs(part) <= MAX_REWARD
        for name, part in parts.items()
    )


def one_line(error: BaseException) -> str:
    """Return type and message of what foreign code raised, on one line, even where its `__str__` raises too.

    A Failed already has such a line as its message.
    """
    if type(error) is Failed:
        return str(error)
    return " ".join("".join(traceback.format_exception_only(error))[:_MAX_REASON].split())


def brief(value: object) -> str:
    """Return what foreign code returned, in a few words on one line."""
    return " ".join(reprlib.repr(value).split())
