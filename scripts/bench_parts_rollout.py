"""Rollout and publishing for bench_parts.py: a rollout worker against the plain engine, weights against memcpy."""

import asyncio
import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cluster.placement import WorkerPlacement, WorkerSpec
from cluster.processes import freeze_garbage
from config import Config
from controller.tickets import PromptSource, TicketSource
from controller.worker_process import WorkerProcess
from data.messages import Connect, Finished, Ready, Stop, Tickets, Update, Updated
from data.models import load_tokenizer, resolve_model, stop_token_ids
from data.records import Ticket
from data.tasks import load_task
from data.tiny import VOCABULARY, build_tokenizer
from engine.proxy import LLMProxy
from rollout import run_worker
from scripts.bench_parts_report import PHASES
from scripts.bench_work import start_proxy, start_work_worker, work_of
from weights.shm import ShmTransport
from weights.transport import ParameterSpec

TIMEOUT_S = 300.0
LARGE_HIDDEN, LARGE_LAYERS = 512, 15


class PlainEngine:
    """AsyncLLM and nothing else: all requests at once, by the same parameters, and only their tokens are counted."""

    def __init__(self, spec: WorkerSpec, connection, proxy: LLMProxy):
        self.spec, self.connection, self.proxy = spec, connection, proxy

    @classmethod
    async def start(cls, spec: WorkerSpec, connection) -> "PlainEngine":
        """Start the engine, and say so."""
        proxy = await start_proxy(spec, stop_token_ids(spec.model_path, load_tokenizer(spec.model_path)))
        freeze_garbage()
        connection.send(Ready(0.0))
        return cls(spec, connection, proxy)

    async def serve(self) -> None:
        """Act on messages in their order."""
        try:
            while True:
                match await asyncio.to_thread(self.connection.recv):
                    case Connect(init_info):
                        await self.proxy.connect(init_info)
                    case Update() as update:
                        await self.update(update)
                    case Tickets(tickets):
                        self.connection.send(sum(await asyncio.gather(*map(self._sample, tickets))))
                    case Stop():
                        return
        finally:
            self.proxy.shutdown()

    async def update(self, update: Update) -> None:
        """Load new weights and report."""
        pause_s = await self.proxy.update(update.version, update.update_infos)
        self.connection.send(Updated(update.version, pause_s, self.proxy.take_sampled(), self.proxy.activity.report()))

    async def _sample(self, ticket: Ticket) -> int:
        from vllm.inputs import tokens_input

        work = work_of(self.spec.config.max_response_tokens)
        tokens = work.length(ticket.seed) if work.forced else work.max_response_tokens
        params = self.proxy.sampling_params(ticket.seed, tokens, 1)
        prompt = tokens_input(list(ticket.prompt_tokens))
        async for output in self.proxy.engine.generate(prompt, params, str(ticket.ticket_id)):
            if output.finished:
                return len(output.outputs[0].token_ids)
        raise RuntimeError(f"request {ticket.ticket_id} ended without an output")


