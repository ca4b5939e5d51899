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
from fake_host import PROBE, FakeHost, running, wait_until

from asyncrl.messages import Finished, Probed, Ready, SampledTokens, Update, Updated
from extras.swarm.hub import MAX_MESSAGE_BYTES
from extras.swarm.swarm import RemoteProcess
from extras.swarm.wire import (
    Beat,
    Codec,
    Fetched,
    Join,
    JoinAgain,
    Leave,
    Piece,
    Pull,
    Refused,
    Welcome,
    read_key,
)

pack = msgspec.msgpack.encode
ENCODE = Codec(()).encode


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, and a host that is honest."""
    with running(tmp_path_factory.mktemp("run"), async_ratio=2.0, max_running_requests=4) as run:
        run.honest = FakeHost(run, "honest").start()
        yield run
        run.honest.close()


def goes_on(run):
    """Two batches are trained on, with the ledger balanced, and the honest host has stayed."""
    for _ in range(2):
        run.step()
    assert "honest" not in [name for name, _ in run.left()]


def printed_of(capsys, name):
    """Lines about a host, but for that it joined."""
    return [
        line
        for line in capsys.readouterr().out.splitlines()
        if f"{name} " in line and "has joined" not in line
    ]


@contextlib.contextmanager
def liar(run, holds=True, **options):
    """A host that has joined and its engine is up; it has a ticket if it `holds`."""
    host = FakeHost(run, f"liar{len(run.events)}", **options)
    host.holds = lambda ticket: True
    with host:
        wait_until(lambda: run.workers_of(host.name))
        if holds:
            wait_until(lambda: run.step_if_ready() or host.held)
        yield host


def is_shut_out(run, host, why, capsys):
    """The host is told so, the run says it in one line, and goes on."""
    wait_until(lambda: host.saw(Refused))
    ((_, told),) = [left for left in run.left() if left[0] == host.name]
    goes_on(run)
    (line,) = printed_of(capsys, host.name)
    assert why in told and told in line and len(line) < 500 and line.isprintable()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([b"0", b"Nonsense", b"\x80"], "a message of kind b'Nonsense'"),
        ([b"-1"] * 300, "a message of 300 frames"),
        ([b"0", b"Fetched", pack({"version": "x" * (10 << 20)})], "a broken Fetched"),
        (
            [b"0", b"Finished", pack({"trajectories": [], "activity": "\x1b[2J\n" * 10})],
            "a broken Finished",
        ),
        ([b"-1", *ENCODE(Ready(0.0))], "of an engine -1 that is not up"),
        ([b"9" * 5000, *ENCODE(Ready(0.0))], "sent"),
        ([b"\xb2", *ENCODE(Ready(0.0))], "invalid literal"),
        ([b"0", *ENCODE(Ready(0.0))], "Ready of an engine that is up"),
        ([b"99999", *ENCODE(Ready(0.0))], "of an engine 99999 that is not up"),
        ([b"1", *ENCODE(Ready(math.nan))], "nan s as the time to start"),
        ([b"0", *ENCODE(Fetched(3))], "Fetched of version 3, which it was not asked for"),
        (
            [b"0", *ENCODE(Updated(0, 0.1, SampledTokens(), None))],
            "Updated of version 0, which it was not asked for",
        ),
        ([b"0", *ENCODE(Probed(0, ()))], "Probed of version 0, which it was not asked for"),
        ([b"-1", *ENCODE(Pull(0, None, -5))], "a Pull from byte -5"),
        ([b"-1", *ENCODE(Join(1, "", "cpu", "liar", 0.0))], "a Join after its Join"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_host_that_sends_what_no_honest_one_can_is_shut_out(run, capsys, frames, why):
    with liar(run, holds=False) as host:
        host.send_frames(frames)
        is_shut_out(run, host, why, capsys)


@pytest.mark.parametrize(
    "frames",
    [
        [b"0", b"\xff" * 100, b"\x00"],
        *([b"-1", *ENCODE(Join(1, "", "cpu", "", t))] for t in (math.nan, 1e300, -1.0)),
    ],
    ids=["garbage", "nan", "late", "early"],
)
def test_a_stranger_with_garbage_or_an_impossible_clock_is_shut_out_in_one_line(
    run, capsys, frames
):
    stranger = FakeHost(run)
    stranger.thread.start()
    for _ in range(50):
        stranger.send_frames(frames)
    wait_until(lambda: stranger.saw(Refused))
    stranger.join()
    goes_on(run)
    assert len(printed_of(capsys, "stranger")) == 1 and not stranger.saw(Welcome)
    stranger.close()


def test_a_name_is_shown_in_one_short_line(run, capsys):
    with FakeHost(run, "\x1b[31mevil\n" + "x" * (10 << 20) + "/../..") as host:
        wait_until(lambda: host.saw(Welcome))
        goes_on(run)
    (line,) = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "evil" in line and "has joined" in line
    ]
    assert line.isprintable() and len(line) < 120


def test_a_message_that_is_too_large_ends_the_connection(run, capsys):
    with liar(run, holds=False) as host:
        host.send_frames([b"0", b"Finished", bytes(MAX_MESSAGE_BYTES + (1 << 20))])
        wait_until(lambda: host.name in dict(run.left()))
        goes_on(run)
    assert len(printed_of(capsys, host.name)) == 1


def changed(index, **fields):
    """A lie about the first of what a ticket asked for."""

    def change(made):
        made[index] = dataclasses.replace(made[index], **fields)
        return made

    return change


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([changed(0, ticket_id=10**9)], "which it has not"),
        ([list, list], "which it has not"),
        ([lambda made: made + made], "not all of them"),
        (
            [lambda made: [*made, dataclasses.replace(made[0], member=made[0].member + 1)]],
            "not all of them",
        ),
        (
            [changed(0, finish_reason="aborted", reward=math.nan)],
            "as aborted, which it was not told to abort",
        ),
    ],
    ids=["another", "twice", "all twice", "one more", "aborted"],
)
def test_trajectories_that_nobody_asked_for_shut_a_host_out(run, capsys, changes, why):
    with liar(run) as host:
        (*_, ticket) = host.had
        for change in changes:
            host.send(Finished(change(host.made(0, ticket)), None), 0)
        is_shut_out(run, host, why, capsys)


def test_a_ticket_of_another_host_cannot_be_answered(run, capsys):
    with liar(run) as host, liar(run, holds=False) as thief:
        (*_, ticket) = host.had
        thief.send(Finished(thief.made(0, ticket), None), 0)
        is_shut_out(run, thief, "which it has not", capsys)
        host.holds = lambda ticket: False
        host.finish()
        goes_on(run)


def test_not_all_members_of_a_ticket_that_asks_for_several_are_refused(tmp_path, capsys):
    with (
        running(tmp_path, replicate_prompts=False) as run,
        FakeHost(run, "honest") as run.honest,
        liar(run) as host,
    ):
        (*_, ticket) = host.had
        assert ticket.num_members == 2
        host.send(Finished(host.made(0, ticket)[:1], None), 0)
        is_shut_out(run, host, "not all of them", capsys)


UPDATED = Updated(0, 0.1, SampledTokens(), None)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        *((Probed(0, shapes), "in other shapes") for shapes in ((), (np.zeros((1, 2), "f"),))),
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


def test_a_session_that_is_replayed_over_a_new_connection_brings_nothing(run, capsys):
    first = FakeHost(run, "recorded").start()
    while len(first.had) < 4:
        run.step()
    first.send(Leave())
    wait_until(lambda: "recorded" in dict(run.left()))
    first.close()
    taken = list(run.taken)
    again = FakeHost(run, "again")
    again.thread.start()
    for frames in first.sent:
        again.send_frames(frames)
    wait_until(lambda: again.saw(Refused) or again.saw(JoinAgain))
    goes_on(run)
    assert len(set(run.taken)) == len(run.taken) > len(taken)
    again.close()
    assert 1 <= len(printed_of(capsys, "recorded")) <= 2


def test_messages_out_of_order_shut_a_host_out_or_bring_nothing(run, capsys):
    host = FakeHost(run, "early")
    host.thread.start()
    host.send(Updated(0, 0.1, SampledTokens(), None), 0)
    host.send(Ready(0.0), 0)
    host.send(Pull(0, None, 0))
    wait_until(lambda: len(host.saw(JoinAgain)) == 3)
    host.join()
    host.send(Fetched(0), 0)
    wait_until(lambda: host.saw(Refused))
    goes_on(run)
    assert not host.saw(Piece) and len(printed_of(capsys, "early")) == 1
    host.close()


def test_a_flood_of_pulls_shuts_a_host_out(run, capsys):
    with liar(run, holds=False) as host:
        for _ in range(500):
            host.send(Pull(run.version, None, 0))
        is_shut_out(run, host, "while it pulls", capsys)


def test_pulls_of_what_is_not_there_bring_nothing(run, capsys):
    answer, answered = run.swarm._answer, []
    run.swarm._answer = lambda host, pull, opened: (
        answer(host, pull, opened),
        answered.append(pull),
    )
    with liar(run, holds=False) as host:
        # a pull while it pulls, be that on its own, is another attack
        wait_until(lambda: host.versions)
        host._act = lambda *_: None
        for pull in (Pull(10**9, None, 0), Pull(-1, 5, 0), Pull(2**63, 2**63, 2**63)):
            host.send(pull)
            wait_until(lambda pull=pull: pull in answered)
        host.send(Pull(run.version, None, 10**15))
        wait_until(lambda: b"" in [piece.data for piece in host.saw(Piece)])
        goes_on(run)
    assert not [line for line in printed_of(capsys, host.name) if "cannot be reached" not in line]


def test_hosts_whose_trajectories_all_fail_are_shut_out_and_do_not_end_the_run(run, capsys):
    run.honest.holds = lambda ticket: True  # so that nothing succeeds meanwhile
    for _ in range(3):  # together they fail more often than a run may in a row
        with liar(run, holds=False) as host:
            host.holds = lambda ticket: False
            host.changes = lambda t: dataclasses.replace(
                t, finish_reason="failed", reward=math.nan, failure="x\n" * 400
            )
            host.finish()  # what it has had already
            wait_until(lambda: run.step_if_ready() or host.saw(Refused))
    run.honest.holds = lambda ticket: False
    run.honest.finish()
    is_shut_out(run, host, "16 failed trajectories one after the other", capsys)


def test_another_key_brings_nothing_through(run, capsys):
    public, secret = zmq.curve_keypair()
    server, host_public, host_secret = read_key(run.key_path)
    for keys in ((server, public, secret), (public, host_public, host_secret)):
        stranger = FakeHost(run, "stranger", keys=keys)
        stranger.thread.start()
        for _ in range(20):
            stranger.join()
        goes_on(run)
        assert not stranger.seen
        stranger.socket.linger = 0
        stranger.close()
    plain = zmq.Context()
    dealer = plain.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(f"tcp://{run.address}")
    dealer.send_multipart([b"-1", *ENCODE(Join(1, "", "cpu", "plain", time.time()))])
    goes_on(run)
    assert not dealer.poll(200)
    plain.destroy()
    printed = capsys.readouterr().out
    assert "stranger" not in printed and "plain" not in printed


def test_a_hundred_clients_that_say_nothing_change_nothing(run, capsys):
    host, port = run.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(100)]
    context = zmq.Context()
    for _ in range(100):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = read_key(
            run.key_path
        )
        dealer.connect(f"tcp://{run.address}")
    garbage = [socket.create_connection((host, int(port))) for _ in range(20)]
    for connection in garbage:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    goes_on(run)
    with FakeHost(run, "late") as late:
        wait_until(lambda: late.saw(Welcome))
        goes_on(run)
        late.send(Beat())
    for connection in (*silent, *garbage):
        connection.close()
    context.destroy()
