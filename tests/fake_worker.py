"""A rollout worker without an engine. What it samples follows from the seeds of its tickets."""

import math
import multiprocessing
import os
import threading
import time
from dataclasses import replace

import numpy as np
from trajectories import make_trajectory

from asyncrl.messages import (
    Abort,
    Cut,
    Finished,
    Hold,
    InFlight,
    Probed,
    Ready,
    SampledTokens,
    Stop,
    Stopped,
    Tickets,
    Update,
    Updated,
)
from asyncrl.records import Completion, Ticket, Trajectory
from asyncrl.runlog.time_ledger import Activity

TOKEN_S, MAX_TOKENS, VOCAB = 0.005, 20, 16


def run_fake_worker(spec, connection):
    """Serve a controller."""
    FakeWorker(spec, connection, token_s=0.0).serve()


def response_to(ticket: Ticket, member: int, version: int, worker: int) -> Trajectory:
    """What a member of a ticket's group samples; it continues what there was.

    The answer `ok` is always right, and any other in half of all cases.
    """
    rng, prefix, now = np.random.default_rng((ticket.seed, member)), ticket.prefix, time.time()
    tokens = [] if prefix is None else prefix.tokens
    versions = [] if prefix is None else prefix.policy_versions.tolist()
    new = rng.integers(3, VOCAB, rng.integers(1, MAX_TOKENS + 1 - len(tokens))).tolist()
    versions = np.array([-1] * len(ticket.prompt_tokens) + versions + [version] * len(new))
    reward = float(ticket.answer == "ok" or rng.random() < 0.5)
    return replace(
        make_trajectory(ticket.group_id, member),
        ticket_id=ticket.ticket_id,
        tokens=np.array([*ticket.prompt_tokens, *tokens, *new]),
        loss_mask=versions >= 0,
        behavior_logprobs=np.where(versions >= 0, -2.0, 0.0).astype(np.float32),
        policy_versions=versions.astype(np.int32),
        reward=reward,
        started_at=now - 0.01,
        ended_at=now,
        worker=worker,
        turns=((now - 0.01, now, now),),
    )


class FakeWorker:
    """Serves a controller; it takes some seconds for each token."""

    def __init__(self, spec, connection, token_s):
        self.spec, self.connection, self.token_s = spec, connection, token_s
        self.lock, self.activity = threading.RLock(), Activity()
        self.version = -1
        self.running = {}
        """Ticket id -> the ticket, what it will have sampled, and when it began."""

    def send(self, message):
        with self.lock:
            self.connection.send(message)

    def serve(self):
        if multiprocessing.parent_process() is not None:  # else it runs in a thread of the test
            os.setsid()
        self.send(Ready(0.0))
        while True:
            match self.connection.recv():
                case Update(version, _, probe):
                    self.load(version, probe)
                case Tickets(tickets):
                    for ticket in tickets:
                        self.begin(ticket)
                case Cut():
                    self.send(InFlight(self.partials(), {}))
                case Abort(ticket_ids):
                    for ticket_id in ticket_ids:
                        self.end(ticket_id, "aborted")
                case Hold(reason):
                    self.activity.hold(reason)
                case Stop():
                    self.send(Stopped(self.activity.report()))
                    return

    def load(self, version, probe):
        self.version = version
        with self.lock:
            self.send(Updated(version, 0.001, SampledTokens(), self.activity.report()))
        if probe:
            logprobs = tuple(np.full(len(tokens) - 1, -1, np.float32) for tokens in probe)
            self.send(Probed(version, logprobs))

    def begin(self, ticket):
        members = range(ticket.member, ticket.member + ticket.num_members)
        worker = self.spec.placement.worker
        responses = [response_to(ticket, member, self.version, worker) for member in members]
        with self.lock:
            self.activity.add(requests=len(members), trajectories=len(members))
            self.running[ticket.ticket_id] = ticket, responses, time.monotonic()
        num_old = 0 if ticket.prefix is None else len(ticket.prefix.tokens)
        sampling_s = self.token_s * (responses[0].num_generated - num_old)
        if sampling_s == 0:
            self.end(ticket.ticket_id)
        else:
            threading.Timer(sampling_s, self.end, [ticket.ticket_id]).start()

    def end(self, ticket_id, reason="stop"):
        """Send what a ticket has, unless that has been done."""
        with self.lock:
            if ticket_id not in self.running:
                return
            _, responses, _ = self.running.pop(ticket_id)
            if reason != "stop":
                changes = {"finish_reason": reason, "reward": math.nan}
                responses = [replace(response, **changes) for response in responses]
            self.activity.add(requests=-len(responses), trajectories=-len(responses))
            self.send(Finished(responses, self.activity.report_if_due()))

    def partials(self):
        """How far everything is that has begun, but for what has no token yet."""
        partials = {}
        for ticket, (response, *_), began in list(self.running.values()):
            num_old = 0 if ticket.prefix is None else len(ticket.prefix.tokens)
            num_new = int((time.monotonic() - began) / TOKEN_S)
            num_tokens = min(num_old + num_new, response.num_generated - 1)
            if num_tokens:
                written = np.flatnonzero(response.loss_mask)[:num_tokens]
                partials[ticket.ticket_id] = Completion(
                    response.tokens[written].tolist(),
                    response.behavior_logprobs[written],
                    response.policy_versions[written],
                    "aborted",
                )
        return partials
