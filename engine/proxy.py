"""One vLLM engine as a rollout worker sees it: generate, abort, suspend, resume, update, score.

What becomes of running requests at a weight update (`on_update`) is decided here and nowhere else: whoever waits for a
response gets one response, whatever happened on the way. Imports vllm inside functions; importing this costs nothing.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from cluster.placement import WorkerSpec
from cluster.processes import dump_stacks
from config import Config
from data.messages import SampledTokens
from data.records import FinishReason
from records.time_ledger import Activity

CPU_KV_CACHE_BYTES = 1 << 30
CPU_BATCHED_TOKENS = 8192  # per engine step
ABORT_AGAIN_S = 0.02
WATCH_S = 0.2
"""Between two looks at whether the engine is alive."""
DUMP_S = 1.0
"""Time that the engine's processes have to write their stacks."""


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    tokens: list[int]
    logprobs: np.ndarray
    """[R] float32, nats, under the exact sampling transform."""
    versions: np.ndarray
    """[R] int32."""
    finish_reason: FinishReason


@dataclass
class _Request:
    """A response on its way; one engine request, or one after the other."""

    engine_id: str | None = None
    """The engine request that samples it now."""
    aborted: bool = False
    """Whether its caller gave it up, and not an update."""
    segments: list[Completion] = field(default_factory=list)


