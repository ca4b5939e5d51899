"""Runs train_async.py with forced lengths of responses: `python forced_lengths.py short|long OPTIONS`.

A response ends after a number of tokens that its seed draws, and by nothing else. So both systems of a comparison do
the same work. The laws are those of `short` and `long` in scripts/bench/workloads.toml at commit 46ec525b7759.
"""

import functools
import math
import os
import random
import sys

import train_async
from asyncrl.engine.proxy import LLMProxy
from asyncrl.job.command_line import parse_config
from rollout import run_worker, start_worker

LAWS = {"short": (4, 4.0, 0.0), "long": (256, 30.0, 1.0)}
"""Most tokens, median, and σ of ln(tokens), by the name of the workload."""


def draw_length(seed: int) -> int:
    most, median, sigma = LAWS[os.environ["FORCED_LENGTHS"]]
    drawn = random.Random(seed).lognormvariate(math.log(median), sigma)
    return min(max(1, round(drawn)), most)


class ForcedLengths(LLMProxy):
    """An engine whose responses have the drawn lengths."""

    async def generate(self, request_id, prompt_tokens, seed, max_tokens=None, prefix=None):
        length = min(draw_length(seed), max_tokens or sys.maxsize)
        return await super().generate(request_id, prompt_tokens, seed, length, prefix)

    async def run_request(self, engine_id, tokens, params):
        params.ignore_eos, params.stop_token_ids = True, []
        return await super().run_request(engine_id, tokens, params)


run_forced = functools.partial(
    run_worker, start=functools.partial(start_worker, start_proxy=ForcedLengths.start)
)

if __name__ == "__main__":
    os.environ["FORCED_LENGTHS"] = sys.argv.pop(1)
    most = LAWS[os.environ["FORCED_LENGTHS"]][0]
    train_async.train(parse_config([*sys.argv[1:], "--max-response-tokens", str(most)]), run_forced)
