"""What a host that has the key may send without harm: the run goes on, says one line, and loses nothing."""

import contextlib
import math
import socket
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hosts import PROBE, Client, Far, running
from programs import wait_until
from trajectories import make_trajectory

from asyncrl.messages import Finished, LoadWeights, Probed, Ready, SampledTokens, WeightsLoaded
from extras.swarm.hub import MAX_MESSAGE_BYTES
from extras.swarm.wire import Fetched, Join, JoinAgain, Piece, Pull, Refused, Welcome, decode

pack = msgspec.msgpack.encode
LOADED = WeightsLoaded(0, 0.1, SampledTokens(), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run, and a host that is honest."""
    folder = tmp_path_factory.mktemp("run")
    options = {"async_ratio": 2.0, "max_running_requests": 4, "replicate_prompts": False}
    with running(folder, **options) as run, Far(run, "honest") as run.honest:
        run.probe = PROBE
        # a ticket that was taken from a host may be aborted
        run.controller.dispatcher.move_tickets = lambda: None
        for _ in range(4):
            run.step()
        yield run


def goes_on(run):
    """Two batches are trained on, with the ledger balanced, and the honest host has stayed."""
    for _ in range(2):
        run.step()
    assert "honest" not in dict(run.left())


def lines_of(capsys, name):
    """Lines about a host, but for that it joined."""
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if f"swarm: {name} " in line and "has joined" not in line]


def changed(change):
    """All trajectories are otherwise, by what `change` makes of each."""
    return lambda finished: [
        replace(finished, trajectories=[replace(t, **change(t)) for t in finished.trajectories])
    ]


def of_version(version):
    """All generated tokens are of another version."""
    return changed(
        lambda t: {"policy_versions": np.where(t.loss_mask, np.int32(version), t.policy_versions)}
    )


def probed(scores):
    return lambda message: [replace(message, logprobs=(scores,))]


ATTACKS = [
    (Join, lambda join: [[b"0", b"\xff" * 100, b"\x00"], join], "a message of kind"),
    (Join, lambda join: [join, join], "a Join after its Join"),
    (Join, lambda join: [replace(join, unix_time=math.nan)], "nan as its clock"),
    (Join, lambda join: [replace(join, unix_time=1e300)], "1e+300 as its clock"),
    (Join, lambda join: [replace(join, unix_time=-1.0)], "-1 as its clock"),
    (Ready, lambda ready: [[b"-1"] * 300], "a message of 300 frames"),
    (Ready, lambda ready: [[b"0", b"Piece", pack({})]], "a message of kind b'Piece', not one of"),
    (Ready, lambda ready: [[b"0", b"Finished", pack({"trajectories": "\x1b[2J\n" * 200})]], "a broken Finished"),
    (Ready, lambda ready: [[b"9" * 5000, b"Ready", pack({"startup_s": 0.0})]], "sent"),
    (Ready, lambda ready: [[b"99999", b"Ready", pack({"startup_s": 0.0})]], "engine 99999 that is not up"),
    (Ready, lambda ready: [[b"-1", b"Ready", pack({"startup_s": 0.0})]], "engine -1 that is not up"),
    (Ready, lambda ready: [replace(ready, startup_s=math.nan)], "nan s as the time to start"),
    (Ready, lambda ready: [ready, ready], "Ready of an engine that is up"),
    (Ready, lambda ready: [ready, LOADED], "WeightsLoaded of version 0, which it was not asked for"),
    (Pull, lambda pull: [replace(pull, offset=-5)], "a Pull from byte -5"),
    (Pull, lambda pull: [pull] * 500, "while it pulls"),
    (WeightsLoaded, lambda update: [replace(update, pause_s=math.nan)], "an update of"),
    (WeightsLoaded, lambda update: [replace(update, sampled=SampledTokens(new=-1))], "an update of"),
    (WeightsLoaded, lambda update: [replace(update, sampled=SampledTokens(new=2**62))], "an update of"),
    (Probed, probed(np.zeros((1, 2), "f")), "in other shapes"),
    (Probed, lambda message: [replace(message, decoded=())], "in other shapes"),
    (Probed, probed(np.full(2, math.nan, "f")), "not finite"),
    (Probed, probed(np.zeros(2, np.int64)), "not finite float32"),
    (Finished, lambda finished: [finished, finished], "which it has not"),
    (Finished, lambda finished: [replace(finished, trajectories=finished.trajectories[1:])], "not all of them"),
    (Finished, lambda finished: [replace(finished, trajectories=finished.trajectories[:1] * 2)], "not all of them"),
    (Finished, changed(lambda t: {"finish_reason": "aborted", "reward": math.nan}), "as aborted, which it was not"),
    (Finished, of_version(0), "versions 0 … 0, not from"),
    (Finished, of_version(999), "versions 999 … 999, not from"),
]  # fmt: skip
"""What is said in place of a message of a kind, and why the host is shut out."""


@pytest.mark.parametrize(
    ("kind", "lie", "why"), ATTACKS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_host_that_sends_what_no_honest_one_can_is_shut_out(run, capsys, kind, lie, why):
    """The host is told so, the run says it in one line, and goes on."""
    num_left = len(run.left())
    with Far(run, "liar") as host:
        host.changes = lambda message: lie(message) if type(message) is kind else [message]
        wait_until(lambda: run.step_if_ready() or host.ended)
        assert str(host.end()).startswith(f"the run at {run.address} refuses this host: ")
    goes_on(run)
    ((name, reason),) = run.left()[num_left:]
    (line,) = lines_of(capsys, name)
    assert why in reason and reason in line and len(line) < 500 and line.isprintable()


@pytest.mark.parametrize(
    "array",
    [
        ["<f4", [1 << 40], b"1"],
        ["O", [1], b"1"],
        ["<f4", [1.0], b"1234"],
        ["<f4", [0, 2**63], b""],
        ["|b1", [1], b"\x07"],
    ],
)
def test_bytes_that_are_no_array_are_refused_before_memory_is_taken(array):
    with pytest.raises(ValueError, match=r"as many bytes|a broken Probed"):
        decode(b"Probed", pack({"version": 1, "logprobs": [array], "decoded": []}), [Probed])


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


def test_a_ticket_of_another_host_cannot_be_answered(run):
    with Far(run, "robbed") as robbed, Far(run, "thief") as thief:
        robbed.holds = Finished
        wait_until(lambda: run.step_if_ready() or robbed.held)
        wait_until(lambda: thief.saw(LoadWeights))
        thief.say(robbed.held[-1][1], 0)
        assert "which it has not" in str(thief.end())
        robbed.finish()
        goes_on(run)


def test_messages_out_of_order_and_pulls_of_what_is_not_there_bring_nothing(run, capsys):
    with Client(run) as host:
        host.send(LOADED, 0)
        host.send(Ready(0.0), 0)
        host.send(Pull(0, None, 0))
        num_late = run.metric("late")
        host.send(Finished([make_trajectory(0, 0)], None), 0)
        wait_until(lambda: len(host.saw(JoinAgain)) == 4)
        assert run.metric("late") == num_late + 1
        host.join("early")
        wait_until(lambda: host.saw(Welcome))
        (far_end,) = [other for other in run.swarm.members.hosts.values() if other.name == "early"]
        for pull in (Pull(-1, 5, 0), Pull(2**63, 2**63, 2**63), Pull(run.version, None, 10**15)):
            num_received = far_end.link.num_bytes["received"]
            host.send(pull)
            wait_until(lambda: far_end.link.num_bytes["received"] > num_received)  # noqa: B023
            wait_until(lambda: not far_end.is_pulling)
        wait_until(lambda: host.saw(Piece))
        assert [piece.data for piece in host.saw(Piece)] == [b""]
        host.send(Fetched(0), 0)
        wait_until(lambda: host.saw(Refused))
        goes_on(run)
        assert len(lines_of(capsys, "early")) == 1


def test_hosts_whose_trajectories_all_fail_are_shut_out_and_do_not_end_the_run(run, capsys):
    failure = {"finish_reason": "failed", "reward": math.nan, "failure": "x\n" * 400}
    fail = changed(lambda t: failure)
    run.honest.holds = Finished  # so that nothing succeeds meanwhile
    for _ in range(3):  # together they fail more often than a run may in a row
        with Far(run, "failing") as host:
            host.changes = lambda m: fail(m) if isinstance(m, Finished) else [m]
            wait_until(lambda host=host: run.step_if_ready() or host.ended)
            assert "16 failed trajectories one after the other" in str(host.end())
    run.honest.finish()
    goes_on(run)


def test_a_hundred_clients_that_say_nothing_change_nothing(run):
    host, port = run.address.split(":")
    with contextlib.ExitStack() as stack:
        for number in range(120):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            if number >= 100:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        for _ in range(100):
            stack.enter_context(Client(run))
        goes_on(run)
        with Far(run, "late") as late:
            wait_until(lambda: late.saw(Welcome))
            goes_on(run)
