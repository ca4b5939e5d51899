"""The rollout worker process: one engine, and one coroutine per trajectory.

A worker acts on the controller's messages in order, so a ticket sent after an update is sampled under it. Trajectories
run concurrently. Each is scored as soon as it ends. It is sent back when its ticket has ended, without waiting for a
batch.
"""

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from asyncrl import extras
from asyncrl.cluster.placement import WorkerSpec
from asyncrl.cluster.processes import end_session, freeze_garbage
from asyncrl.cluster.streams import keep_printing
from asyncrl.cluster.worker_process import end_safe_path
from asyncrl.engine.environments import Environments, start_environments
from asyncrl.engine.episode import Episode
from asyncrl.engine.in_flight import read_in_flight, settle
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.vllm_setup import set_up_process
from asyncrl.messages import (
    Abort,
    Asleep,
    Connect,
    Finished,
    Idle,
    LoadWeights,
    Probed,
    Ready,
    Receiving,
    ReportProgress,
    Sleep,
    Stop,
    Stopped,
    Suspend,
    Tickets,
    WeightsLoaded,
    decoded_lengths,
)
from asyncrl.plugins import last_given
from asyncrl.records import Ticket, Trajectory
from asyncrl.weights.models import load_tokenizer
from asyncrl.weights.stop_tokens import stop_token_ids

FLUSH_S = 0.005
"""Longest time that a trajectory waits for the next ones. Each message takes time of the trainer's core."""


