"""Rollout workers on a virtual clock, for the real Controller: they act on its messages as rollout.py's workers do.

Only what a worker does between two messages is simulated. Which ticket goes where, which groups start, which are
dropped and which batch is given is the Controller's, and so are SampleBuffer and Dispatcher.
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
from asyncrl.messages import Abort, Finished, SampledTokens, Suspend, Tickets, Update, Updated
from asyncrl.records import FinishReason, Ticket, Trajectory
from extras.baselines import Proceed, Waiting
from extras.simulation.clock import Clock
from extras.simulation.engine import Cluster, Request, SimulatedEngine
from extras.simulation.workload import Workload, draws_of


@dataclass(frozen=True, kw_only=True)
class SimulatedTrajectory(Trajectory):
    """A trajectory without content: its arrays have one entry for all tokens of one version, [S] instead of [T]."""

    segment_tokens: tuple[int, ...] = ()
    """Tokens that each entry stands for."""
    slot_s: float = 0.0
    """Seconds that it held a slot of its engine."""

    @property
    def num_generated(self) -> int:
        return sum(self.segment_tokens)

    @property
    def oldest_version(self) -> int:
        return int(self.policy_versions[0])  # a later entry is of a later version


@dataclass(slots=True, eq=False)
class Episode:
    """A trajectory on its way."""

    ticket: Ticket
    member: int
    request: Request | None = None
    segments: list[tuple[int, int]] = field(default_factory=list)  # (policy version, tokens)
    num_turns: int = 0
    started_at: float = 0.0
    """Seconds."""
    slot_s: float = 0.0
    is_over: bool = False
    draws: random.Random | None = None

    def keep(self, parts: list[tuple[int, int]]) -> None:
        """Append what a turn has decoded."""
        for version, tokens in parts:
            if self.segments and self.segments[-1][0] == version:
                tokens += self.segments.pop()[1]
            self.segments.append((version, tokens))


class SimulatedProcess:
    """Stands where a worker's process does: messages are acted on in their order, one after the other."""

    exit_code = None

    def __init__(
        self,
        index: int,
        clock: Clock,
        config: Config,
        workload: Workload,
        engine: SimulatedEngine,
        sync_s: float,
    ):
        self.index, self.clock, self.config, self.workload = index, clock, config, workload
        self.engine, self.sync_s = engine, sync_s
        self.reply: Callable[[object], None] = lambda message: None
        self._inbox: deque = deque()
        self._is_updating = False
        self._is_suspended = False
        self._episodes: dict[int, list[Episode]] = {}  # by ticket
        # ticket of a whole group -> members that its request still samples
        self._generating: dict[int, int] = {}
        # trajectories of tickets that have not ended
        self._unfinished: dict[int, list[Trajectory]] = {}
        self._at_barrier: list[tuple[Episode, Callable[[Episode], None]]] = []
        self._rewards_free_at = 0.0

    def send(self, message) -> None:
        """Queue a message; never acts on it at once, as the sender is in the middle of something."""
        self._inbox.append(message)
        self.clock.after(0.0, self._read)

    def _read(self) -> None:
        while self._inbox and not self._is_updating:
            self._act_on(self._inbox.popleft())

    def _act_on(self, message) -> None:
        match message:
            case Tickets(tickets):
                for ticket in tickets:
                    self._start(ticket)
            case Update():
                self._is_updating = True
                was_running = not self._is_suspended
                self.engine.freeze()
                self.clock.after(self.sync_s, lambda: self._updated(message.version, was_running))
            case Suspend():
                self._is_suspended = True
                self.engine.freeze()
            case Proceed():
                waiting, self._at_barrier = self._at_barrier, []
                for episode, go_on in waiting:
                    go_on(episode)
            case Abort(ticket_ids):
                for ticket_id in ticket_ids:
                    self._abort(ticket_id)

    def _updated(self, version: int, was_running: bool) -> None:
        self._is_updating = self._is_suspended = False
        self.engine.resume(version, recompute=self.config.on_update != "keep")
        self.reply(Updated(version, self.sync_s if was_running else 0.0, SampledTokens(), None))
        self._read()

    # A trajectory, from turn to turn

    def _start(self, ticket: Ticket) -> None:
        members = range(ticket.member, ticket.member + ticket.num_members)
        episodes = self._episodes[ticket.ticket_id] = [
            Episode(ticket, member, started_at=self.clock.now) for member in members
        ]
        self._generating[ticket.ticket_id] = len(episodes)
        for episode in episodes:
            self._wait(self.config.scheduling == "lockstep", episode, self._begin_turn)

    def _wait(self, is_barrier: bool, episode: Episode, go_on: Callable[[Episode], None]) -> None:
        """Go on at once, or when all have come to the barrier."""
        if not is_barrier:
            go_on(episode)
            return
        self._at_barrier.append((episode, go_on))
        self.reply(Waiting([episode.ticket.ticket_id]))

    def _begin_turn(self, episode: Episode) -> None:
        if episode.is_over:
            return
        tokens = self.workload.turn_tokens(episode.ticket, episode.member)
        # Later turns find what came before in the prefix cache, and the members of one request share its prompt.
        is_first = episode.num_turns == 0 and episode.member == episode.ticket.member
        prefill = self.workload.prompt_tokens if is_first else 0
        episode.request = Request(tokens, prefill, lambda _: self._end_turn(episode))
        episode.num_turns += 1
        self.engine.add(episode.request)

    def _end_turn(self, episode: Episode) -> None:
        self._take_from_engine(episode, episode.request.num_tokens)
        if episode.ticket.num_members == 1:
            self._wait(self.config.scheduling == "batch", episode, self._step)
            return
        # One request for a whole group returns when its last response has ended.
        self._generating[episode.ticket.ticket_id] -= 1
        if self._generating[episode.ticket.ticket_id] == 0:
            for member in self._episodes[episode.ticket.ticket_id]:
                self._wait(self.config.scheduling == "batch", member, self._step)

    def _take_from_engine(self, episode: Episode, num_tokens: int) -> None:
        request, episode.request = episode.request, None
        if request.started_at >= 0:
            episode.keep(self.engine.segments(request, num_tokens))
            episode.slot_s += self.clock.now - request.started_at

    def _step(self, episode: Episode) -> None:
        """The environment's answer, or the reward."""
        if episode.is_over:
            return
        turns, ticket = self.workload.turns, episode.ticket
        if turns is None:
            begins_at = max(self._rewards_free_at, self.clock.now)
            self._rewards_free_at = begins_at + self.workload.reward_s
            self.clock.at(self._rewards_free_at, lambda: self._end(episode, "stop"))
            return
        if episode.draws is None:
            episode.draws = draws_of(
                ticket.environment_seed, ticket.group_id, episode.member, ticket.attempt
            )
        delay = turns.latency.draw(episode.draws)
        if delay.failure == "crash":
            self._end(episode, "failed")
        elif delay.failure == "hang" or delay.seconds > turns.timeout_s:
            self.clock.after(turns.timeout_s, lambda: self._end(episode, "failed"))
        elif episode.num_turns == turns.num_turns:
            self.clock.after(delay.seconds, lambda: self._end(episode, "stop"))
        else:
            self.clock.after(
                delay.seconds,
                lambda: self._wait(self.config.scheduling == "lockstep", episode, self._begin_turn),
            )

    def _abort(self, ticket_id: int) -> None:
        for episode in self._episodes.get(ticket_id, []):
            if episode.request is not None:
                self._take_from_engine(episode, self.engine.remove(episode.request))
            self._end(episode, "aborted")

    def _end(self, episode: Episode, finish_reason: FinishReason) -> None:
        if episode.is_over:
            return
        episode.is_over = True
        ticket_id = episode.ticket.ticket_id
        self._unfinished.setdefault(ticket_id, []).append(self._trajectory(episode, finish_reason))
        if len(self._unfinished[ticket_id]) == episode.ticket.num_members:
            del self._episodes[ticket_id], self._generating[ticket_id]
            self.reply(Finished(self._unfinished.pop(ticket_id), None))

    def _trajectory(self, episode: Episode, finish_reason: FinishReason) -> SimulatedTrajectory:
        count = len(episode.segments)
        ended = finish_reason == "stop"
        return SimulatedTrajectory(
            ticket_id=episode.ticket.ticket_id, group_id=episode.ticket.group_id, member=episode.member,
            tokens=np.zeros(count, np.int64), loss_mask=np.ones(count, bool),
            behavior_logprobs=np.zeros(count, np.float32),
            policy_versions=np.array([version for version, _ in episode.segments], np.int32),
            reward=self.workload.reward(episode.ticket, episode.member) if ended else float("nan"),
            finish_reason=finish_reason, failure="simulated" if finish_reason == "failed" else "",
            num_turns=episode.num_turns, started_at=episode.started_at, ended_at=self.clock.now, worker=self.index,
            segment_tokens=tuple(tokens for _, tokens in episode.segments), slot_s=episode.slot_s,
        )  # fmt: skip


