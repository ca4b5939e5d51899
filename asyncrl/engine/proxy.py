"""One vLLM engine as a rollout worker sees it: generate, abort, suspend, resume, update, score.

This module alone decides what a weight update does to running requests (`on_update`). Whoever waits for a response gets
one response, whatever happened meanwhile. The module imports vllm inside functions, so importing it costs nothing.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable

import numpy as np

from asyncrl.cluster.placement import WorkerSpec
from asyncrl.config import Config
from asyncrl.engine import health, vllm_setup
from asyncrl.engine.completion import Request, read_completion
from asyncrl.messages import SampledTokens
from asyncrl.records import Completion
from asyncrl.runlog.time_ledger import Activity

ABORT_AGAIN_S = 0.001


class LLMProxy:
    """One vLLM engine. Requests may be added and aborted at any time; they never wait for each other."""

    def __init__(self, config: Config, engine, stop_token_ids: list[int]):
        self.config = config
        self.engine = engine
        self.stop_token_ids = stop_token_ids
        self.version = -1
        self.sampled = SampledTokens()
        self.activity = Activity()
        """What this worker does. The proxy notes requests and updates in it, and its owner notes the rest."""
        self._score_numbers = itertools.count()
        self.requests: dict[str, Request] = {}
        """Responses that are being sampled, by the ids that the callers gave."""
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._asleep = False

    @classmethod
    async def start(cls, spec: WorkerSpec, stop_token_ids: list[int]) -> "LLMProxy":
        """Start the engine, with weights that mean nothing until the first update."""
        return cls(spec.config, vllm_setup.start_engine(spec), stop_token_ids)

    @property
    def death(self) -> RuntimeError | None:
        """The error of a dead engine; None while it is alive."""
        return health.death_of(self.engine)

    async def watch(self) -> None:
        """Raise when the engine is dead, or gives no sign of life for --timeout-s."""
        await health.watch(self.engine, self.config.timeout_s)

    async def connect(self, init_info: dict) -> None:
        """Connect the engine to the trainer's weight transport.

        Raises TimeoutError if it takes longer than --timeout-s.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        async with health.limited(self.config.timeout_s, "connecting the engine to the trainer"):
            await self.engine.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info=init_info)
            )

    # Sampling

    async def generate(
        self,
        request_id: str,
        prompt_tokens: tuple[int, ...],
        seed: int | None,
        max_tokens: int | None = None,
        prefix: Completion | None = None,
    ) -> Completion:
        """Sample one response, or what follows a `prefix` of it, through any updates.

        It has at most `max_tokens` tokens in all, by default max_response_tokens. Without a seed each is the likeliest.
        """
        if prefix is not None and prefix.finish_reason != "aborted":
            return prefix
        max_tokens = max_tokens or self.config.max_response_tokens
        request = self.requests[request_id] = Request(segments=[] if prefix is None else [prefix])
        try:
            while True:
                await self.until_resumed()
                if request.aborted:
                    return request.end("aborted")
                if self.config.on_update == "restart":  # in which every response is of one version
                    self.sampled.discarded += request.keep_only(self.version)
                attempt, sampled = len(request.segments), request.tokens
                (segment,) = await self.sample(
                    request,
                    f"{request_id}-{attempt}-{self.version}",
                    [*prompt_tokens, *sampled],
                    None if seed is None else seed + attempt,
                    max_tokens - len(sampled),
                )
                if sampled:
                    self.sampled.resumed += len(segment.tokens)
                request.segments.append(segment)
                if segment.finish_reason != "aborted" or request.aborted:
                    return request.end(segment.finish_reason)
                if self.config.on_update == "restart":
                    # counted now: the update that aborted it reports it
                    self.sampled.discarded += len(request.tokens)
                    request.segments.clear()
                elif len(request.tokens) == max_tokens:
                    return request.end("length")
        finally:
            del self.requests[request_id]

    async def until_resumed(self) -> None:
        """Wait while sampling is paused; else a request would be stamped and salted with the old version."""
        # an update that wakes it may be followed at once by a suspend
        while not self._resumed.is_set():
            await self._resumed.wait()

    async def sample(
        self,
        request: Request,
        engine_id: str,
        tokens: list[int],
        seed: int | None,
        max_tokens: int,
        num_responses: int = 1,
    ) -> list[Completion]:
        """Sample responses by one request of the engine, to their end or until they are aborted."""
        params = vllm_setup.sampling_params(
            self.config, self.stop_token_ids, seed, max_tokens, num_responses
        )
        request.engine_id = engine_id
        self.activity.add(requests=1)
        try:
            final = await self.ask(engine_id, tokens, params)
        finally:
            self.activity.add(requests=-1)
            request.engine_id = None
        self.sampled.new += sum(len(output.token_ids) for output in final.outputs)
        outputs = sorted(final.outputs, key=lambda output: output.index)
        return list(map(read_completion, outputs))

    async def ask(self, engine_id: str, tokens: list[int], params):
        """Return the final output of a request of the engine."""
        from vllm.inputs import tokens_input

        # As an engine input: tokens in vLLM's other form are handed to a thread, which may have text to tokenise.
        # The salt keeps a prefix that was computed under other weights out of reach, without emptying the cache.
        prompt = tokens_input(tokens, cache_salt=str(self.version))
        outputs = self.engine.generate(prompt, params, engine_id)
        (final,) = [output async for output in outputs if output.finished]
        return final

    async def score(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Return the log-probs of tokens 1 … T − 1 given those before, at temperature 1: [T − 1] float32, nats."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        final = await self.ask(f"score-{next(self._score_numbers)}", list(tokens), params)
        pairs = zip(final.prompt_logprobs[1:], tokens[1:], strict=True)
        return np.array([position[token].logprob for position, token in pairs], dtype=np.float32)

    async def decode(self, tokens: tuple[int, ...], num_tokens: int) -> np.ndarray:
        """Sample other tokens in the place of the last ones. Returns their log-probs at temperature 1, [2, num_tokens]
        float32, nats: as they were sampled, and as a prompt has them."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=num_tokens, seed=0, ignore_eos=True, logprobs=0, detokenize=False
        )
        prompt = list(tokens[:-num_tokens])
        final = await self.ask(f"decode-{next(self._score_numbers)}", prompt, params)
        (output,) = final.outputs
        sampled = list(output.token_ids)
        pairs = zip(output.logprobs, sampled, strict=True)
        decoded = [position[token].logprob for position, token in pairs]
        read = await self.score((*prompt, *sampled))
        return np.stack([np.array(decoded, np.float32), read[-num_tokens:]])

    async def abort(self, request_ids: Iterable[str | None]) -> None:
        """End requests; each returns what it has, with finish reason `aborted`. Unknown ids are passed over."""
        requests = [self.requests[name] for name in request_ids if name in self.requests]
        for request in requests:
            request.aborted = True
        await self.engine.abort(running(requests))

    def take_sampled(self) -> SampledTokens:
        """Return the tokens that the engine has returned since the last call."""
        sampled, self.sampled = self.sampled, SampledTokens()
        return sampled

    # Weights

    async def suspend(self) -> None:
        """Stop sampling, as `on_update` says: requests freeze, are aborted, or run to their end; new ones wait."""
        if not self._resumed.is_set():
            return
        self._resumed.clear()
        if self.config.on_update in ("resume", "restart"):
            # their responses continue after `resume`
            while engine_ids := running(self.requests.values()):
                await self.engine.abort(engine_ids)
                # the engine does not know yet one that has just been sent to it
                await asyncio.sleep(ABORT_AGAIN_S)
        # The engine core is asked directly: AsyncLLM.pause_generation sleeps another 20 ms while all stand still.
        mode = "wait" if self.config.on_update == "wait" else "keep"
        await self.engine.engine_core.pause_scheduler_async(
            mode=mode, clear_cache=self.config.on_update != "keep"
        )

    async def sleep(self) -> None:
        """Stop sampling and give up the GPU's memory, weights included: the next update wakes the engine.

        No request may be running in the engine, as its keys and values would be lost. Raises TimeoutError if it takes
        longer than --timeout-s.
        """
        async with health.limited(self.config.timeout_s, "falling asleep"):
            await self.suspend()
            await self.engine.sleep(level=2, mode="keep")
        self._asleep = True

    async def resume(self) -> None:
        """Continue sampling."""
        await self.engine.resume_generation()
        self.activity.resume()
        self._resumed.set()

    async def update(
        self, version: int, update_infos: list[dict], receiving: Callable[[], None] | None = None
    ) -> float:
        """Load new weights and continue sampling. Returns the pause of generation, seconds; 0 if it was paused before.

        `receiving` is called when the engine is ready for the weights. Raises TimeoutError as `sleep` does.
        """
        was_running = self._resumed.is_set()
        async with health.limited(self.config.timeout_s, f"loading version {version}"):
            if self.config.on_update == "wait":
                await self.suspend()
            start = time.monotonic()
            self.activity.pause("update")
            await self.suspend()
            if self._asleep:
                # its scheduler continues as well, but has no request: see sleep
                await self.engine.wake_up()
                self._asleep = False
            await self._load(version, update_infos, receiving)
            await self.resume()
        return time.monotonic() - start if was_running else 0.0

    async def _load(
        self, version: int, update_infos: list[dict], receiving: Callable[[], None] | None
    ) -> None:
        """Go through the phases of vLLM's weight update.

        The engine core takes calls in order, so they are sent all together. Each answer that is waited for is a round
        trip in which generation is paused. If one call fails, the others are made all the same. The error then ends
        this worker before anything is sampled.
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
            self.engine.update_weight_version(str(version)),
        ]
        await asyncio.gather(*calls)
        self.version = version

    def shutdown(self) -> None:
        """End the engine process at once. It has nothing to hand over, and a clean end takes it seconds."""
        self.engine.shutdown(timeout=0)


def running(requests: Iterable[Request]) -> list[str]:
    """Return the ids of the engine's requests that sample for these responses now."""
    return [request.engine_id for request in requests if request.engine_id is not None]
