"""The workloads of the rollout bench: how long responses are, simulated rewards and latencies.

Lengths are forced, so that all settings sample the same number of tokens: no end of sequence is sampled, and a
response's only limit is its own number of tokens, drawn from a law by the seed of its request.
"""

import asyncio
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.config import Config
from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.environments import Environment, Environments, SingleTurn
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.score import Reward
from asyncrl.records import Completion, Ticket
from extras.latency_law import LatencyLaw
from rollout import RolloutWorker, run_worker, start_worker
from scripts.bench.harness import tables_beside
from scripts.latency import start_delayed

NO_LEARNING = 1e-12
"""Learning rate that costs what any other costs and leaves weights, and lengths of responses, as they are."""
REWARD_S = 0.005
"""A response's simulated reward, seconds: about a call of math-verify. One at a time, as a worker has one process."""
VARYING_SHARE = 0.5
"""Share of the problems whose responses differ in reward; the groups of the others are filtered where that is on."""


@dataclass(frozen=True)
class Workload:
    """Lengths of the responses, as workloads.toml has them."""

    name: str
    max_response_tokens: int
    median_tokens: float
    sigma: float = 0.0

    def length(self, seed: int) -> int:
        """Return the forced tokens of the response with that sampling seed."""
        drawn = random.Random(seed).lognormvariate(math.log(self.median_tokens), self.sigma)
        return min(max(1, round(drawn)), self.max_response_tokens)


_TABLES = tables_beside(__file__)
WORKLOADS = {name: Workload(name, **fields) for name, fields in _TABLES.items()}
_BY_LONGEST = {workload.max_response_tokens: workload for workload in WORKLOADS.values()}


def workload_of(max_response_tokens: int) -> Workload:
    """Return the workload with that longest response."""
    return _BY_LONGEST[max_response_tokens]


class ForcedLengths(LLMProxy):
    """An engine whose responses have the lengths of the workload."""

    async def generate(
        self,
        request_id: str,
        prompt_tokens: tuple[int, ...],
        seed: int,
        max_tokens: int | None = None,
        prefix: Completion | None = None,
    ) -> Completion:
        """Sample one response of exactly the forced length, or of `max_tokens` if that is less."""
        length = workload_of(self.config.max_response_tokens).length(seed)
        length = min(length, max_tokens or length)
        return await super().generate(request_id, prompt_tokens, seed, length, prefix)

    async def run_request(self, engine_id: str, tokens: list[int], params):
        """Return the final output of a request that nothing but its length ends."""
        params.ignore_eos, params.stop_token_ids = True, []
        return await super().run_request(engine_id, tokens, params)


# Simulated rewards and latencies


class SimulatedRewards:
    """Environments of one turn, and the one reward process that they share: a fixed time for each response.

    Every second member of some groups has a reward of 1, all others 0.
    """

    def __init__(self, config: Config, tokenizer, lengths: dict[int, list[int]]):
        """`lengths`: seed of a request for a whole group -> its members' lengths, which are put there."""
        self.config, self.tokenizer, self.lengths = config, tokenizer, lengths
        self._process = asyncio.Lock()

    def make_environment(self, ticket: Ticket, member: int) -> Environment:
        if ticket.num_members > 1 and ticket.seed not in self.lengths:
            self.lengths[ticket.seed] = member_lengths(self.config, ticket.group_id)
        varies = random.Random(repr(ticket.prompt_tokens)).random() < VARYING_SHARE
        rewarded = replace(ticket, answer=str(int(varies and member % 2)))
        return SingleTurn(rewarded, self.tokenizer, self)

    async def score(self, answer: str, response: str) -> Reward:
        """Return the answer, which is the reward."""
        async with self._process:
            await asyncio.sleep(REWARD_S)
        return float(answer), {}


def member_lengths(config: Config, group_id: int) -> list[int]:
    """Return the forced lengths of a group's members, the same whether each has a ticket or one request samples all."""
    source = TicketSource(config, prompts=None)
    workload = workload_of(config.max_response_tokens)
    return [
        workload.length(source._seed(group_id, member, 0, 0)) for member in range(config.group_size)
    ]


def force_member_lengths(lengths: dict[int, list[int]]) -> None:
    """Have vLLM give each response of a request with several a length of its own: seed -> length of each."""
    from vllm.v1.engine.parallel_sampling import ParentRequest

    make_params = ParentRequest._get_child_sampling_params

    def with_length(self, index: int):
        params = make_params(self, index)
        params.max_tokens = lengths[self.sampling_params.seed][index]
        return params

    ParentRequest._get_child_sampling_params = with_length


async def start_simulated_worker(
    spec: WorkerSpec, connection: Connection, law: LatencyLaw
) -> RolloutWorker:
    """Start a rollout worker with forced lengths, simulated rewards and, where there are several turns, latencies."""
    lengths: dict[int, list[int]] = {}
    force_member_lengths(lengths)

    def start_environments(spec: WorkerSpec, tokenizer) -> Environments:
        if spec.config.is_multi_turn:
            return start_delayed(spec, tokenizer, law)
        return Environments(SimulatedRewards(spec.config, tokenizer, lengths).make_environment)

    return await start_worker(spec, connection, ForcedLengths.start, start_environments)


def run_simulated_worker(law: str) -> Callable:
    """Return what the process of such a worker runs, with that law of latency."""
    start = functools.partial(start_simulated_worker, law=LatencyLaw.parse(law))
    return functools.partial(run_worker, start=start)
