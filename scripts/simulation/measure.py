"""The curve of a real engine: the vLLM engine of a rollout worker on the CPU, timed with forced lengths."""

import asyncio
import os
import time

import numpy as np

from cluster.placement import WorkerPlacement, WorkerSpec
from config import Config
from data.models import resolve_model
from engine.proxy import LLMProxy
from engine.vllm_setup import worker_environment
from scripts.simulation.engine import EngineCurve

REQUESTS = (1, 2, 4, 8, 16, 32, 64)
DECODED_TOKENS, PROMPT_LENGTH, MAX_RESPONSE_TOKENS = 96, 32, 192


class ExactLengths(LLMProxy):
    """An engine whose responses have the length that is asked for."""

    def sampling_params(self, seed: int, max_tokens: int, num_responses: int):
        """vLLM's parameters of one request that nothing but its length ends."""
        params = super().sampling_params(seed, max_tokens, num_responses)
        params.ignore_eos, params.stop_token_ids = True, []
        return params


async def measure_engine(model: str, repeats: int, source: str) -> EngineCurve:
    """Time the real vLLM engine on the CPU; medians of `repeats`."""
    config = Config(max_response_tokens=MAX_RESPONSE_TOKENS, max_running_requests=max(REQUESTS))
    placement = WorkerPlacement(0, None, None, 1, 0.0)
    os.environ.update(worker_environment(placement))
    spec = WorkerSpec(config, placement, resolve_model(model, config.task), "shm", "")
    proxy = await ExactLengths.start(spec, [])
    try:
        await proxy.engine.engine_core.set_weight_version_async("0")  # tokens are stamped with it
        await _time_requests(proxy, max(REQUESTS), DECODED_TOKENS)  # warms up
        whole, first = np.empty((2, repeats, len(REQUESTS)))
        for repeat in range(repeats):  # alternating, so that a busy moment of the machine falls on all alike
            for index, count in enumerate(REQUESTS):
                whole[repeat, index] = await _time_requests(proxy, count, DECODED_TOKENS)
                first[repeat, index] = await _time_requests(proxy, count, 1)
    finally:
        proxy.shutdown()
    whole_s, first_s = np.median(whole, axis=0), np.median(first, axis=0)
    points = zip(REQUESTS, ((DECODED_TOKENS - 1) / (whole_s - first_s)).tolist(), strict=True)
    prefill = PROMPT_LENGTH * (REQUESTS[-1] - REQUESTS[0]) / float(first_s[-1] - first_s[0])
    return EngineCurve(source, tuple(points), prefill, max(REQUESTS))


async def _time_requests(proxy: LLMProxy, count: int, num_tokens: int) -> float:
    """Seconds that `count` requests of that many tokens take together; every prompt is new to the prefix cache."""
    start = time.monotonic()
    rng = np.random.default_rng(time.monotonic_ns())
    prompts = [tuple(rng.integers(3, 14, PROMPT_LENGTH).tolist()) for _ in range(count)]
    await asyncio.gather(*(proxy.generate(f"{start}.{i}", prompt, i, num_tokens) for i, prompt in enumerate(prompts)))
    return time.monotonic() - start
