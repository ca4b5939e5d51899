"""What a response is worth: the score of its task, or reward functions of the user's own, weighted and added up.

A function of one's own is called as `f(response=TEXT, **row)`, where `row` has the columns of the response's problem:
those that it names, or all where it takes `**` (a column called `response` is hidden by the policy's). It returns a
number up to MAX_REWARD, or a dict of such by name, its parts, whose sum counts. With `async def` it may wait for
others, as for a judge behind HTTP.
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

from asyncrl.tasks import score_of
from asyncrl.user_code import is_user_code, load

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
    """A reward or an environment raised, hung, died or gave what it must not. The message is one line of UTF-8 text."""

    def __init__(self, reason: str):
        # foreign code may quote lone surrogates
        text = reason.encode(errors="backslashreplace").decode()
        super().__init__(" ".join(text[:MAX_FAILURE].split()))


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores."""

    call: Callable
    text: str = ""
    """FILE.py:NAME; empty for the score of a shipped task."""
    weight: float = 1.0
    label: str = ""
    """What its reward is logged as; empty if it is the only function."""
    columns: frozenset[str] | None = None
    """Names of the columns that it takes; None for all."""
    is_of_task: bool = False
    """Whether it is the score of a task, called as `call(answer, response)`."""

    @property
    def is_async(self) -> bool:
        """Whether what it returns is to be awaited."""
        method = getattr(self.call, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(method)

    def begin(self, answer: str, response: str) -> Any:
        """What the function returns."""
        if self.is_of_task:
            return self.call(answer, response)
        row = _row(answer)
        taken = (
            row if self.columns is None else {name: row[name] for name in self.columns & row.keys()}
        )
        return self.call(**{**taken, "response": response})

    def read(self, returned: Any) -> Scored:
        """The weighted reward and the parts in what the function returned."""
        parts = {}
        if isinstance(returned, dict):
            parts = {
                name: _number(part, f"the part {brief(name)}") for name, part in returned.items()
            }
        reward = _number(sum(parts.values()) if parts else returned, "the reward")
        if self.label:
            parts = {
                self.label: reward,
                **{f"{self.label}.{name}": part for name, part in parts.items()},
            }
        return self.weight * reward, parts

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turn what the function raises into a Failed that says where: file, function and line."""
        try:
            yield
        except BaseException as error:  # foreign code may raise anything
            file = self.text.rpartition(":")[0]
            lines = [
                line
                for frame, line in traceback.walk_tb(error.__traceback__)
                if frame.f_code.co_filename == file
            ]
            where = self.text and f"{self.text}{f', line {lines[-1]}' if lines else ''}: "
            raise Failed(where + one_line(error)) from None


class Score:
    """Scores responses by some functions."""

    def __init__(self, functions: Sequence[RewardFunction]):
        self.functions = functions
        self.is_async = any(function.is_async for function in functions)

    def of(self, is_async: bool) -> "Score":
        """The same by its async functions alone, or by its plain ones."""
        return Score([function for function in self.functions if function.is_async == is_async])

    def __str__(self) -> str:
        """The user's own functions, to begin a message about all of them with; empty for a task's."""
        return "".join(f"{function.text}: " for function in self.functions if function.text)

    def __call__(self, answer: str, response: str) -> Scored:
        """Reward and parts by plain functions. Raises Failed, whatever they raise."""
        found = []
        for function in self.functions:
            with function.named():
                found.append(function.read(function.begin(answer, response)))
        return add(found, str(self))

    async def together(self, answer: str, response: str) -> Scored:
        """Reward and parts by async functions, which wait together. Raises Failed, whatever they raise."""

        async def wait(function: RewardFunction) -> Scored:
            with function.named():
                return function.read(await function.begin(answer, response))

        return add(await asyncio.gather(*map(wait, self.functions)), str(self))


def load_score(task: str, rewards: Sequence[str] = ()) -> Score:
    """The score of a task or, in its place, reward functions: `FILE.py:NAME` or `FILE.py:NAME*WEIGHT` each.

    Raises ValueError, in one line, for a file that cannot be loaded and for what is no reward function.
    """
    if not rewards:
        return Score(
            [
                RewardFunction(
                    score_of(task), f"{task}.score" if is_user_code(task) else "", is_of_task=True
                )
            ]
        )
    functions = [_load(*reward.partition("*"), is_only=len(rewards) == 1) for reward in rewards]
    labels = [function.label for function in functions]
    for function in functions:
        if function.label in _TAKEN or (function.label and labels.count(function.label) > 1):
            raise ValueError(
                f"--reward {function.text} would be reward/{function.label}, as another metric; rename it"
            )
    return Score(functions)


def _load(text: str, star: str, weight: str, is_only: bool) -> RewardFunction:
    """One function, of FILE.py:NAME and a weight if there is a star."""
    call = load(text, "--reward")
    if not callable(call):
        raise ValueError(
            f"--reward {text} is {brief(call)}, not a function: write `def NAME(response, answer, **row)`"
        )
    try:
        factor = float(weight if star else 1)
    except ValueError:
        factor = math.nan
    if not math.isfinite(factor):
        raise ValueError(
            f"--reward {text}*{weight}: the weight is {weight!r}, not a finite number; write *0.5, say"
        )
    parameters = inspect.signature(call).parameters.values()
    columns = frozenset(
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if "response" not in columns and not takes_all:
        raise ValueError(
            f"--reward {text} takes {sorted(columns)}, and not `response`, the text that it is to score"
        )
    label = "" if is_only else text.rpartition(":")[2]
    return RewardFunction(call, text, factor, label, None if takes_all else columns)


def _row(answer: str) -> dict:
    """The columns of a problem."""
    if answer.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(answer)
    return {"answer": answer}


def _number(value: Any, what: str) -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return bounded(float(value), what)
    raise Failed(
        f"{what} is {brief(value)}, not a finite number{' or a dict of them' * (what == 'the reward')}"
    )


def bounded(number: float, what: str) -> float:
    """The number. Raises Failed if it is larger than a reward may be."""
    if abs(number) > MAX_REWARD:
        raise Failed(
            f"{what} is {number:g}, allowed is {-MAX_REWARD:g} to {MAX_REWARD:g}; scale it down"
        )
    return number


def add(found: Sequence[Scored], whose: str = "") -> Scored:
    """The sum of rewards, and all their parts. Raises Failed if these are what no log can have."""
    parts = {name: part for _, of_one in found for name, part in of_one.items()}
    if not are_parts(parts):
        allowed = f"{MAX_PARTS} printable names of at most {MAX_NAME} characters, none of them {', '.join(_TAKEN)}"
        raise Failed(
            f"{whose}the reward has {len(parts)} parts, {brief([*parts])}; allowed are {allowed}"
        )
    return _number(sum(reward for reward, _ in found), f"{whose}the sum of rewards"), parts


def are_parts(parts: dict) -> bool:
    """Whether a reward may have these parts: names that a log can have, and numbers that rewards may be."""
    are_names = all(
        isinstance(n, str) and n.isprintable() and len(n) <= MAX_NAME and n not in _TAKEN
        for n in parts
    )
    are_numbers = all(abs(part) <= MAX_REWARD for part in parts.values())
    return are_names and "" not in parts and len(parts) <= MAX_PARTS and are_numbers


def one_line(error: BaseException) -> str:
    """Type and message of what foreign code raised, on one line, even where its `__str__` raises too; a Failed has
    that already as its message."""
    if type(error) is Failed:
        return str(error)
    return " ".join("".join(traceback.format_exception_only(error))[:_MAX_REASON].split())


def brief(value: object) -> str:
    """What foreign code returned, in a few words on one line."""
    return " ".join(reprlib.repr(value).split())
