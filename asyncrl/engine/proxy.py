"""One vLLM engine as a rollout worker sees it: generate, abort, suspend, load weights, score.

This module decides the effect of a weight update on running requests (`on_update`). A caller gets one response,
whatever updates there were. Functions import vllm, so the import of this module is fast.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.config import Config
from asyncrl.engine import health, vllm_setup
from asyncrl.engine.completion import Request, read_completion
from asyncrl.messages import SampledTokens
from asyncrl.records import Completion
from asyncrl.runlog.time_ledger import Activity

ABORT_AGAIN_S = 0.001
NCCL_HINT = (
    "GPUs that are virtual, or joined by PCIe alone, can hang in NCCL's direct copies: try NCCL_P2P_DISABLE=1 in the "
    "environment, or --weight-sync shm"
)


class LLMProxy:
    """One vLLM engine. Requests can be added and aborted at any time, and never wait for each other."""

    def __init__(self, config: Config, engine, stop_token_ids: list[int]):
        self.config = config
        self.engine = engine
        self.stop_token_ids = stop_token_ids
        self.version = -1
        self.token_counts = SampledTokens()
        self.activity = Activity()
        """States of this worker. The proxy records requests and updates, and RolloutWorker records the rest."""
        self._score_numbers = itertools.count()
        self.requests: dict[str, Request] = {}
        """Running responses, by the callers' ids."""
        self._may_sample = asyncio.Event()
        self._may_sample.set()
        self._asleep = False

    @classmethod
    async def start(cls, spec: WorkerSpec, stop_token_ids: list[int]) -> "LLMProxy":
        """Start the engine. Its weights are random until the first update."""
        return cls(spec.config, vllm_setup.start_engine(spec), stop_token_ids)

    @property
    def death(self) -> RuntimeError | None:
        """The error of a dead engine, whose cause vLLM has logged; None while it is alive."""
        return RuntimeError("the engine is dead") if self.engine.errored else None

    async def watch(self) -> None:
        """Raise an error when the engine is dead, or does not answer for --timeout-s."""
        await health.watch(self.engine, self.config.timeout_s)

    async def connect(self, init_info: dict) -> None:
        """Connect the engine to the trainer's weight transport.

        Raises TimeoutError if it takes longer than --timeout-s.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        hint = NCCL_HINT if "master_port" in init_info else ""
        action = "connecting the engine to the trainer"
        async with health.limited(self.config.timeout_s, action, hint):
            await self.engine.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info=init_info)
            )

    # Sampling

    async def generate(
        self,
        request_id: str,
        prompt_tokens: tuple[int, ...],
        seed: int | None,
        max_tokens: int,
        prefix: Completion | None = None,
    ) -> Completion:
        """Sample one response, or the rest of a response after its `prefix`, through any updates.

        It has at most `max_tokens` tokens in all. Without a seed sampling is greedy.
        """
        if prefix is not None and prefix.finish_reason != "interrupted":
            return prefix
        request = self.requests[request_id] = Request(parts=[] if prefix is None else [prefix])
        try:
            while True:
                await self.until_sampling()
                if request.is_aborted:
                    return request.end("interrupted")
                if self.config.on_update == "restart":
                    # a prefix may be of other weights; parts are dropped as an update interrupts them
                    self.token_counts.discarded += request.keep_only(self.version)
                part_number, tokens_so_far = len(request.parts), request.tokens
                (part,) = await self.sample_part(
                    request,
                    f"{request_id}-{part_number}-{self.version}",
                    [*prompt_tokens, *tokens_so_far],
                    None if seed is None else seed + part_number,
                    max_tokens - len(tokens_so_far),
                )
                if tokens_so_far:
                    self.token_counts.resumed += len(part.tokens)
                request.parts.append(part)
                if part.finish_reason != "interrupted" or request.is_aborted:
                    return request.end(part.finish_reason)
                if self.config.on_update == "restart":
                    # now, because the update that interrupted it reports the number
                    self.token_counts.discarded += len(request.tokens)
                    request.parts.clear()
                elif len(request.tokens) == max_tokens:
                    return request.end("length")
        finally:
            del self.requests[request_id]

    async def until_sampling(self) -> None:
        """Wait while sampling is paused, because a request must get the new version."""
        # a suspend may follow the update at once
        while not self._may_sample.is_set():
            await self._may_sample.wait()

    async def sample_part(
        self,
        request: Request,
        engine_id: str,
        tokens: list[int],
        seed: int | None,
        max_tokens: int,
        num_responses: int = 1,
    ) -> list[Completion]:
        """Sample responses by one request of the engine, until they end or are interrupted."""
        params = vllm_setup.sampling_params(
            self.config, self.stop_token_ids, seed, max_tokens, num_responses
        )
        request.engine_id = engine_id
        self.activity.add(requests=1)
        try:
            final = await self.run_request(engine_id, tokens, params)
        finally:
            self.activity.add(requests=-1)
            request.engine_id = None
        self.token_counts.new += sum(len(output.token_ids) for output in final.outputs)
        outputs = sorted(final.outputs, key=lambda output: output.index)
        return [read_completion(output, self.config.top_logprobs) for output in outputs]

    async def run_request(self, engine_id: str, tokens: list[int], params):
        """Return the final output of a request of the engine."""
        from vllm.inputs import tokens_input

        # vLLM would pass a list of tokens to a thread first, in case it were text.
        # The salt hides prefixes that were computed under other weights, without emptying the cache.
        prompt = tokens_input(tokens, cache_salt=str(self.version))
        outputs = self.engine.generate(prompt, params, engine_id)
        (final,) = [output async for output in outputs if output.finished]
        return final

    async def score(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of tokens 1 … T − 1 at temperature 1, [T − 1] float32, nats."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        final = await self.run_request(f"score-{next(self._score_numbers)}", list(tokens), params)
        return _logprobs_of(tokens[1:], final.prompt_logprobs[1:])

    async def decode(self, tokens: tuple[int, ...], num_tokens: int) -> np.ndarray:
        """Sample `num_tokens` tokens in place of the last ones.

        Return their log-probs at temperature 1, [2, num_tokens] float32, nats: when sampled, and when read as a prompt.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=num_tokens, seed=0, ignore_eos=True, logprobs=0, detokenize=False
        )
        prompt = list(tokens[:-num_tokens])
        final = await self.run_request(f"decode-{next(self._score_numbers)}", prompt, params)
        (output,) = final.outputs
        decoded = _logprobs_of(output.token_ids, output.logprobs)
        read = await self.score((*prompt, *output.token_ids))
        return np.stack([decoded, read[-num_tokens:]])

    async def abort(self, request_ids: Iterable[str | None]) -> None:
        """End requests. Each returns its tokens so far, with finish reason `interrupted`. Unknown ids are ignored.

        A request that waits in `until_sampling` returns only after the next update.
        """
        requests = [self.requests[name] for name in request_ids if name in self.requests]
        for request in requests:
            request.is_aborted = True
        # The engine may not know the newest requests yet, and ignores these ids. Such a response runs on, and
        # Episode.take_turns calls its end aborted.
        await self.engine.abort(engine_ids_of(requests))

    def take_sampled(self) -> SampledTokens:
        """Return the counts of tokens since the last call."""
        token_counts, self.token_counts = self.token_counts, SampledTokens()
        return token_counts

    # Weights

    async def suspend(self) -> None:
        """Stop sampling. By `on_update`, requests freeze, are interrupted, or run to their end. New requests wait."""
        if not self._may_sample.is_set():
            return
        self._may_sample.clear()
        if self.config.on_update in ("resume", "restart"):
            while engine_ids := engine_ids_of(self.requests.values()):
                await self.engine.abort(engine_ids)
                # the engine may not know the newest requests yet
                await asyncio.sleep(ABORT_AGAIN_S)
        # AsyncLLM.pause_generation would sleep another 20 ms
        mode = "wait" if self.config.on_update == "wait" else "keep"
        await self.engine.engine_core.pause_scheduler_async(
            mode=mode, clear_cache=self.config.on_update != "keep"
        )

    async def sleep(self) -> None:
        """Stop sampling and free the GPU's memory, weights included. The next update wakes the engine.

        No request may be running in the engine, because keys and values are lost. Raises TimeoutError after
        --timeout-s.
        """
        async with health.limited(self.config.timeout_s, "falling asleep"):
            await self.suspend()
            await self.engine.sleep(level=2, mode="keep")
        self._asleep = True

    async def load_weights(
        self, version: int, update_infos: list[dict], receiving: Callable[[], None] | None = None
    ) -> float:
        """Load new weights and continue sampling. Return the pause of generation, seconds; 0 if it was paused before.

        `receiving` is called when the engine is ready for the weights. Raises TimeoutError as `sleep` does.
        """
        was_running = self._may_sample.is_set()
        hint = "" if receiving is None else NCCL_HINT
        async with health.limited(self.config.timeout_s, f"loading version {version}", hint):
            if self.config.on_update == "wait":
                # requests run to their end: this is no pause, so it comes before the clock
                await self.suspend()
            start = time.monotonic()
            self.activity.pause("update")
            await self.suspend()
            if self._asleep:
                # the scheduler continues as well, but has no request
                await self.engine.wake_up()
                self._asleep = False
            await self._load(version, update_infos, receiving)
            await self.engine.resume_generation()
            self.activity.resume()
            self._may_sample.set()
        return time.monotonic() - start if was_running else 0.0

    async def _load(
        self, version: int, update_infos: list[dict], receiving: Callable[[], None] | None
    ) -> None:
        """Make all calls of vLLM's weight update at once.

        The engine core takes calls in order. Waiting for each answer would make the pause of generation longer. If one
        call fails, the error ends this worker before it samples.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        calls = [self.engine.start_weight_update()]
        if receiving is not None:
            await calls.pop()
            receiving()
        requests = [WeightTransferUpdateRequest(update_info=info) for info in update_infos]
        calls += [
            *map(self.engine.update_weights, requests),
            self.engine.finish_weight_update(),
            # vLLM stamps every later token with it; completion.token_versions reads that
            self.engine.update_weight_version(str(version)),
        ]
        await asyncio.gather(*calls)
        self.version = version

    def shutdown(self) -> None:
        """End the engine process at once, because a clean end takes seconds."""
        self.engine.shutdown(timeout=0)


def engine_ids_of(requests: Iterable[Request]) -> list[str]:
    """Return the ids of the engine's running requests for these responses."""
    return [request.engine_id for request in requests if request.engine_id is not None]


def _logprobs_of(tokens: Sequence[int], places: Sequence[dict]) -> np.ndarray:
    """Return the log-prob of each token from vLLM's log-probs in its place, by token, [T] float32."""
    pairs = zip(tokens, places, strict=True)
    return np.array([place[token].logprob for token, place in pairs], dtype=np.float32)
