"""The workload of a simulation: lengths of responses, rewards, and latencies of environments.

All is drawn from the problem, group, member and attempt of a ticket. So all settings of a study do the same work. A
problem that is issued again is as hard as before, but its responses are new.
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
from extras.planning.planner import Lengths

LONGEST_TO_MEDIAN = 20.0
"""ROLL Flash: the longest response is more than 20 times the median."""
RESPONSES_OF_LONGEST = 4096
"""Number of responses. One of them is expected to be that long: 256 prompts x 16."""
WITHIN_SHARE = 1 / 3
"""Share of the variance of log-lengths within a group. APRIL says only that it is less than across groups."""
VARYING_SHARE = 0.5
"""Share of problems whose responses differ in reward. The other groups have no advantage."""
PROMPT_TOKENS = 256
PROBLEMS_PER_SEED = 10_000_000


@dataclass(frozen=True)
class LengthLaw:
    """Lognormal lengths of responses, cut at `longest`. A part of the deviation is common to a group."""

    median: float
    sigma: float
    longest: int

    def draw(self, problem: int, ticket: Ticket) -> int:
        """Return the tokens of a response, at least 1."""
        common, own = random.Random(problem).gauss(0, 1), draws_of(problem, ticket).gauss(0, 1)
        z = math.sqrt(1 - WITHIN_SHARE) * common + math.sqrt(WITHIN_SHARE) * own
        return min(max(1, round(self.median * math.exp(self.sigma * z))), self.longest)

    @property
    def means(self) -> Lengths:
        """Mean lengths of single responses."""
        return Lengths.lognormal(PROMPT_TOKENS, self.median, self.sigma, limit=self.longest, num=1)


def draws_of(problem: int, ticket: Ticket) -> random.Random:
    """Return the random numbers of one response or episode."""
    return random.Random(f"{problem}.{ticket.group_id}.{ticket.member}.{ticket.attempt}")


@functools.cache
def lengths_up_to(longest: int) -> LengthLaw:
    """Return the law whose limit is LONGEST_TO_MEDIAN medians, and is reached once in RESPONSES_OF_LONGEST."""
    sigma = math.log(LONGEST_TO_MEDIAN) / NormalDist().inv_cdf(1 - 1 / RESPONSES_OF_LONGEST)
    return LengthLaw(longest / LONGEST_TO_MEDIAN, sigma, longest)


@dataclass(frozen=True)
class Turns:
    """An environment of several turns."""

    num_turns: int
    tokens: int
    """Length of every turn of the policy."""
    latency: LatencyLaw
    """Seconds of each step of the environment."""
    timeout_s: float
    """Time after which a step that hangs has failed."""


@dataclass(frozen=True)
class Workload:
    """Lengths, rewards and environments of a case."""

    lengths: LengthLaw
    turns: Turns | None = None
    """None for a task of one turn."""
    prompt_tokens: int = PROMPT_TOKENS

    def problem(self, index: int) -> Problem:
        """Return a problem whose prompt names it. Its answer says whether rewards vary."""
        answer = "varies" if random.Random(index).random() < VARYING_SHARE else "same"
        return Problem(str(index), answer, None if self.turns is None else index)

    def prompts(self, seed: int) -> PromptSource:
        """Return prompts of one token, the number of the problem. Each seed has different problems."""
        first = seed * PROBLEMS_PER_SEED
        return PromptSource(
            lambda i: self.problem(first + i), [], lambda problem: (int(problem.prompt),)
        )

    def turn_tokens(self, ticket: Ticket) -> int:
        """Return the tokens that the policy writes in a turn."""
        if self.turns is not None:
            return self.turns.tokens
        return self.lengths.draw(ticket.prompt_tokens[0], ticket)

    def reward(self, ticket: Ticket) -> float:
        """Return 0 or 1, by the member if rewards vary."""
        return float(ticket.answer == "varies" and ticket.member % 2)
