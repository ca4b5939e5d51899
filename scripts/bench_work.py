"""The work of bench_parts.py and bench_peers.py: which responses are sampled, and how many train one step.

All works ask the addition task's own problems of the tiny model, 32 groups of 8 a step. `natural` lets responses end as
they end. The other two force their lengths, so that whoever does the work samples and trains the same number of tokens:
no end of sequence is sampled, and a response's only limit is its own number of tokens.
"""

import functools
import math
import random
from dataclasses import dataclass

from cluster.placement import WorkerSpec
from config import Config
from engine.completion import Completion
from engine.proxy import LLMProxy
from rollout import run_worker, start_worker

MODEL_TASK = "addition"
GROUPS, GROUP_SIZE = 32, 8
SAMPLES_PER_STEP = GROUPS * GROUP_SIZE
MAX_PROMPT_TOKENS = 40
NO_LEARNING = 1e-12
"""Learning rate that costs what any other costs and leaves weights, and lengths of responses, as they are."""


@dataclass(frozen=True)
class Work:
    """Lengths of the responses."""

    name: str
    max_response_tokens: int
    median_tokens: float | None = None
    """Of a lognormal law, cut at max_response_tokens; None lets the policy end its responses."""
    sigma: float = 0.0
    """Of ln(tokens)."""

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
        sizes = {"groups_per_step": GROUPS, "group_size": GROUP_SIZE, "max_prompt_tokens": MAX_PROMPT_TOKENS}
        return Config(**{**sizes, "max_response_tokens": self.max_response_tokens, **options}).checked()


WORKS = {
    work.name: work
    for work in (
        Work("natural", max_response_tokens=48),
        Work("short", max_response_tokens=4, median_tokens=4.0),
        # Mean 47, so that the longest is 5 times the mean.
        Work("long", max_response_tokens=256, median_tokens=30.0, sigma=1.0),
    )
}


def work_of(max_response_tokens: int) -> Work:
    """The work with that longest response."""
    return next(work for work in WORKS.values() if work.max_response_tokens == max_response_tokens)


class ForcedLengths(LLMProxy):
    """An engine whose responses have the lengths of the work."""

    async def generate(
        self, request_id: str, prompt_tokens: tuple[int, ...], seed: int, max_tokens: int | None = None
    ) -> Completion:
        """Sample one response of exactly the forced length."""
        length = work_of(self.config.max_response_tokens).length(seed)
        return await super().generate(request_id, prompt_tokens, seed, length)

    def sampling_params(self, seed: int, max_tokens: int, num_responses: int):
        """vLLM's parameters of one request that nothing but its length ends."""
        params = super().sampling_params(seed, max_tokens, num_responses)
        params.ignore_eos, params.stop_token_ids = True, []
        return params


async def start_proxy(spec: WorkerSpec, stop_token_ids: list[int]) -> LLMProxy:
    """Start an engine that does a work."""
    kind = ForcedLengths if work_of(spec.config.max_response_tokens).forced else LLMProxy
    return await kind.start(spec, stop_token_ids)


start_work_worker = functools.partial(start_worker, start_proxy=start_proxy)
run_work_worker = functools.partial(run_worker, start=start_work_worker)
"""What the process of a rollout worker runs that does a work."""
