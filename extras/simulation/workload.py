"""What is asked of a simulated cluster: how long responses are, which groups teach nothing, how environments answer.

Everything is drawn from the problem, group, member and attempt of a ticket, so that all arms of a comparison do the
same work. A problem that is issued again is as hard as before, but its responses are new.
"""

import functools
import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from asyncrl.controller.prompts import PromptSource
from asyncrl.records import Ticket
from data.problem import Problem
from extras.latency_law import LatencyLaw

LONGEST_TO_MEDIAN = 20.0
"""ROLL Flash: the longest response is more than 20 times the median."""
RESPONSES_OF_LONGEST = 4096
"""In a batch of how many responses one is expected to be that long: 256 prompts x 16."""
WITHIN_SHARE = 1 / 3
"""Share of the variance of log-lengths that lies within a group; APRIL only says that within is less than across."""
VARYING_SHARE = 0.5
"""Share of problems whose responses differ in reward; the others' groups teach nothing."""
PROMPT_TOKENS = 256
PROBLEMS_PER_SEED = 10_000_000


@dataclass(frozen=True)
class LengthLaw:
    """Lognormal lengths of responses, cut at `longest`; the members of a group have a part in common."""

    median: float
    sigma: float
    longest: int
    within_share: float = WITHIN_SHARE

    def draw(self, problem: int, ticket: Ticket, member: int) -> int:
        """Tokens of one response, at least 1."""
        common, own = _normals(problem, ticket.group_id, member, ticket.attempt)
        z = math.sqrt(1 - self.within_share) * common + math.sqrt(self.within_share) * own
        return min(max(1, round(self.median * math.exp(self.sigma * z))), self.longest)

    @functools.cached_property
    def moments(self) -> tuple[float, float]:
        """Mean of the length and of its square, over 20 000 quantiles of the law."""
        normal, count = NormalDist(), 20_000
        lengths = [
            min(
                self.median * math.exp(self.sigma * normal.inv_cdf((i + 0.5) / count)), self.longest
            )
            for i in range(count)
        ]
        return sum(lengths) / count, sum(length * length for length in lengths) / count

    @property
    def mean_context(self) -> float:
        """Tokens, prompt included, of a request that runs at a random time: long ones are met more often."""
        mean, mean_square = self.moments
        return PROMPT_TOKENS + mean_square / (2 * mean)


@functools.lru_cache(1 << 18)
def _normals(problem: int, group_id: int, member: int, attempt: int) -> tuple[float, float]:
    """Standard normal draws of a problem and of one response to it; kept, as all arms have the same."""
    return random.Random(problem).gauss(0, 1), draws_of(problem, group_id, member, attempt).gauss(
        0, 1
    )


def draws_of(problem: int, group_id: int, member: int, attempt: int) -> random.Random:
    """Random numbers of one response or episode; the same whether its group has a ticket per member or one for all."""
    return random.Random(f"{problem}.{group_id}.{member}.{attempt}")


@functools.cache
def lengths_up_to(longest: int, tail: float = LONGEST_TO_MEDIAN) -> LengthLaw:
    """The law of every single-turn case: the limit is `tail` times the median, and reached once in a large batch."""
    sigma = math.log(tail) / NormalDist().inv_cdf(1 - 1 / RESPONSES_OF_LONGEST)
    return LengthLaw(longest / tail, sigma, longest)


@dataclass(frozen=True)
class Turns:
    """An environment of several turns."""

    num_turns: int
    tokens: int
    """Length of every turn of the policy."""
    latency: LatencyLaw
    """Of each step of the environment, seconds."""
    timeout_s: float
    """After which a step that hangs has failed."""


@dataclass(frozen=True)
class Workload:
    """Lengths, rewards and environments of a case."""

    lengths: LengthLaw
    turns: Turns | None = None
    """None for a task of one turn."""
    prompt_tokens: int = PROMPT_TOKENS
    reward_s: float = 0.0
    """Time to score one response; one at a time in each worker."""

    def problem(self, index: int) -> Problem:
        """A problem whose prompt names it; its answer says whether rewards vary."""
        varies = random.Random(index).random() < VARYING_SHARE
        return Problem(
            str(index), "varies" if varies else "same", None if self.turns is None else index
        )

    def prompts(self, seed: int) -> PromptSource:
        """Prompts without content: one token that is the problem's number. Another seed has other problems."""
        first = seed * PROBLEMS_PER_SEED
        return PromptSource(
            lambda i: self.problem(first + i), [], lambda problem: (int(problem.prompt),)
        )

    def turn_tokens(self, ticket: Ticket, member: int) -> int:
        """Length of what the policy writes in a turn."""
        if self.turns is not None:
            return self.turns.tokens
        return self.lengths.draw(ticket.prompt_tokens[0], ticket, member)

    def reward(self, ticket: Ticket, member: int) -> float:
        """0 or 1, by the member where the problem's rewards vary."""
        return float(ticket.answer == "varies" and member % 2)
