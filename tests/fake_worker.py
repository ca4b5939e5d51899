"""A rollout worker without an engine, in which nothing happens by itself: everything it may do next is an event.

It keeps the order of messages and, in each `on_update` mode, does with its requests what rollout.py,
asyncrl/engine/episode.py and asyncrl/engine/proxy.py do with theirs. What it samples follows from the seeds of its
tickets. `run_fake_worker` serves a controller over a pipe; in a random walk the test chooses the events.
"""

import itertools
import math
import multiprocessing
import os
import random
import time
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
from trajectories import make_trajectory

from asyncrl.messages import (
    Abort,
    Asleep,
    Finished,
    Idle,
    InFlight,
    LoadWeights,
    Probed,
    Ready,
    ReportProgress,
    SampledTokens,
    Sleep,
    Stop,
    Stopped,
    Suspend,
    Tickets,
    WeightsLoaded,
    decoded_lengths,
)
from asyncrl.records import Completion, Ticket
from asyncrl.runlog.time_ledger import Activity

VOCAB, LOGPROB = 16, -2.0


def run_fake_worker(spec, connection, token_s=0.0):
    """Serve a controller. What may happen happens at once, but a token takes `token_s` seconds."""
    if multiprocessing.parent_process() is not None:  # else it runs in a thread of the test
        os.setsid()
    worker = FakeWorker(spec.config, spec.placement.worker)
    while not worker.is_stopped:
        kind, event = next(worker.events(), ("", None))
        if event is None or connection.poll(token_s if kind == "move" else 0):
            worker.send(connection.recv())
        else:
            event()
        while worker.outbox:
            connection.send(worker.outbox.popleft())


@dataclass
class Episode:
    """One trajectory on its way: between turns, `ready` for the engine, `sampling`, `sampled`, `scoring`, `ended`."""

    ticket: Ticket
    member: int
    rng: random.Random
    num_turns: int
    tokens: list = field(default_factory=list)
    versions: list = field(default_factory=list)
    state: str = "ready"
    waits_for: str = ""
    """State to which the barrier leads."""
    turn: int = 0
    turn_start: int = 0
    is_aborted: bool = False
    is_whole: bool = False
    """Whether it was sampled to its end before the run was resumed."""
    started_at: float = field(default_factory=time.time)