class SimulatedFleet:
    """For a kind of Workers: without processes; only those of a swarm come and go."""

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
        """CPU time of the controller."""
        self.controller_busy_s = 0.0
        self._controller_free_at = 0.0
        for index in range(self.num_workers):
            engine = SimulatedEngine(clock, cluster.curve, cluster.num_replicas)
            process = SimulatedProcess(index, clock, config, workload, engine, cluster.sync_s)
            self.by_index[index] = Worker(index, process, state="sampling")

    def launch(self, on_message: Callable, _) -> None:
        """Have what workers say go to `on_message(worker, message)`, and then to `on_handled`; they are up already."""
        self._on_message = on_message
        for worker in self:
            self.listen(worker)

    def listen(self, worker: Worker) -> None:
        """Have the controller hear what a worker says."""
        worker.process.reply = functools.partial(self._deliver, worker)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the CPU time of what the controller does inside of the block."""
        start = time.process_time()
        yield
        self.cpu_s += time.process_time() - start

    def check(self) -> None:
        """Nothing happens in the background that could have failed."""

    def _deliver(self, worker: Worker, message) -> None:
        seconds = (
            self.message_s * len(message.trajectories) if isinstance(message, Finished) else 0.0
        )
        self.controller_busy_s += seconds
        self._controller_free_at = max(self._controller_free_at, self.clock.now) + seconds

        def handle() -> None:
            with self.timed():
                self._on_message(worker, message)
            self.on_handled(message)

        self.clock.at(self._controller_free_at, handle)


class SimulatedWorkers(SimulatedFleet, Workers):
    """Workers of one node."""
