"""Rollout workers on a virtual clock for the real Controller. They act on its messages as rollout.py's workers do.

Only the worker between two messages is simulated. The Controller decides on the worker of each ticket, the groups that
start or are dropped, and the trained batch. Its SampleBuffer and Dispatcher are the real ones, too.
"""

import contextlib
import functools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from asyncrl.config import Config
from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import (
    Abort,
    Finished,
    LoadWeights,
    SampledTokens,
    Suspend,
    Tickets,
    WeightsLoaded,
)
from asyncrl.records import FinishReason, Ticket, Trajectory
from extras.baselines import Proceed, Waiting
from extras.simulation.clock import Clock
from extras.simulation.engine import Cluster, Request, SimulatedEngine
from extras.simulation.workload import Workload, draws_of


@dataclass(frozen=True, kw_only=True)
class SimulatedTrajectory(Trajectory):
    """A trajectory without content. Its arrays have one entry for all tokens of a version, [S] instead of [T]."""

    part_tokens: tuple[int, ...] = ()
    """Tokens that each entry represents."""

    @property
    def num_generated(self) -> int:
        return sum(self.part_tokens)

    @property
    def oldest_version(self) -> int:
        return int(self.policy_versions[0])  # later entries have later versions


@dataclass(slots=True, eq=False)
class Episode:
    """A trajectory that is being sampled."""

    ticket: Ticket
    draws: random.Random
    """Random numbers of its environment."""
    started_at: float
    """Seconds."""
    request: Request | None = None
    parts: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, tokens), in order."""
    num_turns: int = 0
    is_over: bool = False


class SimulatedProcess:
    """Replaces the process of a worker. It acts on messages in their order."""

    exit_code = None

    def __init__(
        self,
        index: int,
        clock: Clock,
        config: Config,
        workload: Workload,
        cluster: Cluster,
        speed: float = 1.0,
    ):
        self.index, self.clock, self.config, self.workload = index, clock, config, workload
        self.engine = SimulatedEngine(clock, cluster.curve.scaled(speed))
        self.sync_s = cluster.sync_s
        self.reply: Callable[[object], None] = lambda message: None
        self._inbox: deque = deque()
        self._is_updating = False
        self._is_suspended = False
        self._episodes: dict[int, Episode] = {}  # by ticket
        self._at_barrier: list[Episode] = []

    def send(self, message) -> None:
        """Queue a message. It is read later, because the sender is in the middle of something."""
        self._inbox.append(message)
        self.clock.after(0.0, self._read)

    def _read(self) -> None:
        while self._inbox and not self._is_updating:
            self._act_on(self._inbox.popleft())

    def _act_on(self, message) -> None:
        match message:
            case Tickets(tickets):
                for ticket in tickets:
                    draws = draws_of(ticket.environment_seed, ticket)
                    episode = Episode(ticket, draws, self.clock.now)
                    self._episodes[ticket.ticket_id] = episode
                    self._wait_for_turn(episode)
            case LoadWeights():
                self._is_updating = True
                was_running = not self._is_suspended
                self.engine.freeze()
                self.clock.after(
                    self.sync_s, lambda: self._end_update(message.version, was_running)
                )
            case Suspend():
                self._is_suspended = True
                self.engine.freeze()
            case Proceed():
                waiting, self._at_barrier = self._at_barrier, []
                for episode in waiting:
                    self._begin_turn(episode)
            case Abort(ticket_ids):
                for ticket_id in ticket_ids:
                    self._abort(ticket_id)

    def _end_update(self, version: int, was_running: bool) -> None:
        self._is_updating = self._is_suspended = False
        self.engine.resume(version, recompute=self.config.on_update != "keep")
        self.reply(
            WeightsLoaded(version, self.sync_s if was_running else 0.0, SampledTokens(), None)
        )
        self._read()

    # A trajectory, from turn to turn

    def _wait_for_turn(self, episode: Episode) -> None:
        """Begin a turn now, or with `lockstep` when all environments have come to it."""
        if self.config.scheduling == "lockstep":
            self._at_barrier.append(episode)
            self.reply(Waiting([episode.ticket.ticket_id]))
        else:
            self._begin_turn(episode)

    def _begin_turn(self, episode: Episode) -> None:
        if episode.is_over:
            return
        # the prefix cache has the earlier turns
        prefill_tokens = self.workload.prompt_tokens if episode.num_turns == 0 else 0
        num_tokens = self.workload.turn_tokens(episode.ticket)
        episode.request = Request(num_tokens, prefill_tokens, lambda _: self._end_turn(episode))
        episode.num_turns += 1
        self.engine.add(episode.request)

    def _take_from_engine(self, episode: Episode, num_tokens: int) -> None:
        request, episode.request = episode.request, None
        episode.parts += self.engine.parts_between_updates(request, num_tokens)

    def _end_turn(self, episode: Episode) -> None:
        """Wait for the environment, if there is one."""
        self._take_from_engine(episode, episode.request.num_tokens)
        turns = self.workload.turns
        if turns is None:
            self.clock.after(0.0, lambda: self._end(episode, "stop"))
            return
        delay = turns.latency.draw(episode.draws)
        if delay.failure == "crash":
            self._end(episode, "failed")
        elif delay.failure == "hang" or delay.seconds > turns.timeout_s:
            self.clock.after(turns.timeout_s, lambda: self._end(episode, "failed"))
        elif episode.num_turns == turns.num_turns:
            self.clock.after(delay.seconds, lambda: self._end(episode, "stop"))
        else:
            self.clock.after(delay.seconds, lambda: self._wait_for_turn(episode))

    def _abort(self, ticket_id: int) -> None:
        episode = self._episodes.get(ticket_id)
        if episode is None:
            return
        if episode.request is not None:
            self._take_from_engine(episode, self.engine.remove(episode.request))
        self._end(episode, "aborted")

    def _end(self, episode: Episode, finish_reason: FinishReason) -> None:
        if episode.is_over:
            return
        episode.is_over = True
        del self._episodes[episode.ticket.ticket_id]
        self.reply(Finished([self._trajectory(episode, finish_reason)], None))

    def _trajectory(self, episode: Episode, finish_reason: FinishReason) -> SimulatedTrajectory:
        ticket, count = episode.ticket, len(episode.parts)
        has_reward = finish_reason == "stop"
        return SimulatedTrajectory(
            ticket_id=ticket.ticket_id,
            group_id=ticket.group_id,
            member=ticket.member,
            tokens=np.zeros(count, np.int64),
            loss_mask=np.ones(count, bool),
            behavior_logprobs=np.zeros(count, np.float32),
            policy_versions=np.array([version for version, _ in episode.parts], np.int32),
            reward=self.workload.reward(ticket) if has_reward else float("nan"),
            finish_reason=finish_reason,
            failure="simulated" if finish_reason == "failed" else "",
            num_turns=episode.num_turns,
            started_at=episode.started_at,
            ended_at=self.clock.now,
            worker=self.index,
            part_tokens=tuple(tokens for _, tokens in episode.parts),
        )


class SimulatedFleet:
    """Base of a kind of Workers that has no processes. Only workers of a swarm join and leave."""

    num_workers = 0

    def __init__(self, clock: Clock, config: Config, workload: Workload, cluster: Cluster):
        self.clock, self.message_s = clock, cluster.message_s
        self.num_workers = 0 if cluster.swarm else cluster.num_workers
        self.num_restarts = 0
        self.by_index = {}
        self.have_worked = False
        self.on_handled: Callable[[object], None] = lambda message: None
        """Called with each message after the controller has acted on it."""
        self.cpu_s = 0.0
        """CPU time of the real controller."""
        self.controller_busy_s = 0.0
        """Simulated time of the controller."""
        self._controller_free_at = 0.0
        for index in range(self.num_workers):
            process = SimulatedProcess(index, clock, config, workload, cluster)
            self.by_index[index] = Worker(index, process, state="sampling")

    def launch(self, on_message: Callable, _) -> None:
        """Send messages of workers to `on_message(worker, message)`, then to `on_handled(message)`."""
        self._on_message = on_message
        for worker in self:
            self.listen(worker)

    def listen(self, worker: Worker) -> None:
        """Send the messages of a worker to the controller."""
        worker.process.reply = functools.partial(self._deliver, worker)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the CPU time of the block as the controller's."""
        start = time.process_time()
        yield
        self.cpu_s += time.process_time() - start

    def check(self) -> None:
        """Return at once, because no background thread can have failed."""

    def _deliver(self, worker: Worker, message) -> None:
        count = len(message.trajectories) if isinstance(message, Finished) else 0
        self.controller_busy_s += self.message_s * count
        free_at = max(self._controller_free_at, self.clock.now)
        self._controller_free_at = free_at + self.message_s * count

        def handle() -> None:
            with self.timed():
                self._on_message(worker, message)
            self.on_handled(message)

        self.clock.at(self._controller_free_at, handle)


class SimulatedWorkers(SimulatedFleet, Workers):
    """Workers of one node."""
