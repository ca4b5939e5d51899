"""The simulated latency of an environment's step, for studies: how long it takes, and how often it fails."""

import math
import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Delay:
    """What one simulated step costs."""

    seconds: float
    failure: Literal["hang", "crash"] | None


_LAWS = {"constant": 1, "normal": 2, "lognormal": 2, "fail": 1}
"""Numbers that each law takes."""
_LAWS_HINT = "allowed are constant:S, normal:MU,SIGMA or lognormal:MU,SIGMA, and fail:P, separated by a space"


@dataclass(frozen=True)
class LatencyLaw:
    """How long a simulated step of an environment takes, and how often it fails."""

    kind: Literal["constant", "normal", "lognormal"]
    numbers: tuple[float, ...]
    """Seconds (constant), their mean and standard deviation (normal), or those of ln(seconds) (lognormal)."""
    failure_rate: float
    """Share of steps that fail; half of these hang, half crash."""

    @classmethod
    def parse(cls, text: str) -> "LatencyLaw":
        """Read `normal:10,5`, `fail:0.01`, or both with a space between; seconds are 0 where only `fail` is given.

        Raises ValueError for anything else.
        """
        laws: dict[str, tuple[float, ...]] = {}
        for part in text.split():
            name, numbers = _parse_law(part, text)
            if name in laws:
                raise ValueError(f"latency {text!r} has two laws {name!r}; {_LAWS_HINT}")
            laws[name] = numbers
        (failure_rate,) = laws.pop("fail", (0.0,))
        if len(laws) > 1 or not text.split():
            raise ValueError(f"latency {text!r} has {len(laws)} laws of seconds, wanted one; {_LAWS_HINT}")
        kind, numbers = next(iter(laws.items()), ("constant", (0.0,)))
        return cls(kind, numbers, failure_rate)

    def draw(self, rng: random.Random) -> Delay:
        """The next delay; a negative draw counts as 0 s."""
        if self.kind == "constant":
            seconds = self.numbers[0]
        elif self.kind == "normal":
            seconds = rng.normalvariate(*self.numbers)
        else:
            seconds = rng.lognormvariate(*self.numbers)
        chance, failure = rng.random(), None
        if chance < self.failure_rate:
            failure = "hang" if chance < self.failure_rate / 2 else "crash"
        return Delay(max(0.0, seconds), failure)


def _parse_law(part: str, text: str) -> tuple[str, tuple[float, ...]]:
    """Name and numbers of one law; `text` is all that was given, for the error."""
    name, _, values = part.partition(":")
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError:
        numbers = ()
    if _LAWS.get(name) != len(numbers) or not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"latency {text!r}: cannot read {part!r}; {_LAWS_HINT}")
    if name == "fail" and not 0 <= numbers[0] <= 1:
        raise ValueError(f"latency {text!r}: the P of fail:P is a probability, in [0, 1], got {numbers[0]:g}")
    if numbers[-1] < 0:
        what = "S" if name == "constant" else "SIGMA"
        raise ValueError(f"latency {text!r}: {what} must be at least 0, got {numbers[-1]:g}")
    return name, numbers
