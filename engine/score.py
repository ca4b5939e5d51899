"""What a response is worth: the score of its task, or reward functions of the user's own, weighted and added up.

A function of one's own is called as `f(response=TEXT, **row)`, where `row` has the columns of the response's problem:
those that it names, or all where it takes `**` (a column called `response` is hidden by the policy's). It returns a
finite number, or a dict of such by name, its parts, whose sum counts. With `async def` it may wait for others, as for
a judge behind HTTP.
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

from data.own import load
from data.tasks import score_of

Scored = tuple[float, dict[str, float]]
"""A reward, and its parts by name, which are logged as reward/NAME."""
MAX_PARTS, MAX_NAME = 64, 128
_TAKEN = ("mean", "std", "zero_variance_groups")  # metrics that are called reward/…, too
_MAX_REASON = 500  # characters: an error message may quote a whole response


class ScoreFailed(Exception):
    """A reward function raised or returned what it must not; the message is one line, with file, function and line."""


@dataclass(frozen=True)
class RewardFunction:
    """A function that scores."""

    call: Callable
    text: str = ""
    """FILE.py:NAME; empty for the score of a task, which is called as `call(answer, response)`."""
    weight: float = 1.0
    label: str = ""
    """What its reward is logged as; empty if it is the only function."""
    columns: frozenset[str] | None = None
    """Names of the columns that it takes; None for all."""

    @property
    def is_async(self) -> bool:
        """Whether what it returns is to be awaited."""
        return any(map(inspect.iscoroutinefunction, (self.call, getattr(self.call, "__call__", None))))  # noqa: B004

    def begin(self, answer: str, response: str) -> Any:
        """What the function returns."""
        if not self.text:
            return self.call(answer, response)
        row = _row(answer)
        taken = row if self.columns is None else {name: row[name] for name in self.columns & row.keys()}
        return self.call(**{**taken, "response": response})

    def read(self, returned: Any) -> Scored:
        """The weighted reward and the parts in what the function returned."""
        is_dict = isinstance(returned, dict) and returned
        parts = {name: _number(part, f"the part {brief(name)}") for name, part in returned.items()} if is_dict else {}
        reward = sum(parts.values()) if is_dict else _number(returned, "the reward", " or a dict of them")
        if self.label:
            parts = {self.label: reward, **{f"{self.label}.{name}": part for name, part in parts.items()}}
        if not are_parts(parts):
            raise ScoreFailed(f"{len(parts)} parts {brief([*parts])}, expected at most {MAX_PARTS} {_NAMES}")
        return self.weight * reward, parts

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Turn what the function raises into a ScoreFailed that says where."""
        try:
            yield
        except BaseException as error:  # foreign code may raise anything
            reason, file = str(error) if type(error) is ScoreFailed else one_line(error), self.text.rpartition(":")[0]
            lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
            where = self.text and f"{self.text}{f', line {lines[-1]}' if lines else ''}: "
            raise ScoreFailed(where + reason) from None


_NAMES = f"printable names of at most {MAX_NAME} characters, none of them {', '.join(_TAKEN)}"


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
        """Reward and parts by plain functions. Raises ScoreFailed, whatever they raise."""
        found = []
        for function in self.functions:
            with function.named():
                found.append(function.read(function.begin(answer, response)))
        return add(found)

    async def together(self, answer: str, response: str) -> Scored:
        """Reward and parts by async functions, which wait together. Raises ScoreFailed, whatever they raise."""

        async def wait(function: RewardFunction) -> Scored:
            with function.named():
                return function.read(await function.begin(answer, response))

        return add(await asyncio.gather(*map(wait, self.functions)))


def load_score(task: str, rewards: Sequence[str] = ()) -> Score:
    """The score of a task or, in its place, reward functions: `FILE.py:NAME` or `FILE.py:NAME*WEIGHT` each.

    Raises ValueError, in one line, for a file that cannot be loaded and for what is no reward function.
    """
    if not rewards:
        return Score([RewardFunction(score_of(task))])
    texts, stars, weights = zip(*(text.partition("*") for text in rewards), strict=True)
    names, functions = [text.rpartition(":")[2] for text in texts], []
    for text, star, weight, name in zip(texts, stars, weights, names, strict=True):
        if len(names) > 1 and (name in _TAKEN or names.count(name) > 1):
            raise ValueError(f"--reward {text} is logged as reward/{name}, as something else is; give it another name")
        call, label = load(text, "--reward"), name if len(names) > 1 else ""
        functions.append(
            RewardFunction(call, text, _weight(text, weight) if star else 1.0, label, _columns(text, call))
        )
    return Score(functions)


def _weight(text: str, weight: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(float(weight)):
            return float(weight)
    raise ValueError(f"--reward {text}*{weight}: the weight is {weight!r}, not a finite number; write *0.5, say")


def _columns(text: str, call: object) -> frozenset[str] | None:
    """Names of the columns that a function takes, or None for all. Raises ValueError if it takes no response."""
    if not callable(call):
        raise ValueError(f"--reward {text} is {brief(call)}, not a function: write `def NAME(response, answer, **row)`")
    parameters = inspect.signature(call).parameters.values()
    names = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    if "response" not in names:
        raise ValueError(f"--reward {text} takes {sorted(names)}, and not `response`, the text that it is to score")
    return names


def _row(answer: str) -> dict:
    """The columns of a problem."""
    if answer.startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(answer)
    return {"answer": answer}


def _number(value: Any, what: str, or_else: str = "") -> float:
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    raise ScoreFailed(f"{what} is {brief(value)}, not a finite number{or_else}")


def add(found: Sequence[Scored]) -> Scored:
    """The sum of rewards, and all their parts. Raises ScoreFailed if it is not finite."""
    parts = {name: part for _, of_one in found for name, part in of_one.items()}
    return _number(sum(reward for reward, _ in found), "the sum of rewards"), parts


def are_parts(parts: dict) -> bool:
    """Whether a reward may have these parts: names that a log can have, and finite numbers."""
    are_names = all(isinstance(n, str) and n.isprintable() and 0 < len(n) <= MAX_NAME for n in parts)
    return (
        are_names and len(parts) <= MAX_PARTS and all(map(math.isfinite, parts.values())) and not parts.keys() & _TAKEN
    )


def one_line(error: BaseException) -> str:
    """Type and message of what foreign code raised, on one line, even where its `__str__` raises too."""
    return " ".join("".join(traceback.format_exception_only(error))[:_MAX_REASON].split())


def brief(value: object) -> str:
    """What foreign code returned, in a few words on one line."""
    return " ".join(reprlib.repr(value).split())