class FakeWorker:
    """The controller's messages wait in `inbox`, and those to the controller in `outbox`."""

    failure_share = 0.0
    """Of all turns, those that the environment or the reward fails to answer."""
    merged_share = 0.0
    """Of all tickets, those whose end goes by the message before, if that has not been sent yet."""

    def __init__(self, config, index):
        self.config, self.index = config, index
        self.inbox, self.outbox, self.activity = deque(), deque(), Activity()
        self.is_up = self.is_stopped = False
        self.version, self.loading, self.stands = -1, None, False
        self.is_asleep = False
        """Whether its engine has given up its memory."""
        self.owes_progress = False
        """Whether it was asked how far its responses are, which it says at once."""
        self.discarded = 0
        self.episodes, self.ended = {}, {}

    def send(self, message):
        """Take a message of the controller."""
        if isinstance(message, ReportProgress):
            self.owes_progress = True
        else:
            self.inbox.append(message)

    # Events: all that may happen now, each with its kind

    def events(self):
        if not self.is_up:
            yield "start", self.start
            return
        if self.owes_progress:
            yield "say", self.say
        if self.loading is None and self.inbox:
            yield "read", self.read
        if self.may_load():
            yield "load", self.load
        if self.movable():
            yield "move", self.go_on

    def start(self):
        self.is_up = True
        self.outbox.append(Ready(0.0))

    def read(self):
        """Act on the next message."""
        match self.inbox.popleft():
            case Tickets(tickets):
                for ticket in tickets:
                    self._start(ticket)
            case LoadWeights() as update:
                self.loading = update
                self._stand("update")
            case Suspend():
                self._stand("suspended")
            case Sleep():
                self._stand("suspended")
                self.is_asleep = True
                self.outbox.append(Asleep())
            case proceed if type(proceed).__name__ == "Proceed":  # whose module imports torch
                for episode in self._are("barrier"):
                    episode.state = episode.waits_for
            case Abort(ticket_ids):
                for ticket_id in ticket_ids:
                    for episode in self.episodes.get(ticket_id, ()):
                        episode.is_aborted = True
            case Idle(reason):
                self.activity.set_idle(reason)
            case Stop():
                self.is_stopped = True
                self.outbox.append(Stopped(self.activity.report()))

    def say(self):
        """How far its responses are, also in the middle of an update."""
        self.owes_progress, partials = False, {}
        for ticket_id, episodes in self.episodes.items():
            (first, *others) = episodes
            if self.config.is_multi_turn or others or first.ticket.is_evaluation:
                continue
            if first.versions:
                is_whole = "scoring" in (first.state, first.waits_for)
                partials[ticket_id] = Completion(
                    list(first.tokens),
                    "stop" if is_whole else "interrupted",
                    behavior_logprobs=np.full(len(first.tokens), LOGPROB, np.float32),
                    policy_versions=np.array(first.versions, np.int32),
                )
        self.outbox.append(InFlight(partials))

    def may_load(self):
        is_idle = self.config.on_update != "wait" or not self._are("sampling")
        return self.loading is not None and is_idle

    def load(self):
        """Finish loading, and score the probe if there is one."""
        update, self.loading = self.loading, None
        self.version, self.stands, self.is_asleep = update.version, False, False
        self.activity.resume()
        sampled, self.discarded = SampledTokens(discarded=self.discarded), 0
        self.outbox.append(WeightsLoaded(self.version, 0.001, sampled, self.activity.report()))
        if update.probe:
            logprobs = tuple(np.full(len(tokens) - 1, -1, np.float32) for tokens in update.probe)
            decoded = tuple(np.full((2, n), -1, np.float32) for n in decoded_lengths(update.probe))
            self.outbox.append(Probed(self.version, logprobs, decoded))

    def movable(self):
        """Trajectories to which something may happen."""
        return [e for e in itertools.chain(*self.episodes.values()) if self._can_move(e)]

    def go_on(self):
        """Let the next thing happen to each trajectory."""
        for episode in self.movable():
            self.move(episode)

    def move(self, episode):
        """The next thing that happens to one trajectory."""
        if episode.is_aborted:
            self._end(episode, "aborted")
        elif episode.state in ("ready", "sampling"):
            self._sample(episode)
        elif episode.rng.random() < self.failure_share:
            self._end(episode, "failed")
        elif episode.turn + 1 < episode.num_turns:
            episode.turn, episode.turn_start = episode.turn + 1, len(episode.versions)
            self._wait_or_go([episode], "lockstep", "ready")
        else:
            self._end(episode, "length" if self._is_full(episode) else "stop")

    # How a worker and its engine behave

    def _sample(self, episode):
        """Sample a token, which may end the turn."""
        is_older = set(episode.versions[episode.turn_start :]) - {self.version}
        episode.state = "sampling"
        if not episode.is_whole:
            # what there was before the run was resumed may be of other weights
            if self.config.on_update == "restart" and is_older:
                self._discard(episode)
            episode.tokens.append(episode.rng.randrange(3, VOCAB))
            episode.versions.append(self.version)
        if episode.is_whole or self._is_full(episode) or episode.rng.random() < 0.4:
            episode.state = "sampled"
            self._after_sampling(episode.ticket)

    def _is_full(self, episode):
        return len(episode.tokens) >= self.config.max_response_tokens

    def _discard(self, episode):
        """Have a turn start over."""
        self.discarded += len(episode.versions) - episode.turn_start
        del episode.versions[episode.turn_start :], episode.tokens[episode.turn_start :]

    def _are(self, state):
        return [e for e in itertools.chain(*self.episodes.values()) if e.state == state]

    def _can_move(self, episode):
        match episode.state:
            case "ready":
                return not self.stands
            case "sampling":
                is_running = not self.stands or self.config.on_update == "wait"
                return is_running or episode.is_aborted
            case "sampled" | "barrier":
                return episode.is_aborted
        return episode.state == "scoring"

    def _start(self, ticket):
        assert self.version >= ticket.min_version, "a ticket came before its weights"
        members = range(ticket.member, ticket.member + ticket.num_members)
        self.activity.add(requests=len(members), trajectories=len(members))
        episodes = [self._episode(ticket, member) for member in members]
        self.episodes[ticket.ticket_id] = episodes
        if ticket.prefix is not None:
            (episode,) = episodes
            episode.tokens = list(ticket.prefix.tokens)
            episode.versions = ticket.prefix.policy_versions.tolist()
            episode.is_whole = ticket.prefix.finish_reason != "interrupted"
        self._wait_or_go(episodes, "lockstep", "ready")

    def _episode(self, ticket, member):
        rng = random.Random(f"{ticket.seed} {member}")
        is_long = self.config.is_multi_turn and not ticket.is_evaluation
        return Episode(ticket, member, rng, rng.randint(1, 3) if is_long else 1)

    def _wait_or_go(self, episodes, scheduling, state):
        """Go on to a state, under one scheduling when all others have come to the barrier."""
        ticket = episodes[0].ticket
        waits = self.config.scheduling == scheduling and not ticket.is_evaluation
        for episode in episodes:
            episode.state, episode.waits_for = ("barrier", state) if waits else (state, "")
        if waits:
            from extras.baselines import Waiting

            self.outbox.append(Waiting([ticket.ticket_id]))

    def _after_sampling(self, ticket):
        """One request for several responses returns when the last has ended."""
        episodes = self.episodes[ticket.ticket_id]
        if ticket.num_members > 1 and any(e.state != "sampled" for e in episodes):
            return
        self._wait_or_go([e for e in episodes if e.state == "sampled"], "batch", "scoring")

    def _stand(self, why):
        """Requests freeze, are aborted to go on or start over, or run to their end."""
        self.activity.pause(why)
        if self.stands:
            return
        self.stands = True
        if self.config.on_update in ("resume", "restart"):
            for episode in self._are("sampling"):
                episode.state = "ready"
                if self.config.on_update == "restart":
                    self._discard(episode)

    def _end(self, episode, reason):
        episode.state = "ended"
        ticket_id = episode.ticket.ticket_id
        ended = self.ended.setdefault(ticket_id, [])
        ended.append(self._trajectory(episode, reason))
        if len(ended) < episode.ticket.num_members:
            return
        del self.episodes[ticket_id], self.ended[ticket_id]
        self.activity.add(requests=-len(ended), trajectories=-len(ended))
        report = None
        is_merged = episode.rng.random() < self.merged_share
        if is_merged and self.outbox and isinstance(self.outbox[-1], Finished):
            earlier = self.outbox.pop()
            ended, report = [*earlier.trajectories, *ended], earlier.activity
        self.outbox.append(Finished(ended, report or self.activity.report()))

    def _trajectory(self, episode, reason):
        """The answer `ok` is always right, and any other in half of all cases."""
        ticket, now = episode.ticket, time.time()
        has_reward = reason in ("stop", "length")
        is_right = ticket.answer == "ok" or episode.rng.random() < 0.5
        # which has one token of prompt
        versions = [-1] * (len(ticket.prompt_tokens) - 1) + episode.versions
        trajectory = make_trajectory(ticket.group_id, episode.member, versions, reason)
        return replace(
            trajectory,
            ticket_id=ticket.ticket_id,
            tokens=np.array([*ticket.prompt_tokens, *episode.tokens]),
            behavior_logprobs=np.where(trajectory.loss_mask, LOGPROB, 0).astype(np.float32),
            reward=float(is_right) if has_reward else math.nan,
            failure="ValueError: no good" if reason == "failed" else "",
            num_turns=episode.turn + 1,
            started_at=episode.started_at,
            ended_at=now,
            worker=self.index,
            turns=((episode.started_at, now, now),) * (episode.turn + 1),
        )