class RolloutWorker:
    """Serves one controller over one connection until it gets Stop."""

    def __init__(
        self, spec: WorkerSpec, connection: Connection, proxy: LLMProxy, environments: Environments
    ):
        """Make a worker, in the event loop of the engine's start."""
        self.spec, self.config, self.connection = spec, spec.config, connection
        self.proxy, self.environments = proxy, environments
        self._ended = asyncio.get_running_loop().create_future()
        self._inbox: asyncio.Queue = asyncio.Queue()
        self._tasks: set[asyncio.Task] = set()
        self._episodes: dict[int, list[Episode]] = {}
        """Running episodes by ticket id."""
        self._finished: list[Trajectory] = []
        self._flush_timer: asyncio.TimerHandle | None = None
        self._probe_tasks: list[asyncio.Task] = []

    async def act(self, message) -> None:
        match message:
            case Tickets(tickets):
                self._start_tickets(tickets)
            case Connect(init_info):
                await self.proxy.connect(init_info)
            case LoadWeights():
                await self._load_weights(message)
            case Abort(ticket_ids):
                await self._abort(ticket_ids)
            case Suspend():
                await self._suspend(self.proxy.suspend)
            case Idle(reason):
                self.proxy.activity.set_idle(reason)
            case Sleep():
                await self._suspend(self.proxy.sleep)
                self.send(Asleep())
            case Stop():
                self.send(Stopped(self.proxy.activity.report()))
                self._ended.set_result(None)
            case _:
                raise RuntimeError(f"the controller sent an unknown message: {message!r}")

    async def serve(self) -> None:
        """Act on messages until Stop or a failure. Then end the engine and the environments."""
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=self._read, args=(loop,), name="read-controller", daemon=True
        ).start()
        try:
            self.start(self.proxy.watch())
            self.start(self._act_on_messages())
            # the first task that fails ends the worker at once
            await self._ended
        finally:
            self.proxy.shutdown()
            self.environments.close()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read all messages, in a thread, so that the controller's messages never fill the pipe."""
        while True:
            try:
                message = self.connection.recv()
            except (EOFError, OSError):
                end_session()  # the controller is gone
            except Exception as error:  # it cannot be unpickled: the controller has other code
                loop.call_soon_threadsafe(self._ended.set_exception, error)
                return
            loop.call_soon_threadsafe(self._receive, message)

    def _receive(self, message) -> None:
        if isinstance(message, ReportProgress):
            # At once: an update before it may wait for responses to end, and the trainer waits for the answer.
            self.start(self._report_in_flight())
            return
        if isinstance(message, Abort):
            # At once, too: an update before it may wait for these very responses. The message also keeps its
            # place, because tickets before it may not have started.
            self.start(self._abort(message.ticket_ids))
        self._inbox.put_nowait(message)

    async def _act_on_messages(self) -> None:
        while True:
            await self.act(await self._inbox.get())

    def _start_tickets(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:  # registered now, because the next message may abort them
            self.proxy.activity.add(trajectories=ticket.num_members)
            self._episodes[ticket.ticket_id] = self.make_episodes(ticket)
            self.start(self._run_ticket(ticket))

    async def _run_ticket(self, ticket: Ticket) -> None:
        """Run the episodes of a ticket, and send their trajectories back together."""
        episodes, worker = self._episodes[ticket.ticket_id], self.spec.placement.worker
        try:
            trajectories = await asyncio.gather(*(episode.run(worker) for episode in episodes))
        finally:
            del self._episodes[ticket.ticket_id]
            self.proxy.activity.add(trajectories=-ticket.num_members)
        self._finished += trajectories
        self.flush_soon()

    def make_episodes(self, ticket: Ticket) -> list[Episode]:
        """Return the episodes of a ticket: one. Plugins can return more."""
        environment = self.environments.make_environment(ticket, ticket.member)
        return [
            Episode(
                self.config,
                ticket,
                ticket.member,
                environment=environment,
                generate=self.proxy.generate,
            )
        ]

    async def _load_weights(self, message: LoadWeights) -> None:
        """Load new weights and report. The probe is scored while sampling continues, and before the next update."""
        await asyncio.gather(*self._probe_tasks)
        receiving = None
        if self.spec.transport == "nccl":  # with other transports the engine reads the weights
            receiving = functools.partial(self.send, Receiving())
        pause_s = await self.proxy.load_weights(message.version, message.update_infos, receiving)
        self.send(
            WeightsLoaded(
                message.version, pause_s, self.proxy.take_sampled(), self.proxy.activity.report()
            )
        )
        self._probe_tasks = [self.start(self._score_probe(message))] if message.probe else []

    async def _score_probe(self, message: LoadWeights) -> None:
        scores = await asyncio.gather(*map(self.proxy.score, message.probe))
        lengths = decoded_lengths(message.probe)
        # Decoding, too: CUDA graphs might keep old weights, and prompts do not use these graphs.
        decoded = await asyncio.gather(*map(self.proxy.decode, message.probe, lengths))
        self.send(Probed(message.version, tuple(scores), tuple(decoded)))

    async def _abort(self, ticket_ids: list[int]) -> None:
        """End these tickets' running trajectories. They are sent back as `aborted`."""
        request_ids = set()
        for ticket_id in ticket_ids:
            for episode in self._episodes.get(ticket_id, ()):
                request_ids |= episode.request_ids
                episode.abort()
        await self.proxy.abort(request_ids)

    async def _suspend(self, suspend: Callable) -> None:
        """Stop sampling by `proxy.suspend` or `proxy.sleep`."""
        # the next update waits for the probe, and the probe could not end while sampling is stopped
        await asyncio.gather(*self._probe_tasks)
        self.proxy.activity.pause("suspended")
        await suspend()

    async def _report_in_flight(self) -> None:
        await settle(self.proxy)
        self.send(read_in_flight(self.proxy, self._episodes))

    def send(self, message) -> None:
        """Send a message, after all trajectories that have ended before it."""
        self.flush()
        self.connection.send(message)

    def flush_soon(self) -> None:
        """Send all trajectories that end within FLUSH_S by one message. The last running one does not wait."""
        loop = asyncio.get_running_loop()
        if not self._episodes:
            loop.call_soon(self.flush)
        elif self._flush_timer is None:
            self._flush_timer = loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        finished, self._finished = self._finished, []
        if finished:
            self.connection.send(Finished(finished, self.proxy.activity.report()))

    def start(self, coroutine) -> asyncio.Task:
        """Start a task. The first task that fails ends the worker."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._ended.done():
            # the error may only be a consequence of a dead engine
            print(f"ended by {task.exception()!r}", flush=True)
            self._ended.set_exception(self.proxy.death or task.exception())


async def start_worker(
    spec: WorkerSpec,
    connection: Connection,
    start_proxy=LLMProxy.start,
    start_environments=start_environments,
) -> RolloutWorker:
    """Start the parts of a worker, report that they are up, and return the worker.

    Tests replace the proxy, whose start is awaited, and studies the environments.
    """
    tokenizer = load_tokenizer(spec.model_path)
    start = time.monotonic()
    proxy = await start_proxy(spec, stop_token_ids(spec.model_path, tokenizer))
    end_safe_path()
    plugins = spec.config.plugins
    worker_class = last_given((plugin.rollout_worker for plugin in plugins), RolloutWorker)
    # after the engine is forked, because environments may start threads
    environments = start_environments(spec, tokenizer)
    freeze_garbage()
    connection.send(Ready(time.monotonic() - start))
    return worker_class(spec, connection, proxy, environments)


def run_worker(spec: WorkerSpec, connection: Connection, start: Callable = start_worker) -> None:
    """Entry point of the worker process.

    `start(spec, connection)` is awaited and returns the worker. Then its `serve()` is awaited.
    """
    set_up_process(spec)
    # A forked engine must not keep the pipe open: its end tells the controller that this process died.
    os.register_at_fork(after_in_child=connection.close)
    with asyncio.Runner() as runner:
        worker = runner.run(start(spec, connection))
        runner.run(worker.serve())
    sys.stdout.flush()
    os._exit(0)  # a normal exit takes seconds with vLLM's modules


def main() -> None:
    """Sample for a run on another host: `python rollout.py --join HOST:PORT --key FILE`."""
    keep_printing()
    try:
        extras.load("--join").main(run_worker)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
