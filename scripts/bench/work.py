"""The work of the benches: which responses are sampled, how long they are, and rewards and latencies of simulation.

`natural` lets responses end as they end, on the addition task's own problems, and so does `smollm2`, a real language
model's job, the one of README.md. All others force their lengths, so that whoever does the work samples and trains the
same number of tokens: no end of sequence is sampled, and a response's only limit is its own number of tokens, drawn
from a law by the seed of its request.
"""

import asyncio
import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.config import Config
from asyncrl.controller.tickets import TicketSource
from asyncrl.engine.environments import Environment, Environments, SingleTurn
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.score import Scored
from asyncrl.records import Completion, Ticket
from extras.latency_law import LatencyLaw
from rollout import RolloutWorker, run_worker, start_worker
from scripts.latency import start_delayed

GROUPS, GROUP_SIZE = 32, 8
SAMPLES_PER_STEP = GROUPS * GROUP_SIZE
MAX_PROMPT_TOKENS = 40
NO_LEARNING = 1e-12
"""Learning rate that costs what any other costs and leaves weights, and lengths of responses, as they are."""
REWARD_S = 0.005
"""A response's simulated reward, seconds: about a call of math-verify. One at a time, as a worker has one process."""
VARYING_SHARE = 0.5
"""Share of the problems whose responses differ in reward; the groups of the others are filtered where that is on."""


@dataclass(frozen=True)
class Work:
    """Lengths of the responses."""

    name: str
    max_response_tokens: int
    median_tokens: float | None = None
    """Of a lognormal law, cut at max_response_tokens; None lets the policy end its responses."""
    sigma: float = 0.0
    """Of ln(tokens)."""
    options: dict = field(default_factory=dict, hash=False)
    """Of Config, beside its sizes."""

    @property
    def forced(self) -> bool:
        """Whether lengths come from the law."""
        return self.median_tokens is not None

    def length(self, seed: int) -> int:
        """Forced tokens of the response with that sampling seed."""
        drawn = random.Random(seed).lognormvariate(math.log(self.median_tokens), self.sigma)
        return min(max(1, round(drawn)), self.max_response_tokens)

    def config(self, **options) -> Config:
        """The options of train_async.py that do this work, with `options` changed."""
        sizes = {
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
        }
        return Config(
            **{**sizes, "max_response_tokens": self.max_response_tokens, **self.options, **options}
        ).checked()


NATURAL = Work("natural", max_response_tokens=48)
SMOLLM2 = Work(
    "smollm2", max_response_tokens=20,
    options={
        "model": "smollm2", "task": "sums:one_digit", "dtype": "bfloat16", "groups_per_step": 8, "lr": 4e-5,
        "share_prefix": "prompt",
    },
)  # fmt: skip
SHORT = Work("short", max_response_tokens=4, median_tokens=4.0)
LONG = Work("long", max_response_tokens=256, median_tokens=30.0, sigma=1.0)
"""Mean 47, so that the longest is 5 times the mean."""
TAIL = Work("tail", max_response_tokens=192, median_tokens=15.0, sigma=1.0)
"""Of the rollout bench: mean 24, an eighth of the longest (RollArt reports 5 to 9 in production)."""
TURNS = Work("turns", max_response_tokens=64, median_tokens=4.0)
"""Of the rollout bench, for each turn of several: an action, so that the environment's latency is what counts."""
WORKS = {work.name: work for work in (NATURAL, SHORT, LONG, SMOLLM2)}


def work_of(max_response_tokens: int) -> Work:
    """The work with that longest response."""
    works = (*WORKS.values(), TAIL, TURNS)
    return next(work for work in works if work.max_response_tokens == max_response_tokens)


class ForcedLengths(LLMProxy):
    """An engine whose responses have the lengths of the work."""

    async def generate(
        self,
        request_id: str,
        prompt_tokens: tuple[int, ...],
        seed: int,
        max_tokens: int | None = None,
        prefix: Completion | None = None,
    ) -> Completion:
        """Sample one response of exactly the forced length, or of `max_tokens` if that is less."""
        most = self.config.max_response_tokens
        length = min(work_of(most).length(seed), max_tokens or most)
        return await super().generate(request_id, prompt_tokens, seed, length, prefix)

    async def ask(self, engine_id: str, tokens: list[int], params):
        """Return the final output of a request that nothing but its length ends."""
        params.ignore_eos, params.stop_token_ids = True, []
        return await super().ask(engine_id, tokens, params)


async def start_proxy(spec: WorkerSpec, stop_token_ids: list[int]) -> LLMProxy:
    """Start an engine that does a work."""
    kind = ForcedLengths if work_of(spec.config.max_response_tokens).forced else LLMProxy
    return await kind.start(spec, stop_token_ids)


run_work_worker = functools.partial(
    run_worker, start=functools.partial(start_worker, start_proxy=start_proxy)
)
"""What the process of a rollout worker runs that does a work."""


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
        return SingleTurn(
            replace(ticket, answer=str(int(varies and member % 2))), self.tokenizer, self
        )

    async def score(self, answer: str, response: str) -> Scored:
        """The answer, which is the reward."""
        async with self._process:
            await asyncio.sleep(REWARD_S)
        return float(answer), {}


def member_lengths(config: Config, group_id: int) -> list[int]:
    """Forced lengths of a group's members, the same whether each has a ticket or one request samples them all."""
    seed_of, work = TicketSource(config, prompts=None)._seed, work_of(config.max_response_tokens)
    return [work.length(seed_of(group_id, member, 0, 0)) for member in range(config.group_size)]


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

    return await start_worker(spec, connection, start_proxy, start_environments)


def run_simulated_worker(law: str) -> Callable:
    """What the process of such a worker runs, with that law of latency."""
    start = functools.partial(start_simulated_worker, law=LatencyLaw.parse(law))
    return functools.partial(run_worker, start=start)
