"""A rollout worker in which nothing happens by itself: everything it may do next is an event that a test chooses.

It keeps the order of messages and, in each `on_update` mode, does with its requests what rollout.py,
asyncrl/engine/episode.py and asyncrl/engine/proxy.py do with theirs.
"""

import itertools
import math
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import numpy as np
from trajectories import make_trajectory

from asyncrl.controller.workers import Worker, Workers
from asyncrl.messages import (
    Abort,
    Asleep,
    Connect,
    Cut,
    Finished,
    Hold,
    HoldReason,
    InFlight,
    Ready,
    Receiving,
    SampledTokens,
    Sleep,
    Suspend,
    Tickets,
    Update,
    Updated,
)
from asyncrl.records import Completion
from extras.baselines import Proceed, Waiting
from extras.swarm.remote import RemoteWorker, SwarmWorkers
from extras.swarm.wire import Fetch, Fetched


@dataclass
class Episode:
    """One trajectory on its way: between turns, `ready` for the engine, `sampling`, `sampled`, `scoring`, `ended`."""

    ticket: object
    member: int
    num_turns: int
    versions: list = field(default_factory=list)
    state: str = "ready"
    waits_for: str = ""
    """State to which the barrier leads."""
    turn: int = 0
    turn_start: int = 0
    is_aborted: bool = False
    is_whole: bool = False
    """Whether it was sampled to its end before the run was resumed."""


