"""The law of a simulated environment's latency, and how often a step fails: `normal:10,5 fail:0.01 scale:0.01`.

The law is in seconds: `normal:MU,SIGMA`, `lognormal:MU,SIGMA` or `constant:S`. `fail:P` is the share of steps that hang
or crash. `scale:F` is a factor on the seconds. Real environments are delayed by it in scripts/latency.py, and
extras/simulation computes with it.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Delay:
    """The cost of one simulated step."""

    seconds: float
    failure: Literal["hang", "crash"] | None


_LAWS = {"constant": 1, "normal": 2, "lognormal": 2, "fail": 1, "scale": 1}
"""Numbers that each law takes."""
LAWS_HINT = (
    "allowed are one of constant:S, normal:MU,SIGMA and lognormal:MU,SIGMA, fail:P with P in [0, 1], and scale:F, each "
    "once, separated by a space; S, SIGMA and F are at least 0"
)


@dataclass(frozen=True)
class LatencyLaw:
    """The time of a simulated step of an environment, and its rate of failures."""

    kind: Literal["constant", "normal", "lognormal"]
    numbers: tuple[float, ...]
    """Seconds (constant), or mean and standard deviation of seconds (normal) or of ln(seconds) (lognormal)."""
    failure_rate: float = 0.0
    """Share of steps that fail; half of these hang, half crash."""
    scale: float = 1.0
    """Factor on the seconds."""

    @classmethod
    def parse(cls, text: str) -> "LatencyLaw":
        """Read `normal:10,5`, `fail:0.01`, or both with a space between. With only `fail` the seconds are 0.

        Raises ValueError for anything else.
        """
        laws: dict[str, tuple[float, ...]] = {}
        for part in text.split():
            name, _, values = part.partition(":")
            numbers = _read_numbers(name, values)
            if name in laws or not numbers:
                raise ValueError(f"latency {text!r}: cannot read {part!r}; {LAWS_HINT}")
            laws[name] = numbers
        (failure_rate,), (scale,) = laws.pop("fail", (0.0,)), laws.pop("scale", (1.0,))
        if len(laws) > 1 or not text.split():
            raise ValueError(f"latency {text!r} has {len(laws)} laws of seconds; {LAWS_HINT}")
        kind, numbers = next(iter(laws.items()), ("constant", (0.0,)))
        return cls(kind, numbers, failure_rate, scale)

    def draw(self, rng: random.Random) -> Delay:
        """The next delay; a negative draw counts as 0 s."""
        laws = {"constant": float, "normal": rng.normalvariate, "lognormal": rng.lognormvariate}
        seconds, chance, failure = laws[self.kind](*self.numbers), rng.random(), None
        if chance < self.failure_rate:
            failure = "hang" if chance < self.failure_rate / 2 else "crash"
        return Delay(max(0.0, seconds * self.scale), failure)


def _read_numbers(name: str, values: str) -> tuple[float, ...]:
    """Return the numbers of a law; empty if the law does not take such numbers."""
    try:
        numbers = tuple(float(value) for value in values.split(","))
    except ValueError:
        return ()
    last_limit = 1 if name == "fail" else math.inf
    is_valid = len(numbers) == _LAWS.get(name) and all(map(math.isfinite, numbers))
    return numbers if is_valid and 0 <= numbers[-1] <= last_limit else ()
