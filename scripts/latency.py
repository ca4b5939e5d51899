"""train_async.py with environments whose steps take a simulated time, or fail, for studies.

    torchrun --standalone scripts/latency.py "normal:10,5 fail:0.01 scale:0.01" [options of train_async.py]

The law is in seconds: `normal:MU,SIGMA`, `lognormal:MU,SIGMA` or `constant:S`, `fail:P` for the share of steps that
hang or crash, and `scale:F` for a factor on the seconds. Evaluations are not delayed.
"""

import asyncio
import functools
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.engine.environments import Environment, Environments, Step, start_environments
from asyncrl.engine.score import Failed
from asyncrl.job.command_line import parse_config
from asyncrl.records import Ticket
from rollout import run_worker, start_worker
from train_async import fail, run_job, train


@dataclass(frozen=True)
class Delay:
    """What one simulated step costs."""

    seconds: float
    failure: Literal["hang", "crash"] | None


_LAWS = {"constant": 1, "normal": 2, "lognormal": 2, "fail": 1, "scale": 1}
"""Numbers that each law takes."""
_LAWS_HINT = "allowed are constant:S, normal:MU,SIGMA or lognormal:MU,SIGMA, fail:P and scale:F, separated by a space"


@dataclass(frozen=True)
class LatencyLaw:
    """How long a simulated step of an environment takes, and how often it fails."""

    kind: Literal["constant", "normal", "lognormal"]
    numbers: tuple[float, ...]
    """Seconds (constant), their mean and standard deviation (normal), or those of ln(seconds) (lognormal)."""
    failure_rate: float = 0.0
    """Share of steps that fail; half of these hang, half crash."""
    scale: float = 1.0
    """Factor on the seconds."""

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
        (failure_rate,), (scale,) = laws.pop("fail", (0.0,)), laws.pop("scale", (1.0,))
        if len(laws) > 1 or not text.split():
            raise ValueError(f"latency {text!r} has {len(laws)} laws of seconds, wanted one; {_LAWS_HINT}")
        kind, numbers = next(iter(laws.items()), ("constant", (0.0,)))
        return cls(kind, numbers, failure_rate, scale)

    def draw(self, rng: random.Random) -> Delay:
        """The next delay; a negative draw counts as 0 s."""
        laws = {"constant": float, "normal": rng.normalvariate, "lognormal": rng.lognormvariate}
        seconds, chance, failure = laws[self.kind](*self.numbers), rng.random(), None
        if chance < self.failure_rate:
            failure = "hang" if chance < self.failure_rate / 2 else "crash"
        return Delay(max(0.0, seconds * self.scale), failure)


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
        what = {"constant": "S", "scale": "F"}.get(name, "SIGMA")
        raise ValueError(f"latency {text!r}: {what} must be at least 0, got {numbers[-1]:g}")
    return name, numbers


class Delayed:
    """An environment with simulated latency before each step."""

    def __init__(self, environment: Environment, law: LatencyLaw, timeout_s: float, seed: int):
        self.environment, self.law, self.timeout_s = environment, law, timeout_s
        self._random = random.Random(seed)

    async def reset(self) -> list[int]:
        return await self.environment.reset()

    async def step(self, tokens: list[int]) -> Step:
        delay = self.law.draw(self._random)
        if delay.failure == "crash":
            raise Failed("simulated crash")
        if delay.failure == "hang" or delay.seconds > self.timeout_s:
            await asyncio.sleep(self.timeout_s)
            raise Failed(f"simulated latency: timed out after {self.timeout_s:g} s")
        await asyncio.sleep(delay.seconds)
        return await self.environment.step(tokens)


def start_delayed(spec: WorkerSpec, tokenizer, law: LatencyLaw) -> Environments:
    """The environments of a worker's task, delayed where they are trained on."""
    environments = start_environments(spec, tokenizer)

    def make_environment(ticket: Ticket, member: int) -> Environment:
        environment = environments.make_environment(ticket, member)
        if ticket.is_evaluation:
            return environment
        return Delayed(environment, law, spec.config.env_timeout_s, ticket.seed + member)

    return Environments(make_environment, environments.close)


def run_latency_worker(law: str) -> Callable:
    """What a worker's process runs, with that law. Raises ValueError for a law that cannot be read."""
    delayed = functools.partial(start_delayed, law=LatencyLaw.parse(law))
    return functools.partial(run_worker, start=functools.partial(start_worker, start_environments=delayed))


def main() -> None:
    """Read the law, then the options, and train."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        fail(f"the law comes first, before the options; {_LAWS_HINT}", status=2)
    law, config = sys.argv[1], parse_config(sys.argv[2:])
    run_job(lambda: train(config, run_latency_worker(law)))


if __name__ == "__main__":
    main()