class PhasedEngine(PlainEngine):
    """An engine that stands idle while each phase of an update is waited for and timed by itself."""

    async def update(self, update: Update) -> None:
        """Load new weights and report the seconds of each phase."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine, (update_info,) = self.proxy.engine, update.update_infos
        calls = (
            lambda: engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False),
            engine.start_weight_update,
            lambda: engine.update_weights(WeightTransferUpdateRequest(update_info=update_info)),
            engine.finish_weight_update,
            lambda: engine.update_weight_version(str(update.version)),
            engine.resume_generation,
        )
        seconds = {}
        for phase, call in zip(PHASES, calls, strict=True):
            start = time.perf_counter()
            await call()
            seconds[phase] = time.perf_counter() - start
        self.connection.send(seconds)


class Worker:
    """A worker process without a controller."""

    def __init__(self, config: Config, model_path: str, start: Callable, log: Path, threads: ThreadPoolExecutor):
        """`start` is run_worker's."""
        spec = WorkerSpec(config, WorkerPlacement(0, None, None, 1, 0.0), model_path, "shm", str(log))
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.process = WorkerProcess(spec, functools.partial(run_worker, start=start), self._inbox.put, threads)

    def receive(self):
        """The next message. Raises RuntimeError if the process has ended, queue.Empty after the timeout."""
        message = self._inbox.get(timeout=TIMEOUT_S)
        if message is None:
            raise RuntimeError(f"a worker ended: {self.process.death_report()}")
        return message

    def connect(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Give the engine its first weights, when it is up."""
        self.weights, self.version = weights, -1
        self.transport = ShmTransport([ParameterSpec(name, w.dtype, tuple(w.shape)) for name, w in weights])
        self.receive()
        self.process.send(Connect(self.transport.init_info()))
        self.publish()

    def publish(self) -> dict[str, float]:
        """Stage and transfer the weights. Returns seconds of each, and of what the worker reports: pause or phases."""
        self.version += 1
        start = time.monotonic()
        staged = self.transport.stage(self.version, self.weights)
        stage_s = time.monotonic() - start
        self.process.send(Update(self.version, staged.messages, ()))
        match self.receive():
            case Updated(pause_s=pause_s):
                reported = {"pause_s": pause_s}
            case dict(phases):
                reported = phases
        self.transport.announce(staged)
        return {"stage_s": stage_s, "publish_s": time.monotonic() - start, **reported}

    def sample(self, tickets: list[Ticket]) -> float:
        """Run tickets to their end. Returns tokens per second."""
        start = time.monotonic()
        self.process.send(Tickets(tickets))
        tokens = num_finished = 0
        while num_finished < len(tickets):
            match self.receive():
                case Finished(trajectories):
                    tokens += sum(trajectory.num_generated for trajectory in trajectories)
                    num_finished += len(trajectories)
                case int(count):
                    tokens, num_finished = count, len(tickets)
        return tokens / (time.monotonic() - start)


@contextlib.contextmanager
def workers(
    starts: dict[str, Callable], config: Config, model_path: str, weights: list, folder: Path
) -> Iterator[dict]:
    """A connected worker for each name and `start` of run_worker; none is left afterwards."""
    threads = ThreadPoolExecutor(2 * len(starts))
    made = {}
    try:
        for name, start in starts.items():
            log = folder / f"{name}-{config.max_response_tokens}-{Path(model_path).name}.log"
            made[name] = Worker(config, model_path, start, log, threads)
        for worker in made.values():
            worker.connect(weights)
        yield made
    finally:
        for worker in made.values():
            worker.process.send(Stop())
        for worker in made.values():
            worker.process.stop(10.0)
        threads.shutdown()


def make_tickets(config: Config, model_path: str, count: int) -> list[Ticket]:
    """The first tickets that a run would send, all of them runnable at version 0."""
    task, tokenizer = load_task(config.task, config.seed), load_tokenizer(model_path)
    source = TicketSource(config, PromptSource(task.train_problem, [], lambda p: task.encode_prompt(p, tokenizer)))
    groups = -(-count // config.group_size)
    return [ticket for _ in range(groups) for ticket in source.for_group(source.next_group_id(), 0)][:count]


def load_weights(model_path: str) -> list[tuple[str, torch.Tensor]]:
    """(name, float32 tensor) of every parameter of a checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def large_model(folder: Path) -> tuple[str, list[tuple[str, torch.Tensor]]]:
    """A Qwen3 of about 200 MB in float32 with random weights: its folder, without the weights, and these."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = folder / "large"
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(VOCABULARY),
            hidden_size=LARGE_HIDDEN,
            intermediate_size=3 * LARGE_HIDDEN,
            num_hidden_layers=LARGE_LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            dtype="float32",
            architectures=["Qwen3ForCausalLM"],
        )
    )
    model.config.save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path), [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def memcpy_bytes_per_s(num_bytes: int) -> float:
    """Bytes per second of one copy of `num_bytes` from memory to memory, both of which were touched before."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    target.copy_(source)
    start = time.perf_counter()
    target.copy_(source)
    return num_bytes / (time.perf_counter() - start)


def measure_rollout(config: Config, num_tickets: int, repeats: int, folder: Path) -> Iterator[tuple[float, float]]:
    """Tokens per second of a rollout worker and of the plain engine, in turn; the first round warms up."""
    model_path = resolve_model(config.model, config.task)
    tickets = make_tickets(config, model_path, num_tickets)
    starts = {"ours": start_work_worker, "plain": PlainEngine.start}
    with workers(starts, config, model_path, load_weights(model_path), folder) as made:
        for repeat in range(repeats + 1):
            order = ("ours", "plain") if repeat % 2 else ("plain", "ours")
            rates = {name: made[name].sample(tickets) for name in order}
            if repeat:
                yield rates["ours"], rates["plain"]


def measure_phases(config: Config, repeats: int, folder: Path) -> Iterator[dict[str, float]]:
    """Seconds of each phase of a weight update of the tiny model; the first two updates warm up."""
    model_path = resolve_model(config.model, config.task)
    with workers({"phased": PhasedEngine.start}, config, model_path, load_weights(model_path), folder) as made:
        made["phased"].publish()
        for _ in range(repeats):
            yield made["phased"].publish()


def measure_publish(config: Config, model_path: str, weights: list, repeats: int, folder: Path) -> Iterator[dict]:
    """Seconds of a publication, its stage and its pause; bytes, and the seconds that memcpy takes for them."""
    num_bytes = sum(weight.nbytes for _, weight in weights)
    with workers({"ours": start_work_worker}, config, model_path, weights, folder) as made:
        for repeat in range(repeats + 1):
            measured = made["ours"].publish()
            if repeat:
                yield {**measured, "bytes": num_bytes, "memcpy_s": num_bytes / memcpy_bytes_per_s(num_bytes)}
