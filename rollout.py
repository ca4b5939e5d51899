"""The rollout worker process: one engine, and one coroutine per trajectory.

A worker reads messages from the controller in order, so a ticket sent after an update is sampled under it. Tickets run
at the same time and independently: each is generated, stepped or scored as soon as its turn ends, and sent back;
nothing waits for a batch, unless a baseline asks for a barrier.
"""

import asyncio
import faulthandler
import functools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from setproctitle import setproctitle

from cluster.placement import WorkerSpec
from cluster.processes import exit_with_parent, freeze_garbage, without_torchrun
from data.environments import make_environment
from data.messages import (
    Abort,
    Asleep,
    Connect,
    Finished,
    Hold,
    Probed,
    Proceed,
    Ready,
    Receiving,
    Sleep,
    Stop,
    Stopped,
    Suspend,
    Tickets,
    Update,
    Updated,
    Waiting,
)
from data.models import load_tokenizer, stop_token_ids
from data.records import Ticket, Trajectory
from engine.environments import Environment, EnvironmentPool, MultiTurn, SingleTurn
from engine.episode import EnvManager
from engine.proxy import LLMProxy
from engine.reward_pool import RewardPool
from engine.vllm_setup import worker_environment


class Barrier:
    """Where tickets wait for all others, on all workers; the controller says when all are there."""

    def __init__(self, report: Callable[[int], None]):
        self._report = report
        self._opened = asyncio.Event()

    async def wait(self, ticket_id: int) -> None:
        """Report the ticket and wait."""
        opened = self._opened
        self._report(ticket_id)
        await opened.wait()

    def open(self) -> None:
        """Let all go on that wait now."""
        self._opened.set()
        self._opened = asyncio.Event()


