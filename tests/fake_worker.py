"""A rollout worker without an engine, for tests of the controller: it answers as the ticket's answer tells it to."""

import multiprocessing
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from fake_link import FakeEngine
from trajectories import make_trajectory

from asyncrl.messages import (
    Abort,
    Asleep,
    Connect,
    Cut,
    Finished,
    Hold,
    InFlight,
    Probed,
    Ready,
    Receiving,
    SampledTokens,
    Sleep,
    Stop,
    Stopped,
    Tickets,
    Update,
    Updated,
)
from asyncrl.records import Completion
from asyncrl.runlog.time_ledger import Activity


def run_fake_worker(spec, connection):
    """Serve a controller.

    Answers: `ok`, `vary` (reward 1 for odd members), `fail`, `hang` (until aborted), `die` (the first time),
    `die always`, `slow` (a second).
    """
    if multiprocessing.parent_process() is not None:  # else it runs in a thread of the test
        os.setsid()
    if spec.model_path == "broken":
        with open(spec.log_path, "a") as log:
            log.write("RuntimeError: this model is broken\nand more\n")
        os._exit(7)
    if spec.model_path == "mute":
        time.sleep(60)
    Path(spec.log_path).with_name("sockets_path").write_text(spec.sockets_path)
    version, hanging, lock, activity = -1, {}, threading.Lock(), Activity()
    engine = None

    def send(message):
        with lock:
            connection.send(message)

    def finish(trajectories):
        activity.add(requests=-len(trajectories), trajectories=-len(trajectories))
        send(Finished(trajectories, activity.report_if_due()))

    send(Ready(0.0))
    while True:
        match connection.recv():
            case Connect(init_info) if spec.transport == "nccl":
                engine = FakeEngine()
                engine.init_weight_transfer_engine(init_info)
            case Update(version, messages, probe):
                if engine is not None:
                    send(Receiving())
                if spec.model_path == "dies at version 2" and version == 2:
                    die_once(spec)
                if engine is not None:
                    engine.update(messages)
                    assert (engine.floats("w") == version).all()
                send(Updated(version, 0.001, SampledTokens(), activity.report()))
                if probe:
                    logprobs = tuple(np.full(len(tokens) - 1, -1, np.float32) for tokens in probe)
                    send(Probed(version, logprobs))
            case Tickets(tickets):
                num_members = sum(ticket.num_members for ticket in tickets)
                activity.add(requests=num_members, trajectories=num_members)
                for ticket in tickets:
                    if ticket.answer == "hang":
                        hanging[ticket.ticket_id] = ticket
                    elif ticket.answer == "slow":
                        threading.Timer(1.0, finish, [[answer(ticket, version, spec)]]).start()
                    else:
                        members = range(ticket.member, ticket.member + ticket.num_members)
                        finish([answer(ticket, version, spec, member) for member in members])
            case Cut() if spec.model_path != "does not say":
                send(InFlight({i: partial(ticket, version) for i, ticket in hanging.items()}, {}))
            case Abort(ticket_ids):
                aborted = [hanging.pop(i) for i in ticket_ids if i in hanging]
                finish([trajectory(ticket, version, spec, "aborted") for ticket in aborted])
            case Hold(reason):
                activity.hold(reason)
            case Sleep():
                with open(spec.log_path + ".slept", "a") as log:
                    log.write(f"{version}\n")
                send(Asleep())
            case Stop():
                send(Stopped(activity.report()))
                return


def partial(ticket, version):
    """A token more than there was."""
    versions = [] if ticket.prefix is None else ticket.prefix.policy_versions.tolist()
    versions = np.array([*versions, version], np.int32)
    zeros = np.zeros(len(versions), np.float32)
    return Completion([5] * len(versions), zeros, versions, "aborted")


def die_once(spec):
    path = Path(spec.log_path + ".died")
    if not path.exists():
        path.touch()
        time.sleep(0.1)
        os._exit(5)


def answer(ticket, version, spec, member=None):
    if ticket.answer == "die always" or (ticket.answer == "die" and ticket.attempt == 0):
        os._exit(3)
    return trajectory(
        ticket, version, spec, "failed" if ticket.answer == "fail" else "stop", member
    )


def trajectory(ticket, version, spec, finish_reason, member=None):
    member = ticket.member if member is None else member
    reward = member % 2 if ticket.answer == "vary" else 1
    now = time.time()
    start = len(ticket.prompt_tokens)
    mask = np.arange(start + 2) >= start
    return replace(
        make_trajectory(ticket.group_id, member, (), finish_reason),
        ticket_id=ticket.ticket_id,
        tokens=np.array([*ticket.prompt_tokens, 5, 1]),
        loss_mask=mask,
        behavior_logprobs=np.zeros(start + 2, np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        reward=float(reward) if finish_reason == "stop" else float("nan"),
        failure="ValueError: no good" if finish_reason == "failed" else "",
        started_at=now - 0.01,
        ended_at=now,
        worker=spec.placement.worker,
        turns=((now - 0.01, now, now),),
    )