class WalkProcess:
    """Stands where WorkerProcess does: the controller's messages wait in `inbox`, its own in `outbox`."""

    def __init__(self, config, index, walk):
        """`walk` has rng, failure_share and the transport, and is told what is sent."""
        self.config, self.index, self.walk, self.rng = config, index, walk, walk.rng
        self.inbox, self.outbox = deque(), deque()
        self.reading, self.started_at, self.exit_code = Future(), time.monotonic(), None
        self.is_up, self.version, self.loading, self.stands = False, -1, None, False
        self.is_connected, self.num_announced = False, 0
        """Whether it knows the transport; and how many versions had been announced when it was sent weights last."""
        self.newest = None
        """Message that was sent to it last."""
        self.is_suspended = self.is_asleep = False
        """Whether it was told to stop until the next update, and whether its engine has given up its memory."""
        self.discarded = 0
        self.episodes, self.ended = {}, {}
        self.sent_version = -1
        """Version of the newest update sent to it."""
        self.fetching = None
        self.is_receiving = False
        """Whether it waits for weights to be sent."""
        self.is_asked = False
        """Whether it was asked how far its responses are, which it says at once."""
        self.lapsed = set()
        """Tickets that were taken from it, as it had them for too long."""
        self.given, self.aborted = {}, set()
        """Tickets that have not been delivered, by id, and ids of those that it was told to abort."""

    # What the controller calls

    def send(self, message):
        if isinstance(message, Cut):
            worker = self.walk.controller.workers[self.index]
            assert not isinstance(worker, RemoteWorker), "a host that joined is not asked"
            assert self.walk.oracle.continues_responses, (
                "responses are sampled again by their seeds"
            )
            self.is_asked = True
            return
        self.inbox.append(message)
        if isinstance(message, Hold):
            assert message != self.newest, "a worker is told once why it has no ticket"
            assert message.reason in (*get_args(HoldReason), "round")
            oracle = self.walk.oracle
            has_weights = oracle.announced >= 0 and not oracle.is_resuming
            assert has_weights or message.reason in ("weights", "version")
            assert message.reason != "weights" or not has_weights
            assert message.reason != "evaluation" or oracle.evaluating
        self.newest = message
        if isinstance(message, Connect):
            assert not self.is_connected
            self.is_connected = True
        elif isinstance(message, Update):
            assert self.is_connected
            if "buffer" in message.update_infos[0]:
                num_announced, self.num_announced = (
                    self.num_announced,
                    self.walk.oracle.num_announced,
                )
                assert self.num_announced > num_announced, "no worker is sent weights twice"
            self.sent_version, self.is_suspended = message.version, False
        elif isinstance(message, Suspend | Sleep):
            self.is_suspended = True
        elif isinstance(message, Tickets):
            self.given |= {ticket.ticket_id: ticket for ticket in message.tickets}
            self.walk.oracle.given(message.tickets, self.sent_version)
            if self.config.scheduling == "batch":
                self._check_round()
        elif isinstance(message, Proceed):
            assert all(map(self._waits, self.given.values())), "a barrier opens for some"
        elif isinstance(message, Abort):
            self.aborted.update(message.ticket_ids)

    def stop(self, timeout_s=0): ...

    def death_report(self):
        return f"worker {self.index} was killed; it"

    # Events: all that may happen now, each with its kind

    def events(self):
        if self.exit_code is not None:
            return
        if not self.is_up:
            yield "start", self.start
            return
        if self.is_asked:
            yield "say", self.say
        if self.loading is None and self.inbox:
            yield "read", self.read
        if self.fetching is not None:
            yield "fetch", self.fetch
        is_idle = self.config.on_update != "wait" or not self._are("sampling")
        if self.loading is not None and is_idle and not self.is_receiving:
            yield "load", self.load
        movable = [e for e in itertools.chain(*self.episodes.values()) if self._can_move(e)]
        if movable:
            yield "move", lambda: self.move(self.rng.choice(movable))

    def start(self):
        self.is_up = True
        self.outbox.append(Ready(0.0))

    def die(self):
        self.exit_code, self.is_asked = -9, False
        self.outbox.append(None)

    def read(self):
        match self.inbox.popleft():
            case Tickets(tickets):
                for ticket in tickets:
                    self._start(ticket)
            case Update() as update:
                self.loading = update
                self._stand()
                if self.walk.transport.sends and "buffer" in update.update_infos[0]:
                    self.is_receiving = True
                    self.outbox.append(Receiving())
            case Fetch(version):
                assert self.fetching is None and version >= self.version
                self.fetching = version
            case Suspend():
                self._stand()
            case Sleep():
                self._stand()
                self.is_asleep = True
                self.outbox.append(Asleep())
            case Proceed():
                for episode in self._are("barrier"):
                    episode.state = episode.waits_for
            case Abort(ticket_ids):
                for episode in itertools.chain(
                    *(self.episodes.get(ticket_id, ()) for ticket_id in ticket_ids)
                ):
                    episode.is_aborted = True

    def say(self):
        """How far its responses are, also in the middle of an update."""
        self.is_asked, partials, lost = False, {}, {}
        for ticket_id, episodes in self.episodes.items():
            if episodes[0].ticket.is_evaluation:
                continue
            if self.config.is_multi_turn or len(episodes) > 1:
                lost[ticket_id] = sum(len(episode.versions) for episode in episodes)
            elif versions := episodes[0].versions:
                is_whole = "scoring" in (episodes[0].state, episodes[0].waits_for)
                partials[ticket_id] = Completion(
                    [0] * len(versions),
                    np.zeros(len(versions), np.float32),
                    np.array(versions, np.int32),
                    "stop" if is_whole else "aborted",
                )
        self.outbox.append(InFlight(partials, lost))

    def fetch(self):
        """Weights have come, while it went on, or are gone as too many others still read older ones."""
        version, self.fetching = self.fetching, None
        controller = self.walk.controller
        try:
            controller.pulled.open(version, None)
        except ValueError:
            controller.fetch_anew(controller.workers[self.index], version)
        else:
            self.outbox.append(Fetched(version))

    def load(self):
        """Finish loading; the buffer must still hold what it held."""
        update, self.loading = self.loading, None
        (info,) = update.update_infos
        is_here = "buffer" in info
        held = self.walk.transport.versions[info["buffer"]] if is_here else info["version"]
        assert held == update.version, "a buffer was overwritten while read"
        self.version, self.stands, self.is_asleep = update.version, False, False
        discarded, self.discarded = self.discarded, 0
        self.outbox.append(Updated(self.version, 0.0, SampledTokens(discarded=discarded), None))

    def move(self, episode):
        """The next thing that happens to one trajectory."""
        if episode.is_aborted:
            self._end(episode, "aborted")
        elif episode.state in ("ready", "sampling"):
            if self.config.on_update == "restart" and not episode.is_whole:
                self._start_over_if_older(episode)
            episode.state = "sampling"
            if not episode.is_whole:
                episode.versions.append(self.version)
            if episode.is_whole or self.rng.random() < 0.4:
                episode.state = "sampled"
                self._after_sampling(episode.ticket)
        elif self.rng.random() < self.walk.failure_share:
            self._end(episode, "failed")
        elif episode.turn + 1 < episode.num_turns:
            episode.turn, episode.turn_start = episode.turn + 1, len(episode.versions)
            self._wait_or_go([episode], self.config.scheduling == "lockstep", "ready")
        else:
            self._end(episode, self.rng.choice(["stop", "length"]))

    def _start_over_if_older(self, episode):
        """What there was before the run was resumed may be of other weights."""
        if set(episode.versions[episode.turn_start :]) - {self.version}:
            self.discarded += len(episode.versions) - episode.turn_start
            del episode.versions[episode.turn_start :]

    # How a worker and its engine behave

    def _are(self, state):
        return [e for e in itertools.chain(*self.episodes.values()) if e.state == state]

    def _check_round(self):
        """Groups are dealt out in advance, and none of the next round before all of one have come back."""
        walk, rounds = self.walk, set()
        for worker in walk.controller.workers:
            for ticket in worker.process.given.values():
                if not ticket.is_evaluation:
                    assert ticket.group_id % walk.num_workers == worker.index
                    rounds.add(walk.oracle.groups[ticket.group_id].issued_at)
        assert len(rounds) <= 1, "a round begins in the middle of another"

    def _waits(self, ticket):
        """Whether what is trained on of a ticket is at the barrier, or given up there."""
        states = {episode.state for episode in self.episodes.get(ticket.ticket_id, ())}
        is_given_up = ticket.ticket_id in self.aborted
        return is_given_up or ticket.is_evaluation or "barrier" in states <= {"barrier", "ended"}

    def _can_move(self, episode):
        if episode.state == "ended":
            return False
        if episode.state == "ready":
            return not self.stands
        if episode.is_aborted:
            return True
        if episode.state == "sampling":
            return not self.stands or self.config.on_update == "wait"
        return episode.state == "scoring"

    def _start(self, ticket):
        assert self.version >= ticket.min_version, "a ticket came before its weights"
        evaluates = ticket.is_evaluation
        turns = 1 + self.rng.randrange(3) if self.config.is_multi_turn and not evaluates else 1
        members = range(ticket.member, ticket.member + ticket.num_members)
        self.episodes[ticket.ticket_id] = [Episode(ticket, member, turns) for member in members]
        if ticket.prefix is not None:
            (episode,) = self.episodes[ticket.ticket_id]
            episode.versions = ticket.prefix.policy_versions.tolist()
            episode.is_whole = ticket.prefix.finish_reason != "aborted"
        self._wait_or_go(
            self.episodes[ticket.ticket_id], self.config.scheduling == "lockstep", "ready"
        )

    def _wait_or_go(self, episodes, is_barrier, state):
        ticket = episodes[0].ticket
        waits = is_barrier and not ticket.is_evaluation
        for episode in episodes:
            episode.state, episode.waits_for = ("barrier", state) if waits else (state, "")
        if waits:
            self.outbox.append(Waiting([ticket.ticket_id]))

    def _after_sampling(self, ticket):
        """One request for several responses returns when the last has ended."""
        episodes = self.episodes[ticket.ticket_id]
        if ticket.num_members > 1 and any(e.state != "sampled" for e in episodes):
            return
        self._wait_or_go(
            [e for e in episodes if e.state == "sampled"],
            self.config.scheduling == "batch",
            "scoring",
        )

    def _stand(self):
        """Requests freeze, are aborted to go on or start over, or run to their end."""
        if self.stands:
            return
        self.stands = True
        if self.config.on_update in ("resume", "restart"):
            for episode in self._are("sampling"):
                episode.state = "ready"
                if self.config.on_update == "restart":
                    self.discarded += len(episode.versions) - episode.turn_start
                    del episode.versions[episode.turn_start :]

    def _end(self, episode, reason):
        episode.state = "ended"
        ticket_id = episode.ticket.ticket_id
        ended = self.ended.setdefault(ticket_id, [])
        ended.append(self._trajectory(episode, reason))
        if len(ended) < episode.ticket.num_members:
            return
        del self.episodes[ticket_id], self.ended[ticket_id]
        if self.outbox and isinstance(self.outbox[-1], Finished) and self.rng.random() < 0.5:
            ended = [*self.outbox.pop().trajectories, *ended]
        self.outbox.append(Finished(ended, None))

    def _trajectory(self, episode, reason):
        ticket = episode.ticket
        trajectory = make_trajectory(ticket.group_id, episode.member, episode.versions, reason)
        return replace(
            trajectory,
            ticket_id=ticket.ticket_id,
            reward=float(self.rng.randrange(2)) if reason in ("stop", "length") else math.nan,
            failure="ValueError: no good" if reason == "failed" else "",
            num_turns=episode.turn + 1,
            ended_at=0.0,
            worker=self.index,
        )


class WithoutProcesses:
    """For a kind of Workers: its processes are not started."""

    def __init__(self, walk, config, placement):
        super().__init__(config, placement, "", Path(), main=None)
        self.walk = walk

    def _start(self, index, num_restarts=0):
        process = WalkProcess(self.config, index, self.walk)
        return Worker(index, process=process, num_restarts=num_restarts)


class WalkWorkers(WithoutProcesses, Workers):
    """The real Workers, with processes that are not started."""


class WalkSwarmWorkers(WithoutProcesses, SwarmWorkers):
    """The same in a run that listens."""
