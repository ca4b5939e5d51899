"""The rollout worker of bench_rollout.py: forced lengths and simulated rewards, on the real engine."""

import asyncio
import math
import random
from multiprocessing.connection import Connection

from cluster.placement import WorkerSpec
from config import Config
from controller.tickets import PromptSource, TicketSource
from data.records import Ticket
from data.tasks import Problem
from engine.completion import Completion
from engine.environments import Environment, Environments, SingleTurn
from engine.proxy import LLMProxy
from rollout import RolloutWorker, start_worker
from scripts.latency import LatencyLaw, start_delayed

MEDIAN_TOKENS, SIGMA = 15.0, 1.0
"""Lengths of single turns: lognormal, cut at max_response_tokens. Cut at 192 their mean is 24, an eighth of the longest
(RollArt reports 5 to 9 in production)."""
TURN_TOKENS = 4
"""Length of every turn where there are several: an action, so that the environment's latency is what counts."""
REWARD_S = 0.005
"""A response's simulated reward, seconds: about a call of math-verify. One at a time, as a worker has one process."""


def forced_length(config: Config, seed: int) -> int:
    """Tokens of the response with that sampling seed, at least 1 and at most max_response_tokens."""
    if config.is_multi_turn:
        return TURN_TOKENS
    drawn = random.Random(seed).lognormvariate(math.log(MEDIAN_TOKENS), SIGMA)
    return min(max(1, round(drawn)), config.max_response_tokens)


def member_lengths(config: Config, group_id: int) -> list[int]:
    """Forced lengths of a group's members, the same whether each has a ticket or one request samples them all."""
    source = TicketSource(config, PromptSource(lambda index: Problem("", ""), [], lambda problem: []))
    seeds = [source._seed(group_id, member, 0, 0) for member in range(config.group_size)]
    return [forced_length(config, seed) for seed in seeds]


class ForcedLengths(LLMProxy):
    """An engine whose responses have the lengths that the law says."""

    async def generate(
        self, request_id: str, prompt_tokens: tuple[int, ...], seed: int, max_tokens: int | None = None
    ) -> Completion:
        """Sample one response of exactly the forced length, or of `max_tokens` if that is less."""
        length = min(forced_length(self.config, seed), max_tokens or self.config.max_response_tokens)
        return await super().generate(request_id, prompt_tokens, seed, length)

    def sampling_params(self, seed: int, max_tokens: int, num_responses: int):
        """vLLM's parameters of one request that nothing but its length ends."""
        params = super().sampling_params(seed, max_tokens, num_responses)
        params.ignore_eos, params.stop_token_ids = True, []
        return params


class SimulatedReward:
    """Stands in for a pool of one reward process: a fixed time for each response, one at a time."""

    def __init__(self, process: asyncio.Lock, member: int):
        self.process, self.member = process, member

    async def score(self, answer: str, response: str) -> float:
        """0 or 1, by the member where the problem's answer is `varies`, else 0 for all of them."""
        async with self.process:
            await asyncio.sleep(REWARD_S)
        return float(answer == "varies" and self.member % 2)


class SimulatedRewards:
    """Environments of one turn whose rewards are simulated; no processes."""

    def __init__(self, config: Config, tokenizer, lengths: dict[int, list[int]]):
        """`lengths`: seed of a request for a whole group -> its members' lengths, which are put there."""
        self.config, self.tokenizer, self.lengths = config, tokenizer, lengths
        self._reward_process = asyncio.Lock()

    def make_environment(self, ticket: Ticket, member: int) -> Environment:
        if ticket.num_members > 1 and ticket.seed not in self.lengths:
            self.lengths[ticket.seed] = member_lengths(self.config, ticket.group_id)
        return SingleTurn(ticket, self.tokenizer, SimulatedReward(self._reward_process, member))

    def close(self) -> None:
        """Nothing was started."""


async def start_bench_worker(spec: WorkerSpec, connection: Connection, law: LatencyLaw) -> RolloutWorker:
    """Start a rollout worker with forced lengths and simulated rewards and latencies."""
    lengths: dict[int, list[int]] = {}
    force_member_lengths(lengths)

    def start_simulated(spec: WorkerSpec, tokenizer) -> Environments:
        if spec.config.is_multi_turn:
            return start_delayed(spec, tokenizer, law)
        return SimulatedRewards(spec.config, tokenizer, lengths)

    return await start_worker(spec, connection, ForcedLengths.start, start_simulated)


def force_member_lengths(lengths: dict[int, list[int]]) -> None:
    """Have vLLM give each response of a request with several a length of its own: seed -> length of each."""
    from vllm.v1.engine.parallel_sampling import ParentRequest

    make_params = ParentRequest._get_child_sampling_params

    def with_length(self, index: int):
        params = make_params(self, index)
        params.max_tokens = lengths[self.sampling_params.seed][index]
        return params

    ParentRequest._get_child_sampling_params = with_length
