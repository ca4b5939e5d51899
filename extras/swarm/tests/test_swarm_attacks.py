"""What a host that has the key may send without harm: the run goes on, says one line, and loses nothing."""

import contextlib
import dataclasses
import math
import socket
import time

import msgspec
import numpy as np
import pytest
import zmq
from hosts import PROBE, Client, Far, is_answer, running, wait_until
from trajectories import make_trajectory

from asyncrl.messages import Finished, Probed, Ready, SampledTokens, Update, Updated
from extras.swarm.hub import MAX_MESSAGE_BYTES
from extras.swarm.swarm import RemoteProcess
from extras.swarm.wire import Codec, Fetched, Join, JoinAgain, Piece, Pull, Refused, Welcome

pack = msgspec.msgpack.encode
ENCODE = Codec(()).encode
UPDATED = Updated(0, 0.1, SampledTokens(), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, and a host that is honest."""
    folder = tmp_path_factory.mktemp("run")
    options = {"async_ratio": 2.0, "max_running_requests": 4, "replicate_prompts": False}
    with running(folder, **options) as run, Far(run, "honest") as run.honest:
        for _ in range(4):
            run.step()
        yield run


def goes_on(run):
    """Two batches are trained on, with the ledger balanced, and the honest host has stayed."""
    for _ in range(2):
        run.step()
    assert "honest" not in dict(run.left())


def printed_of(capsys, name):
    """Lines about a host, but for that it joined."""
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if f"{name} " in line and "has joined" not in line]


@contextlib.contextmanager
def liar(run, holds=True, **options):
    """A host that has joined and its engine is up; it has a ticket, which it has not answered, if it `holds`."""
    host = Far(run, f"liar{len(run.events)}", **options)
    host.holds = is_answer
    with host:
        wait_until(lambda: run.workers_of(host.name))
        if holds:
            wait_until(lambda: run.step_if_ready() or host.held)
        yield host


def is_shut_out(run, host, why, capsys):
    """The host is told so, the run says it in one line, and goes on."""
    assert str(host.end()).startswith(f"the run at {run.address} refuses this host: ")
    reason = dict(run.left())[host.name]
    goes_on(run)
    (line,) = printed_of(capsys, host.name)
    assert why in reason and reason in line and len(line) < 500 and line.isprintable()


def changed(**fields):
    """A lie about the first of what a ticket asked for."""
    return lambda trajectories: [dataclasses.replace(trajectories[0], **fields), *trajectories[1:]]


def of_version(version):
    """All generated tokens are of another version."""

    def lie(trajectories):
        versions = [np.where(t.loss_mask, version, -1).astype(np.int32) for t in trajectories]
        pairs = zip(trajectories, versions, strict=True)
        return [dataclasses.replace(t, policy_versions=versions) for t, versions in pairs]

    return lie


def frames(kind, fields, engine=b"0"):
    return [[engine, kind, fields]]


def message(message, engine=b"0", times=1):
    return [[engine, *ENCODE(message)]] * times


def answers(*changes):
    """Answer the ticket that the host has as often as there are changes."""

    def make(host):
        (*_, (engine, finished)) = host.held
        outcomes = [Finished(change(finished.trajectories), None) for change in changes]
        return [[b"%d" % engine, *ENCODE(answer)] for answer in outcomes]

    return make


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        ([[b"-1"] * 300], "a message of 300 frames"),
        (
            frames(b"Finished", pack({"trajectories": [], "activity": "\x1b[2J\n" * 10})),
            "a broken Finished",
        ),
        (message(Ready(0.0), b"-1"), "of an engine -1 that is not up"),
        (message(Ready(0.0), b"9" * 5000), "sent"),
        (message(Ready(0.0)), "Ready of an engine that is up"),
        (message(Ready(0.0), b"99999"), "of an engine 99999 that is not up"),
        (message(Ready(math.nan), b"1"), "nan s as the time to start"),
        (message(UPDATED), "Updated of version 0, which it was not asked for"),
        (message(Pull(0, None, -5), b"-1"), "a Pull from byte -5"),
        (message(Pull(0, None, 0), b"-1", times=500), "while it pulls"),
        (message(Join(1, "", "cpu", "liar", 0.0), b"-1"), "a Join after its Join"),
        (answers(list, list), "which it has not"),
        (answers(lambda trajectories: trajectories[1:]), "not all of them"),
        (answers(lambda trajectories: trajectories[:1] * len(trajectories)), "not all of them"),
        (
            answers(changed(finish_reason="aborted", reward=math.nan)),
            "as aborted, which it was not",
        ),
        (answers(of_version(0)), "versions 0 … 0, not from"),
        (answers(of_version(999)), "versions 999 … 999, not from"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_host_that_sends_what_no_honest_one_can_is_shut_out(
    run, capsys, monkeypatch, attack, why
):
    # a ticket that was taken from it may be aborted
    monkeypatch.setattr(run.controller.dispatcher, "end_leases", lambda: [])
    with liar(run, holds=callable(attack)) as host:
        wait_until(lambda: host.saw(Update))
        for sent in attack(host) if callable(attack) else attack:
            host.say_frames(sent)
        is_shut_out(run, host, why, capsys)


@pytest.mark.parametrize("clock", [None, math.nan, 1e300, -1.0])
def test_a_stranger_with_garbage_or_an_impossible_clock_is_shut_out_in_one_line(run, capsys, clock):
    with Client(run) as stranger:
        for _ in range(50):
            if clock is None:
                stranger.socket.send_multipart([b"0", b"\xff" * 100, b"\x00"])
            else:
                stranger.join("", clock)
        wait_until(lambda: stranger.saw(Refused))
        stranger.join("stranger")
        goes_on(run)
        assert len(printed_of(capsys, "stranger" if clock is None else "swarm:")) == 1
        assert not stranger.saw(Welcome)


def test_a_message_that_is_too_large_ends_the_connection_and_a_name_is_shown_in_one_line(
    run, capsys
):
    with Client(run) as host:
        host.join("large\x1b[31mevil\n" + "x" * (10 << 20) + "/../..")
        wait_until(lambda: host.saw(Welcome))
        host.socket.send_multipart([b"0", b"Finished", bytes(MAX_MESSAGE_BYTES + (1 << 20))])
        wait_until(lambda: any(name.startswith("large") for name, _ in run.left()))
        goes_on(run)
    joined, left = (line for line in capsys.readouterr().out.splitlines() if "large" in line)
    assert "has joined" in joined and joined.isprintable() and len(joined) < 120
    assert left.isprintable() and len(left) < 500


def test_a_ticket_of_another_host_cannot_be_answered(run, capsys):
    with liar(run) as host, liar(run, holds=False) as thief:
        wait_until(lambda: thief.saw(Update))
        thief.say(host.held[-1][1], 0)
        is_shut_out(run, thief, "which it has not", capsys)
        host.finish()
        goes_on(run)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Probed(0, (np.zeros((1, 2), "f"),)), "in other shapes"),
        (Probed(0, (np.full(2, math.nan, "f"),)), "not finite"),
        (Probed(0, (np.zeros(2, np.int64),)), "not finite float32"),
        (dataclasses.replace(UPDATED, pause_s=math.nan), "an update of"),
        (dataclasses.replace(UPDATED, sampled=SampledTokens(new=-1)), "an update of"),
        (dataclasses.replace(UPDATED, sampled=SampledTokens(discarded=2**62)), "an update of"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_that_no_update_or_probe_has_are_refused(answer, why):
    process = RemoteProcess(lambda message: None, "far")
    process.send(Update(0, [], PROBE))
    with pytest.raises(ValueError, match=why):
        process.check_answer(answer)


def test_messages_out_of_order_shut_a_host_out_or_bring_nothing(run, capsys):
    with Client(run) as host:
        host.send(UPDATED, 0)
        host.send(Ready(0.0), 0)
        host.send(Pull(0, None, 0))
        num_late = run.metric("late")
        host.send(Finished([make_trajectory(0, 0)], None), 0)
        wait_until(lambda: len(host.saw(JoinAgain)) == 4)
        assert run.metric("late") == num_late + 1
        host.join("early")
        host.send(Fetched(0), 0)
        wait_until(lambda: host.saw(Refused))
        goes_on(run)
        assert not host.saw(Piece) and len(printed_of(capsys, "early")) == 1


def test_pulls_of_what_is_not_there_bring_nothing(run, capsys):
    answer, answered = run.swarm._answer, []
    run.swarm._answer = lambda host, pull, opened: (
        answer(host, pull, opened),
        answered.append(pull),
    )
    with Client(run) as host:
        host.join("curious")
        wait_until(lambda: host.saw(Welcome))
        for pull in (Pull(10**9, None, 0), Pull(-1, 5, 0), Pull(2**63, 2**63, 2**63)):
            host.send(pull)
            wait_until(lambda pull=pull: pull in answered)
        host.send(Pull(run.version, None, 10**15))
        wait_until(lambda: b"" in [piece.data for piece in host.saw(Piece)])
        goes_on(run)
        assert not printed_of(capsys, "curious")


def test_hosts_whose_trajectories_all_fail_are_shut_out_and_do_not_end_the_run(run, capsys):
    def fails(message):
        if not isinstance(message, Finished):
            return message
        fields = {"finish_reason": "failed", "reward": math.nan, "failure": "x\n" * 400}
        return Finished([dataclasses.replace(t, **fields) for t in message.trajectories], None)

    run.honest.holds = is_answer  # so that nothing succeeds meanwhile
    for _ in range(3):  # together they fail more often than a run may in a row
        with liar(run, holds=False) as host:
            host.changes = fails
            host.finish()
            wait_until(lambda host=host: run.step_if_ready() or host.ended)
    run.honest.finish()
    is_shut_out(run, host, "16 failed trajectories one after the other", capsys)


def test_a_hundred_clients_that_say_nothing_or_have_no_key_change_nothing(run, capsys):
    host, port = run.address.split(":")
    with contextlib.ExitStack() as stack:
        for number in range(120):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            if number >= 100:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        for _ in range(100):
            stack.enter_context(Client(run))
        plain = stack.enter_context(zmq.Context()).socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(f"tcp://{run.address}")
        plain.send_multipart([b"-1", *ENCODE(Join(1, "", "cpu", "plain", time.time()))])
        goes_on(run)
        with Far(run, "late") as late:
            wait_until(lambda: late.saw(Welcome))
            goes_on(run)
        assert not plain.poll(0)
        plain.close()
    assert "plain" not in capsys.readouterr().out