class LLMProxy:
    """One vLLM engine. Requests may be added and aborted at any time; they never wait for each other."""

    def __init__(self, config: Config, engine, stop_token_ids: list[int]):
        self.config = config
        self.engine = engine
        self.stop_token_ids = stop_token_ids
        self.version = -1
        self.sampled = SampledTokens()
        self.activity = Activity()
        """What this worker does; the proxy notes requests and updates in it, its owner the rest."""
        self._num_scores = 0
        self._requests: dict[str, _Request] = {}
        self._returned = asyncio.Event()  # an engine request ended
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._asleep = False
        self._wire_options: dict = {}  # that this vLLM wants with each update

    @classmethod
    async def start(cls, spec: WorkerSpec, stop_token_ids: list[int]) -> "LLMProxy":
        """Start the engine, with weights that mean nothing until the first update.

        Raises ValueError if this vLLM cannot stamp versions exactly under the chosen `on_update`.
        """
        import torch
        from vllm import AsyncEngineArgs
        from vllm.outputs import CompletionOutput
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        fields = {field.name for field in dataclasses.fields(CompletionOutput)}
        if "weight_versions" not in fields and spec.config.on_update in ("keep", "recompute"):
            raise ValueError(
                f"--on-update {spec.config.on_update} needs token versions from the engine, and this vLLM does not "
                "report them; use vllm 0.32 or later, or --on-update resume, restart or wait"
            )
        options = engine_options(spec)
        engine_config = AsyncEngineArgs(**options).create_engine_config(UsageContext.ENGINE_CONTEXT)
        if spec.placement.gpu is None:
            # On the CPU vLLM has just chosen to spawn; a forked engine need not import all of vLLM again, 9 s. It
            # inherits torch's threads, which the environment decides only if torch was not imported before.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            torch.set_num_threads(spec.placement.cpu_threads)
        engine = AsyncLLM.from_vllm_config(engine_config, disable_log_stats=options["disable_log_stats"])
        return cls(spec.config, engine, stop_token_ids)

    @property
    def death(self) -> RuntimeError | None:
        """The error to end with once the engine is dead; vLLM has logged what it knows of it."""
        why = "the engine is dead; if nothing above says why, it was killed, most likely for want of memory"
        return RuntimeError(why) if self.engine.errored else None

    async def watch(self) -> None:
        """Raise when the engine is dead: vLLM fails its requests then, but leaves an update or a suspend waiting."""
        while self.death is None:
            await asyncio.sleep(WATCH_S)
        raise self.death

    async def connect(self, init_info: dict) -> None:
        """Connect the engine to the trainer's weight transport.

        Raises TimeoutError if it takes longer than the startup timeout.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        from weights.transport import split_wire_options

        init_info, self._wire_options = split_wire_options(init_info)
        async with _limited(self.config.timeout_s, "connecting the engine to the trainer"):
            await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    # Sampling

    async def generate(
        self, request_id: str, prompt_tokens: tuple[int, ...], seed: int, max_tokens: int | None = None
    ) -> Completion:
        """Sample one response, of at most `max_tokens` tokens (max_response_tokens), through any updates."""
        max_tokens = max_tokens or self.config.max_response_tokens
        request = self._requests[request_id] = _Request()
        try:
            while True:
                await self._until_resumed()
                if request.aborted:
                    return _join(request.segments, "aborted")
                segment = await self._sample_segment(request, request_id, prompt_tokens, seed, max_tokens)
                self._count(request, segment)
                if segment.finish_reason != "aborted" or request.aborted:
                    return _join([*request.segments, segment], segment.finish_reason)
                self._keep_for_resume(request, segment)
                if sum(len(kept.tokens) for kept in request.segments) == max_tokens:
                    return _join(request.segments, "length")
        finally:
            del self._requests[request_id]

    async def _until_resumed(self) -> None:
        """Wait; else a request would be stamped and salted with the version that is going."""
        while not self._resumed.is_set():  # an update that wakes it may be followed at once by a suspend
            await self._resumed.wait()

    async def _sample_segment(
        self, request: _Request, request_id: str, prompt_tokens: tuple[int, ...], seed: int, max_tokens: int
    ) -> Completion:
        """Go on from what the request has so far."""
        prefix = [token for kept in request.segments for token in kept.tokens]
        attempt = len(request.segments)
        request.engine_id = f"{request_id}-{attempt}-{self.version}"
        try:
            (segment,) = await self._sample(
                request.engine_id, [*prompt_tokens, *prefix], seed + attempt, max_tokens - len(prefix), 1
            )
            return segment
        finally:
            request.engine_id = None
            self._returned.set()

    def _count(self, request: _Request, segment: Completion) -> None:
        self.sampled.new += len(segment.tokens)
        if any(len(kept.tokens) for kept in request.segments):
            self.sampled.resumed += len(segment.tokens)

    def _keep_for_resume(self, request: _Request, segment: Completion) -> None:
        """After an update aborted it: keep what it has as a prefix, or throw it away."""
        if self.config.on_update == "restart":
            self.sampled.discarded += len(segment.tokens)
        else:
            request.segments.append(segment)

    async def generate_group(
        self, request_id: str, prompt_tokens: tuple[int, ...], seed: int, num_responses: int
    ) -> list[Completion]:
        """Sample several responses by one request; all are returned when the last has ended."""
        request = self._requests[request_id] = _Request()
        try:
            await self._until_resumed()
            request.engine_id = request_id
            completions = await self._sample(
                request_id, list(prompt_tokens), seed, self.config.max_response_tokens, num_responses
            )
            self.sampled.new += sum(len(completion.tokens) for completion in completions)
            return completions
        finally:
            del self._requests[request_id]

    async def _sample(
        self, engine_id: str, prompt_tokens: list[int], seed: int, max_tokens: int, num_responses: int
    ) -> list[Completion]:
        from vllm.inputs import tokens_input

        params = self.sampling_params(seed, max_tokens, num_responses)
        # As an engine input: tokens in vLLM's other form are handed to a thread, which may have text to tokenise.
        # The salt keeps a prefix that was computed under other weights out of reach, without emptying the cache.
        prompt = tokens_input(prompt_tokens, cache_salt=str(self.version))
        version = self.version
        self.activity.add(requests=1)
        try:
            final = [output async for output in self.engine.generate(prompt, params, engine_id) if output.finished]
        finally:
            self.activity.add(requests=-1)
        if not final:
            raise RuntimeError(f"request {engine_id} ended without an output")
        return [_completion(one, version) for one in sorted(final[0].outputs, key=lambda one: one.index)]

    def sampling_params(self, seed: int, max_tokens: int, num_responses: int):
        """vLLM's parameters of one request."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        return SamplingParams(
            n=num_responses,
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            max_tokens=max_tokens,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=self.stop_token_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,  # nobody else has them
        )

    async def score(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Log-probs of tokens 1 … T − 1 given those before, at temperature 1. Returns [T − 1] float32, nats."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._num_scores += 1
        async for output in self.engine.generate(tokens_input(list(tokens)), params, f"score-{self._num_scores}"):
            if output.finished:
                pairs = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
                return np.array([position[token].logprob for position, token in pairs], dtype=np.float32)
        raise RuntimeError("a score request ended without an output")

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; each returns what it has, with finish reason `aborted`. Unknown ids are passed over."""
        requests = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        for request in requests:
            request.aborted = True
        await self.engine.abort([request.engine_id for request in requests if request.engine_id is not None])

    def take_sampled(self) -> SampledTokens:
        """Tokens returned by the engine since the last call."""
        sampled, self.sampled = self.sampled, SampledTokens()
        return sampled

    # Weights

    async def suspend(self) -> None:
        """Stop sampling, as `on_update` says: requests freeze, are aborted, or run to their end; new ones wait."""
        if not self._resumed.is_set():
            return
        self._resumed.clear()
        if self.config.on_update in ("resume", "restart"):
            await self._interrupt()
        # The engine core is asked directly: AsyncLLM.pause_generation sleeps another 20 ms while all stand still.
        mode = "wait" if self.config.on_update == "wait" else "keep"
        await self.engine.engine_core.pause_scheduler_async(
            mode=mode,
            clear_cache=self.config.on_update != "keep",
        )

    async def _interrupt(self) -> None:
        """Abort every engine request and wait until all have returned; their responses go on after `resume`."""
        while engine_ids := [r.engine_id for r in self._requests.values() if r.engine_id is not None]:
            self._returned.clear()
            await self.engine.abort(engine_ids)
            with contextlib.suppress(TimeoutError):  # the engine does not know yet one that has just been sent to it
                await asyncio.wait_for(self._returned.wait(), ABORT_AGAIN_S)

    async def sleep(self) -> None:
        """Stop sampling and give up the GPU's memory, weights included: the next update wakes the engine.

        No request may be running in the engine, as its keys and values would be lost. Raises TimeoutError if it takes
        longer than the rollout timeout.
        """
        async with _limited(self.config.timeout_s, "falling asleep"):
            await self.suspend()
            await self.engine.sleep(level=2, mode="keep")
        self._asleep = True

    async def resume(self) -> None:
        """Go on sampling."""
        await self.engine.resume_generation()
        self.activity.go_on()
        self._resumed.set()

    async def update(
        self, version: int, update_infos: list[dict], receiving: Callable[[], None] | None = None
    ) -> float:
        """Load new weights and go on sampling. Returns the pause seen by generation, seconds; 0 if it stood before.

        `receiving` is called when the engine is ready for the weights. Raises TimeoutError if it takes longer than the
        rollout timeout.
        """
        was_running = self._resumed.is_set()
        async with _limited(self.config.timeout_s, f"loading version {version}"):
            if self.config.on_update == "wait":
                await self.suspend()
            start = time.monotonic()
            self.activity.stand("update")
            await self.suspend()
            await self._wake_up()
            await self._load(version, update_infos, receiving)
            await self.resume()
        return time.monotonic() - start if was_running else 0.0

    async def _wake_up(self) -> None:
        if self._asleep:
            await self.engine.wake_up()  # its scheduler goes on as well, but has no request: see sleep
            self._asleep = False

    async def _load(self, version: int, update_infos: list[dict], receiving: Callable[[], None] | None) -> None:
        """The phases of vLLM's weight update. The engine core takes calls in order, so they are sent all together: each
        answer waited for is a round trip in which generation stands still. After one that fails the others are made
        all the same, but then the error ends this worker, and nothing is sampled before."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        calls = [self.engine.start_weight_update()]
        if receiving is not None:
            await calls.pop()
            receiving()
        for update_info in update_infos:
            request = WeightTransferUpdateRequest(update_info=update_info | self._wire_options)
            calls.append(self.engine.update_weights(request))
        calls.append(self.engine.finish_weight_update())
        if hasattr(self.engine, "update_weight_version"):  # vLLM 0.26 stamps no versions
            calls.append(self.engine.update_weight_version(str(version)))
        await asyncio.gather(*calls)
        self.version = version

    def shutdown(self) -> None:
        """End the engine process, at once: it has nothing to hand over, and a clean end takes it seconds."""
        self.engine.shutdown(timeout=0)


def _completion(output, version_at_start: int) -> Completion:
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
    if output.finish_reason not in reasons:
        raise RuntimeError(f"the engine ended a request with {output.finish_reason!r}")
    tokens = list(output.token_ids)
    versions = np.full(len(tokens), version_at_start, dtype=np.int32)
    for span in getattr(output, "weight_versions", None) or []:
        versions[span.start : span.end] = int(span.version)
    logprobs = np.array(output.logprobs.logprobs if tokens else [], dtype=np.float32)
    return Completion(tokens, logprobs, versions, reasons[output.finish_reason])


def _join(segments: list[Completion], finish_reason: FinishReason) -> Completion:
    """One response out of what was sampled between updates."""
    if len(segments) == 1:
        return dataclasses.replace(segments[0], finish_reason=finish_reason)
    return Completion(
        [token for segment in segments for token in segment.tokens],
        np.concatenate([np.zeros(0, np.float32), *(segment.logprobs for segment in segments)]),
        np.concatenate([np.zeros(0, np.int32), *(segment.versions for segment in segments)]),
        finish_reason,
    )


@contextlib.asynccontextmanager
async def _limited(timeout_s: float, what: str) -> AsyncIterator[None]:
    """Raise TimeoutError after a time, with the stacks of this process and its engine in the log."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        dump_stacks(os.getpid())
        await asyncio.sleep(DUMP_S)
        raise TimeoutError(f"{what} took more than {timeout_s:.0f} s") from None


def engine_options(spec: WorkerSpec) -> dict:
    """vLLM's engine arguments for a worker."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config, on_cpu = spec.config, spec.placement.gpu is None
    options = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "dummy",  # all weights come by the transport, so one that it misses is seen at once
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": config.max_running_requests,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": spec.transport},
        "worker_extension_cls": "engine.extension.EngineExtension",
    }
    if on_cpu:
        return options | {
            "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
            "enforce_eager": True,
            # A seeded request whose prompt is computed in parts ends the engine: it rewinds a generator's offset,
            # which generators on the CPU do not have.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCHED_TOKENS, config.max_sequence_tokens),
            # The class, because vLLM turns the name "uni" into "mp" on the CPU, for the sake of OpenMP's environment,
            # which worker_environment sets; a process less is a third faster.
            "distributed_executor_backend": UniProcExecutor,
        }
    return options | {
        "gpu_memory_utilization": spec.placement.gpu_memory_utilization,
        "tensor_parallel_size": spec.placement.num_gpus,
        "enable_sleep_mode": config.colocate == "sleep",
    }
