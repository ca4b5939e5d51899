"""The rollout worker process: `LLMProxy` over vLLM's AsyncLLM, and one coroutine per trajectory.

A worker reads messages from the controller in order, so a ticket sent after an update is sampled under it. Tickets run
at the same time and independently: each is generated, scored as soon as its response ends, and sent back; nothing waits
for a batch. Imports vllm and transformers inside functions; importing this module costs nothing.
"""

import asyncio
import dataclasses
import faulthandler
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from config import Config
from data.records import FinishReason, Ticket, Trajectory, check_trajectory
from data.rewards import RewardError, RewardPool
from messages import Abort, Connect, Finished, Probed, Ready, Stop, Tickets, Update, Updated
from placement import WorkerPlacement
from processes import exit_with_parent, without_torchrun

CPU_KV_CACHE_BYTES = 1 << 30
CPU_BATCHED_TOKENS = 8192  # per engine step


@dataclass(frozen=True)
class WorkerSpec:
    """All a worker process needs to start; it pickles."""

    config: Config
    placement: WorkerPlacement
    model_path: str
    transport: str
    log_path: str


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    tokens: list[int]
    logprobs: np.ndarray
    """[R] float32, nats, under the exact sampling transform."""
    versions: np.ndarray
    """[R] int32."""
    finish_reason: FinishReason


