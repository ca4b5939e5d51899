"""A worker's process without a controller, for parts.py: the rollout worker, or its engine and nothing else."""

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cluster.placement import WorkerPlacement, WorkerSpec
from cluster.processes import freeze_garbage, kill_session
from config import Config
from controller.tickets import PromptSource, TicketSource
from data.messages import Connect, Finished, Ready, Stop, Tickets, Update
from data.records import Ticket
from data.tasks import load_task
from engine.environments import Environments
from rollout import RolloutWorker, run_worker
from scripts.bench.rig import Weights, specs_of
from scripts.bench.work import SimulatedRewards, start_proxy, work_of
from weights.models import load_tokenizer, stop_token_ids
from weights.shm import ShmTransport

TIMEOUT_S = 300.0


class PlainWorker(RolloutWorker):
    """AsyncLLM and nothing else: all requests at once, by the same parameters, and only their tokens are counted."""

    @classmethod
    async def start(cls, spec: WorkerSpec, connection) -> "PlainWorker":
        """Start the engine, and say so."""
        proxy = await start_proxy(spec, stop_token_ids(spec.model_path, load_tokenizer(spec.model_path)))
        freeze_garbage()
        connection.send(Ready(0.0))
        return cls(spec, connection, proxy, Environments(SimulatedRewards(spec.config, None, {}).make_environment))

    def _start_tickets(self, tickets: list[Ticket]) -> None:
        self._start(self._count_tokens(tickets))

    async def _count_tokens(self, tickets: list[Ticket]) -> None:
        self.connection.send(sum(await asyncio.gather(*map(self._sample, tickets))))

    async def _sample(self, ticket: Ticket) -> int:
        from vllm.inputs import tokens_input

        work = work_of(self.config.max_response_tokens)
        tokens = work.length(ticket.seed) if work.forced else work.max_response_tokens
        params, prompt = self.proxy.sampling_params(ticket.seed, tokens, 1), tokens_input(list(ticket.prompt_tokens))
        outputs = [output async for output in self.proxy.engine.generate(prompt, params, str(ticket.ticket_id))]
        return len(outputs[-1].outputs[0].token_ids)


class Worker:
    """A worker's process, without a controller."""

    def __init__(self, spec: WorkerSpec, start: Callable):
        """`start` is run_worker's."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run_worker, args=(spec, theirs, start))
        self.process.start()
        theirs.close()  # so that the pipe reads as closed as soon as the worker is gone
        self.log = spec.log_path

    def receive(self):
        """The next message. Raises RuntimeError if the process has ended, or says nothing for TIMEOUT_S."""
        with contextlib.suppress(EOFError):
            if self.pipe.poll(TIMEOUT_S):
                return self.pipe.recv()
        raise RuntimeError(f"a worker ended, or said nothing for {TIMEOUT_S:g} s; its log is {self.log}")

    def connect(self, weights: Weights) -> None:
        """Give the engine its first weights, when it is up."""
        self.transport = ShmTransport(specs_of(weights))
        self.receive()
        self.pipe.send(Connect(self.transport.init_info()))
        staged = self.transport.stage(0, weights)
        self.pipe.send(Update(0, staged.messages, ()))
        self.receive()
        self.transport.announce(staged)

    def sample(self, tickets: list[Ticket]) -> float:
        """Run tickets to their end. Returns tokens per second."""
        start = time.monotonic()
        self.pipe.send(Tickets(tickets))
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
def worker(start: Callable, config: Config, path: str, weights: Weights, logs: Path) -> Iterator[Worker]:
    """A connected worker, for a `start` of run_worker and the model at a path; nothing of it is left afterwards."""
    log = logs / f"worker-{len(list(logs.iterdir()))}.log"
    made = Worker(WorkerSpec(config, WorkerPlacement(0, None, None, 1, 0.0), path, "shm", str(log)), start)
    try:
        made.connect(weights)
        yield made
        made.pipe.send(Stop())
        made.process.join(10.0)
    finally:
        kill_session(made.process.pid)
        made.process.join()


def make_tickets(config: Config, model_path: str, count: int) -> list[Ticket]:
    """The first tickets that a run would send, all of them runnable at version 0."""
    task, tokenizer = load_task(config.task, config.seed), load_tokenizer(model_path)
    source = TicketSource(config, PromptSource(task.train_problem, [], lambda p: task.encode_prompt(p, tokenizer)))
    groups = -(-count // config.group_size)
    return [ticket for _ in range(groups) for ticket in source.for_group(source.next_group_id(), 0)][:count]