class RolloutWorker:
    """Serves one controller over one connection until it says stop."""

    def __init__(self, spec: WorkerSpec, connection: Connection):
        self.spec, self.config, self.connection = spec, spec.config, connection
        self.tokenizer = load_tokenizer(spec.model_path)
        self._finished: list[Trajectory] = []
        self._waiting: list[int] = []
        self._barrier = Barrier(self._report_waiting)
        self._managers: dict[int, list[EnvManager]] = {}  # ticket -> its trajectories
        self._tasks: set[asyncio.Task] = set()
        self._probing: asyncio.Task | None = None

    async def serve(self) -> None:
        """Start the engine, then act on messages in their order."""
        start = time.monotonic()
        self.start_environments()
        self.proxy = await self.start_proxy()
        self.start_rewards()  # now that vLLM has forked its engine: a process with threads should not be forked
        inbox = self._start_reading()
        freeze_garbage()
        self.connection.send(Ready(time.monotonic() - start))
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._start(self.proxy.watch())
            self._start(self._act_on_messages(inbox))
            await self._ended  # the first task to fail ends the worker at once, whatever the others wait for
        finally:
            self.proxy.shutdown()
            if self.rewards is not None:
                self.rewards.close()

    def start_environments(self) -> None:
        """Prepare what answers the policy in tasks of several turns."""
        self.environments = None
        if self.config.is_multi_turn:
            make = functools.partial(make_environment, self.config.task)
            self.environments = EnvironmentPool(make, self.tokenizer, self.config.env_timeout_s)

    async def start_proxy(self) -> LLMProxy:
        """Start the engine."""
        ends = stop_token_ids(self.spec.model_path, self.tokenizer)
        if self.environments is not None:
            ends = sorted({*ends, self.environments.conversation.end_of_turn})
        return await LLMProxy.start(self.spec, ends)

    def start_rewards(self) -> None:
        """Start the processes that score single turns."""
        title = f"rewards {self.spec.placement.worker}"
        of_task = self.config.task, self.config.env_timeout_s
        self.rewards = None if self.config.is_multi_turn else RewardPool(*of_task, title=title)

    async def _act_on_messages(self, inbox: asyncio.Queue) -> None:
        while not self._ended.done():
            match await inbox.get():
                case Tickets(tickets):
                    self.proxy.activity.add(trajectories=sum(ticket.num_members for ticket in tickets))
                    for ticket in tickets:
                        self._start(self.run_ticket(ticket))
                case Hold(reason):
                    self.proxy.activity.hold(reason)
                case Connect(init_info):
                    await self.proxy.connect(init_info)
                case Update() as update:
                    await self.update(update)
                case Suspend():
                    await self._finish_probing()  # frozen, it could not end, and the update waits for it
                    self.proxy.activity.stand("suspended")
                    await self.proxy.suspend()
                case Sleep():
                    await self._finish_probing()
                    self.proxy.activity.stand("suspended")
                    await self.proxy.sleep()
                    self.connection.send(Asleep())
                case Proceed():
                    self._barrier.open()
                case Abort(ticket_ids):
                    await self.abort(ticket_ids)
                case Stop():
                    self.connection.send(Stopped(self.proxy.activity.report()))
                    self._ended.set_result(None)

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
        return inbox

    def _start(self, coroutine) -> asyncio.Task:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._ended.done():
            self._ended.set_exception(self.proxy.death or task.exception())

    async def run_ticket(self, ticket: Ticket) -> None:
        """Run the trajectories of a ticket and send them back: one, or a whole group."""
        if self.proxy.version < ticket.min_version:
            raise RuntimeError(
                f"ticket {ticket.ticket_id} needs version {ticket.min_version}, got {self.proxy.version}"
            )
        managers = self._managers[ticket.ticket_id] = self._make_managers(ticket)
        worker = self.spec.placement.worker
        try:
            if len(managers) == 1:
                trajectories = [await managers[0].run(worker)]
            else:
                trajectories = list(await asyncio.gather(*(manager.run(worker) for manager in managers)))
        finally:
            del self._managers[ticket.ticket_id]
            self.proxy.activity.add(trajectories=-ticket.num_members)
        self._flush_soon()
        self._finished += trajectories

    def _make_managers(self, ticket: Ticket) -> list[EnvManager]:
        members = range(ticket.member, ticket.member + ticket.num_members)
        generates = [self.proxy.generate] if len(members) == 1 else self._share_request(ticket)
        wait_before_turn, wait_before_step = self._barriers(ticket)
        return [
            EnvManager(
                self.config,
                ticket,
                member,
                self.make_environment(ticket, member),
                generate,
                wait_before_turn,
                wait_before_step,
            )
            for member, generate in zip(members, generates, strict=True)
        ]

    def _share_request(self, ticket: Ticket) -> list[Callable]:
        """One `generate` per member; all of them wait for the same request."""
        shared = asyncio.ensure_future(
            self.proxy.generate_group(f"{ticket.ticket_id}.0", ticket.prompt_tokens, ticket.seed, ticket.num_members)
        )

        async def generate(index: int, *_):
            return (await shared)[index]

        return [functools.partial(generate, index) for index in range(ticket.num_members)]

    def _barriers(self, ticket: Ticket) -> tuple[Callable, Callable]:
        """What a trajectory waits for before each turn and before each step; evaluation waits for nothing."""
        barrier = functools.partial(self._wait_at_barrier, ticket.ticket_id)
        is_evaluation = ticket.is_evaluation
        return (
            barrier if self.config.scheduling == "lockstep" and not is_evaluation else _go_on,
            barrier if self.config.scheduling == "batch" and not is_evaluation else _go_on,
        )

    async def _wait_at_barrier(self, ticket_id: int) -> None:
        self.proxy.activity.add(at_barrier=1)
        try:
            await self._barrier.wait(ticket_id)
        finally:
            self.proxy.activity.add(at_barrier=-1)

    def make_environment(self, ticket: Ticket, member: int) -> Environment:
        """What answers the policy in a trajectory."""
        if ticket.environment_seed is None:
            return SingleTurn(ticket, self.tokenizer, self.rewards)
        return MultiTurn(self.environments, ticket.environment_seed)

    async def abort(self, ticket_ids: list[int]) -> None:
        """End these tickets' trajectories; they come back as `aborted`. Those that have ended are passed over."""
        managers = [manager for ticket_id in ticket_ids for manager in self._managers.get(ticket_id, ())]
        sampling = {manager.request_id for manager in managers if manager.request_id is not None}
        for manager in managers:
            manager.abort()
        await self.proxy.abort(list(sampling))

    def _report_waiting(self, ticket_id: int) -> None:
        self._flush_soon()
        self._waiting.append(ticket_id)

    def _flush_soon(self) -> None:
        """Send all that ends or comes to the barrier in this turn of the event loop by one message instead of many."""
        if not (self._finished or self._waiting):
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        finished, self._finished = self._finished, []
        waiting, self._waiting = self._waiting, []
        if finished:
            self.connection.send(Finished(finished, self.proxy.activity.report_if_due()))
        if waiting:
            self.connection.send(Waiting(waiting))

    async def update(self, update: Update) -> None:
        """Load new weights and report; the probe is scored while sampling goes on, and before the next update."""
        await self._finish_probing()
        is_sent = self.spec.transport == "nccl"  # by the others an engine reads by itself
        receiving = functools.partial(self.connection.send, Receiving()) if is_sent else None
        pause_s = await self.proxy.update(update.version, update.update_infos, receiving)
        self.connection.send(Updated(update.version, pause_s, self.proxy.take_sampled(), self.proxy.activity.report()))
        self._probing = self._start(self._score_probe(update)) if update.probe else None

    async def _finish_probing(self) -> None:
        if self._probing is not None:
            await self._probing

    async def _score_probe(self, update: Update) -> None:
        scores = await asyncio.gather(*(self.proxy.score(tokens) for tokens in update.probe))
        self.connection.send(Probed(update.version, tuple(scores)))


async def _go_on() -> None:
    """No barrier."""


def run_worker(spec: WorkerSpec, connection: Connection, kind: type[RolloutWorker] = RolloutWorker) -> None:
    """Entry point of the worker process. Everything it and its engine print goes to the log."""
    log = os.open(spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.setsid()  # out of the terminal's reach, so that Ctrl-C goes to the trainer alone; and one group to kill
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    exit_with_parent()
    setproctitle(f"rollout {spec.placement.worker}")
    # An engine that vLLM forks must not hold the pipe open, by whose end the controller knows that this process died.
    os.register_at_fork(after_in_child=connection.close)
    environment = without_torchrun(dict(os.environ)) | worker_environment(spec.placement)
    if spec.sockets_path is not None:  # a folder that goes with the run, and with it what vLLM leaves there
        environment |= {"VLLM_RPC_BASE_PATH": spec.sockets_path, "TMPDIR": spec.sockets_path}
        compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)  # torch's too is temporary, and worth keeping
        tempfile.tempdir = spec.sockets_path
    os.environ.clear()
    os.environ.update(environment)
    asyncio.run(kind(spec, connection).serve())
    sys.stdout.flush()
    os._exit(0)  # Python takes seconds to tidy up after vLLM's modules