class LLMProxy:
    """One vLLM engine as the rest of the worker sees it: generate, abort, suspend, resume, update, score.

    Requests may be added and aborted at any time; they never wait for each other.
    """

    def __init__(self, config: Config, engine, stop_token_ids: list[int]):
        self.config = config
        self.engine = engine
        self.stop_token_ids = stop_token_ids
        self.version = -1
        self._num_scores = 0
        self._resumed = asyncio.Event()
        self._resumed.set()

    @classmethod
    async def start(cls, spec: WorkerSpec, stop_token_ids: list[int]) -> "LLMProxy":
        """Start the engine, with weights that mean nothing until the first update.

        Raises ValueError if this vLLM cannot stamp versions exactly under the chosen `on_update`.
        """
        from vllm import AsyncEngineArgs
        from vllm.outputs import CompletionOutput
        from vllm.v1.engine.async_llm import AsyncLLM

        fields = {field.name for field in dataclasses.fields(CompletionOutput)}
        if "weight_versions" not in fields and spec.config.on_update != "wait":
            raise ValueError(
                f"--on-update {spec.config.on_update} needs token versions from the engine, and this vLLM does not "
                "report them; use vllm 0.32 or later, or --on-update wait"
            )
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_options(spec)))
        return cls(spec.config, engine, stop_token_ids)

    async def connect(self, init_info: dict) -> None:
        """Connect the engine to the trainer's weight transport."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def generate(self, request_id: str, prompt_tokens: tuple[int, ...], seed: int) -> Completion:
        """Sample one response."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=self.config.temperature,
            top_p=self.config.top_p,
            max_tokens=self.config.max_response_tokens,
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stop_token_ids=self.stop_token_ids,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        await self._resumed.wait()  # else it would be stamped and salted with the version that is going
        # The salt keeps a prefix that was computed under other weights out of reach, without emptying the cache.
        prompt = {"prompt_token_ids": list(prompt_tokens), "cache_salt": str(self.version)}
        version = self.version
        async for output in self.engine.generate(prompt, params, request_id):
            if output.finished:
                return _completion(output.outputs[0], version)
        raise RuntimeError(f"request {request_id} ended without an output")

    async def score(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Log-probs of tokens 1 … T − 1 given those before, at temperature 1. Returns [T − 1] float32, nats."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        self._num_scores += 1
        async for output in self.engine.generate(
            {"prompt_token_ids": list(tokens)}, params, f"score-{self._num_scores}"
        ):
            if output.finished:
                pairs = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
                return np.array([position[token].logprob for position, token in pairs], dtype=np.float32)
        raise RuntimeError("a score request ended without an output")

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; each returns what it has, with finish reason `aborted`."""
        await self.engine.abort(request_ids)

    async def suspend(self) -> None:
        """Stop sampling, as `on_update` says: requests freeze, or run to their end first; new ones queue."""
        self._resumed.clear()
        # The engine core is asked directly: AsyncLLM.pause_generation sleeps another 20 ms while all stand still.
        mode = "wait" if self.config.on_update == "wait" else "keep"
        await self.engine.engine_core.pause_scheduler_async(
            mode=mode,
            clear_cache=self.config.on_update != "keep",
        )

    async def resume(self) -> None:
        """Go on sampling."""
        await self.engine.resume_generation()
        self._resumed.set()

    async def update(self, version: int, update_infos: list[dict]) -> float:
        """Load new weights. Returns the pause seen by generation, seconds.

        Raises TimeoutError if it takes longer than the rollout timeout.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with asyncio.timeout(self.config.rollout_timeout_s):
            if self.config.on_update == "wait":
                await self.suspend()
            start = time.monotonic()
            if self.config.on_update != "wait":
                await self.suspend()
            await self.engine.start_weight_update()
            for update_info in update_infos:
                await self.engine.update_weights(WeightTransferUpdateRequest(update_info=update_info))
            await self.engine.finish_weight_update(str(version))
            self.version = version
            await self.resume()
        return time.monotonic() - start

    def shutdown(self) -> None:
        """End the engine process."""
        self.engine.shutdown()


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


def engine_options(spec: WorkerSpec) -> dict:
    """vLLM's engine arguments for a worker."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    config, on_cpu = spec.config, spec.placement.gpu is None
    options = {
        "model": spec.model_path,
        "skip_tokenizer_init": True,
        "load_format": "dummy",  # all weights come by the transport, so one that it misses is seen at once
        "dtype": "float32" if on_cpu else "bfloat16",
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": config.max_running_requests,
        "seed": config.seed,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": spec.transport},
        "worker_extension_cls": "engine_extension.EngineExtension",
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
    return options | {"gpu_memory_utilization": spec.placement.gpu_memory_utilization}


class RolloutWorker:
    """Serves one controller over one connection until it says stop."""

    def __init__(self, spec: WorkerSpec, connection: Connection):
        self.spec, self.config, self.connection = spec, spec.config, connection
        self.tokenizer = load_tokenizer(spec.model_path)
        self._outbox: list[Trajectory] = []
        self._tasks: set[asyncio.Task] = set()
        self._probing: asyncio.Task | None = None

    async def serve(self) -> None:
        """Start the engine, then act on messages in their order."""
        start = time.monotonic()
        self.rewards = RewardPool(self.config.task, self.config.reward_timeout_s)
        self.proxy = await LLMProxy.start(self.spec, stop_token_ids(self.spec.model_path, self.tokenizer))
        inbox = self._start_reading()
        self.connection.send(Ready(time.monotonic() - start))
        try:
            await self._act_on_messages(inbox)
        finally:
            self.proxy.shutdown()
            self.rewards.close()

    async def _act_on_messages(self, inbox: asyncio.Queue) -> None:
        while True:
            message = await inbox.get()
            match message:
                case Tickets(tickets):
                    for ticket in tickets:
                        self._start(self.run_ticket(ticket))
                case Connect(init_info):
                    await self.proxy.connect(init_info)
                case Update():
                    await self.update(message)
                case Abort(ticket_ids):
                    await self.proxy.abort([str(ticket_id) for ticket_id in ticket_ids])
                case Stop():
                    return
                case BaseException():
                    raise message

    def _start_reading(self) -> asyncio.Queue:
        """Read the connection in a thread, so that the controller's sends never fill the pipe."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue()

        def read() -> None:
            while True:
                try:
                    message = self.connection.recv()
                except (EOFError, OSError):
                    os._exit(1)  # the controller is gone, and nobody is left to tell
                loop.call_soon_threadsafe(inbox.put_nowait, message)

        threading.Thread(target=read, name="read-controller", daemon=True).start()
        self._fail = lambda error: inbox.put_nowait(error)
        return inbox

    def _start(self, coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    async def run_ticket(self, ticket: Ticket) -> None:
        """Generate, score, send back: the whole life of one single-turn trajectory."""
        if self.proxy.version < ticket.min_version:
            raise RuntimeError(
                f"ticket {ticket.ticket_id} needs version {ticket.min_version}, got {self.proxy.version}"
            )
        started_at = time.time()
        completion = await self.proxy.generate(str(ticket.ticket_id), ticket.prompt_tokens, ticket.seed)
        reward, finish_reason, failure = float("nan"), completion.finish_reason, ""
        if finish_reason != "aborted":
            response = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
            try:
                reward = await self.rewards.score(ticket.answer, response)
            except RewardError as error:
                finish_reason, failure = "failed", str(error)
        trajectory = make_trajectory(
            ticket, completion, reward, finish_reason, failure, started_at, self.spec.placement.worker
        )
        check_trajectory(trajectory)
        self._send(trajectory)

    def _send(self, trajectory: Trajectory) -> None:
        """Send with all others that end in this turn of the event loop: one message instead of many."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(trajectory)

    def _flush(self) -> None:
        trajectories, self._outbox = self._outbox, []
        self.connection.send(Finished(trajectories))

    async def update(self, update: Update) -> None:
        """Load new weights and report; the probe is scored while sampling goes on, and before the next update."""
        if self._probing is not None:
            await self._probing
        pause_s = await self.proxy.update(update.version, update.update_infos)
        self.connection.send(Updated(update.version, pause_s))
        self._probing = asyncio.create_task(self._score_probe(update)) if update.probe else None

    async def _score_probe(self, update: Update) -> None:
        scores = await asyncio.gather(*(self.proxy.score(tokens) for tokens in update.probe))
        self.connection.send(Probed(update.version, tuple(scores)))


def make_trajectory(
    ticket: Ticket,
    completion: Completion,
    reward: float,
    finish_reason: FinishReason,
    failure: str,
    started_at: float,
    worker: int,
) -> Trajectory:
    """Put prompt and response together; prompt positions are off the loss mask."""
    prompt_length, length = len(ticket.prompt_tokens), len(ticket.prompt_tokens) + len(completion.tokens)
    behavior_logprobs = np.zeros(length, dtype=np.float32)
    behavior_logprobs[prompt_length:] = completion.logprobs
    policy_versions = np.full(length, -1, dtype=np.int32)
    policy_versions[prompt_length:] = completion.versions
    return Trajectory(
        ticket_id=ticket.ticket_id,
        group_id=ticket.group_id,
        member=ticket.member,
        tokens=np.array([*ticket.prompt_tokens, *completion.tokens], dtype=np.int64),
        loss_mask=np.arange(length) >= prompt_length,
        behavior_logprobs=behavior_logprobs,
        policy_versions=policy_versions,
        reward=reward,
        finish_reason=finish_reason,
        failure=failure,
        num_turns=1,
        started_at=started_at,
        ended_at=time.time(),
        worker=worker,
    )


def load_tokenizer(model_path: str):
    """The tokenizer of a model directory or hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def stop_token_ids(model_path: str, tokenizer) -> list[int]:
    """Tokens that end a response: the tokenizer's end of sequence and those of the model's generation config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # a model without generation_config.json
        configured = None
    ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(ids - {None})


def run_worker(spec: WorkerSpec, connection: Connection) -> None:
    """Entry point of the worker process. Everything it and its engine print goes to the log."""
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.setsid()  # out of the terminal's reach, so that Ctrl-C goes to the trainer alone; and one group to kill
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    exit_with_parent()
    environment = without_torchrun(dict(os.environ)) | worker_environment(spec.placement)
    os.environ.clear()
    os.environ.update(environment)
    asyncio.run(RolloutWorker(spec, connection).serve())


def worker_environment(placement: WorkerPlacement) -> dict[str, str]:
    """Environment that vLLM reads at import: device, threads, no telemetry."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # CUDA IPC handles, from our own trainer over a local pipe
        "TOKENIZERS_PARALLELISM": "false",
    }
    if placement.gpu is None:
        # No binding: with the default, every engine of a machine binds to the same cores.
        return environment | {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(placement.cpu_threads),
            "CUDA_VISIBLE_DEVICES": "",
        }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(placement.gpu + 1)]
    return environment | {"CUDA_VISIBLE_DEVICES": devices[placement.gpu]}
