"""A whole job but for the engine: `fake_job.py [options of train_async.py]`. Responses follow from the tickets' seeds.

With an async ratio above 0 they take a while, and a worker that is asked says how far they are.
"""

import os
import sys
import threading
import time

import numpy as np

from asyncrl.job.command_line import parse_config
from asyncrl.messages import (
    Abort,
    Connect,
    Cut,
    Finished,
    InFlight,
    Ready,
    SampledTokens,
    Stop,
    Stopped,
    Tickets,
    Update,
    Updated,
)
from asyncrl.records import Completion, Trajectory
from asyncrl.runlog.time_ledger import Activity
from train_async import run_job, train

TOKEN_S, MAX_TOKENS, VOCAB = 0.005, 20, 16


def response_to(ticket, version: int) -> Trajectory:
    """The response to a ticket, which goes on from what there was of it."""
    rng, prefix = np.random.default_rng(ticket.seed), ticket.prefix
    written = [] if prefix is None else list(prefix.tokens)
    versions = [] if prefix is None else prefix.policy_versions.tolist()
    new = rng.integers(3, VOCAB, rng.integers(1, MAX_TOKENS + 1 - len(written))).tolist()
    tokens, start, now = (
        [*ticket.prompt_tokens, *written, *new],
        len(ticket.prompt_tokens),
        time.time(),
    )
    mask = np.arange(len(tokens)) >= start
    stamped = np.full(len(tokens), -1, np.int32)
    stamped[start:] = versions + [version] * len(new)
    behavior = np.where(mask, -2.0, 0.0).astype(np.float32)
    arrays = (np.array(tokens), mask, behavior, stamped)
    of_ticket = (ticket.ticket_id, ticket.group_id, ticket.member)
    return Trajectory(
        *of_ticket,
        *arrays,
        float(rng.random() < 0.5),
        "stop",
        "",
        1,
        now,
        now,
        0,
        ((now, now, now),),
    )


class Sampler:
    """What a worker has in flight."""

    def __init__(self, spec, connection):
        self.connection, self.lock, self.activity = connection, threading.RLock(), Activity()
        self.takes_time = spec.config.async_ratio > 0
        self.running, self.version = {}, -1

    def send(self, message) -> None:
        with self.lock:
            self.connection.send(message)

    def report(self, kind, *fields, **changes) -> None:
        """Send a message with a report, and none with an older one after it."""
        with self.lock:
            self.activity.add(**changes)
            self.send(kind(*fields, self.activity.report()))

    def begin(self, ticket) -> None:
        """Sample what a ticket asks for, in its time."""
        with self.lock:
            self.activity.add(requests=1, trajectories=1)
        response = response_to(ticket, self.version)
        num_old = 0 if ticket.prefix is None else len(ticket.prefix.tokens)
        self.running[ticket.ticket_id] = (response, num_old, time.monotonic())
        if self.takes_time:
            threading.Timer(
                TOKEN_S * (response.num_generated - num_old), self.end, [response]
            ).start()
        else:
            self.end(response)

    def end(self, response: Trajectory) -> None:
        if self.running.pop(response.ticket_id, None) is not None:
            self.report(Finished, [response], requests=-1, trajectories=-1)

    def partials(self) -> dict[int, Completion]:
        """How far everything is that has begun."""
        partials = {}
        for response, num_old, began in list(self.running.values()):
            num = min(
                num_old + int((time.monotonic() - began) / TOKEN_S), response.num_generated - 1
            )
            if num:
                written = np.flatnonzero(response.loss_mask)[:num]
                partials[response.ticket_id] = Completion(
                    response.tokens[written].tolist(),
                    response.behavior_logprobs[written],
                    response.policy_versions[written],
                    "aborted",
                )
        return partials


def run_sampler(spec, connection) -> None:
    """Serve a controller."""
    os.setsid()
    sampler = Sampler(spec, connection)
    sampler.send(Ready(0.0))
    while True:
        match connection.recv():
            case Connect():
                pass
            case Update(version):
                sampler.version = version
                sampler.report(Updated, version, 0.001, SampledTokens())
            case Tickets(tickets):
                for ticket in tickets:
                    sampler.begin(ticket)
            case Cut():
                sampler.send(InFlight(sampler.partials(), {}))
            case Abort(ticket_ids):
                for ticket_id in ticket_ids:
                    sampler.running.pop(ticket_id, None)
            case Stop():
                sampler.report(Stopped)
                return


if __name__ == "__main__":
    # with it comes torch, which a worker has no use for
    from asyncrl.job.probe import Probe

    Probe.tokens_at = lambda probe, version: ()  # there is no engine that could score them
    config = parse_config(sys.argv[1:])
    run_job(lambda: train(config, run_sampler))
