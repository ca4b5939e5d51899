"""A host that joins a run: its real far end, a real swarm, and a network that fails."""

import contextlib
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq
from hosts import MODEL_CONFIG, PROBE, Far, running
from programs import wait_until
from stored_forms import digest_of_form
from trajectories import make_trajectory
from user_files import write_user_code

import rollout
from asyncrl.cluster.placement import place
from asyncrl.config import Config, SwarmOptions
from asyncrl.messages import Abort, Finished, LoadWeights, Stop, Stopped, Tickets
from extras.swarm.host_engine import HostEngine
from extras.swarm.hub import make_key
from extras.swarm.join import check_program
from extras.swarm.wire import (
    FROM_ENGINE,
    FROM_HOST,
    PROTOCOL,
    SILENCE_S,
    TO_ENGINE,
    TO_HOST,
    Join,
    Pull,
    read_key,
)

TIMES = "started_at", "ended_at"
NUM_PROBLEMS = 12
"""Of an evaluation."""
OTHER = zmq.curve_keypair()
PROGRAM = """
import os, signal, rollout, fake_worker, zmq

def send_frame(socket, frame, flags=0, **rest):
    sent = send(socket, frame, flags, **rest)
    if flags & zmq.SNDMORE and os.path.exists(f"{os.environ['TMPDIR']}/is_due"):
        signal.raise_signal(signal.SIGINT)
    return sent

send, zmq.Socket.send = zmq.Socket.send, send_frame
rollout.run_worker = fake_worker.run_fake_worker
rollout.main()
"""
"""A host that is interrupted in the middle of each message, once a file says so."""


class HostWalk:
    """A run, and hosts that come, leave, die, are cut off and answer late, as a seed draws it."""

    def __init__(self, run, seed, stack):
        self.run, self.rng, self.stack = run, random.Random(seed), stack
        run.probe = PROBE
        self.hosts, self.num_joins = [], 0
        self.began, self.answered = time.time(), set()
        """When the walk began, and tickets that hosts have answered, as they are verified."""
        self.void = set()
        """Tickets that hosts had not answered when their session ended."""

    def walk(self, num_events):
        events = [self.join, self.leave, self.die, self.finish]
        events += 2 * [self.be_slow, self.drop, self.fall_silent]
        for event in self.rng.choices([*events, *[self.step] * 5], k=num_events):
            if not self.hosts:
                self.join()
            event()
            self.check()

    def check(self):
        """No host is shut out, ends or loses an engine, and nothing of an old session is trained on."""
        assert not self.void & self.run.taken
        self.answered |= {
            trajectory.ticket_id for _, trajectory in self.run.swarm.intake.take_answered()
        }
        assert self.run.controller.config.num_rollout_workers or self.run.taken <= self.answered
        assert self.run.metric("shut_out") == 0
        for host in self.hosts:
            assert host.engines == host.first_engines and not host.ended

    def await_joins(self, number):
        """Wait until so many more have joined, and the run knows of no other engines than those that are there."""
        self.num_joins += number
        num_engines = sum(len(host.engines) for host in self.hosts)
        wait_until(lambda: self.run.metric("joins") == self.num_joins)
        swarm = self.run.swarm
        wait_until(
            lambda: (
                (len(swarm.members.hosts), swarm.members.num_workers)
                == (len(self.hosts), num_engines)
            )
        )
        names = {host.name for host in swarm.members.hosts.values()}
        assert len(names) == len(self.hosts), "hosts of one name are told apart"

    # Events

    def join(self):
        if len(self.hosts) == 3:
            return
        host = Far(self.run)
        clock_ahead_s = self.rng.choice([-3600, 3600])
        host.changes = lambda message: [as_said(host, clock_ahead_s, message)]
        self.hosts.append(self.stack.enter_context(host))
        wait_until(lambda: host.saw(LoadWeights))
        host.first_engines = list(host.engines)
        self.await_joins(1)

    def leave(self):
        self.take_one_out().leave()
        self.await_joins(0)

    def die(self):
        self.take_one_out().die()
        self.await_joins(0)

    def take_one_out(self):
        host = self.hosts.pop(self.rng.randrange(len(self.hosts)))
        self.void |= host.held_tickets
        return host

    def be_slow(self):
        """The engines of a host say nothing, or answer nothing, until they finish."""
        host = self.rng.choice(self.hosts)
        if not host.holds:
            host.holds = self.rng.choice([Finished, object])
        last = self.run.version + 30  # the workers of the run may leave it nothing
        wait_until(lambda: self.run.step_if_ready() or host.held or self.run.version >= last)

    def finish(self):
        self.rng.choice(self.hosts).finish()

    def drop(self):
        """A host loses its connection."""
        host = self.rng.choice(self.hosts)
        self.void |= host.held_tickets
        host.do(host.drop)
        self.await_joins(1)

    def fall_silent(self):
        """For so long that hosts take the run for gone, or it takes them for gone."""
        for host in self.hosts:
            self.void |= host.held_tickets
        if self.rng.random() < 0.5:
            self.run.swarm.hub.do_soon(self.give_up)
        else:
            for host in self.hosts:
                host.do(host.miss_run)
        self.await_joins(len(self.hosts))

    def give_up(self):
        """Hosts are taken for gone; in the hub's thread."""
        for host in self.run.swarm.members.hosts.values():
            host.link.heard_at -= 2 * SILENCE_S
        self.run.swarm.beat()

    def step(self):
        """Train on a batch, whose times are by the clock of the run. Versions may be equal to the bit."""
        if all(host.holds for host in self.hosts):
            self.hosts[0].finish()
        self.run.value_of = self.rng.choice([float, lambda version: 7.0])
        for trajectory in itertools.chain(*(group.trajectories for group in self.run.step())):
            for name in TIMES:
                assert self.began - 60 < getattr(trajectory, name) <= time.time()

    def evaluate(self):
        """All problems are evaluated. The first engine of each host scores the probe, as those of the run do."""
        self.run.publish(evaluate=True)
        self.run.controller.finish_evaluations()
        evaluation = self.run.controller.take_evaluation()
        assert (evaluation["eval/accuracy"], evaluation["eval/problems"]) == (1.0, NUM_PROBLEMS)
        hosts = self.run.swarm.members.hosts.values()
        expected = {next(iter(host.engines.values())).index for host in hosts}
        expected |= set(range(self.run.controller.workers.num_workers))
        probed = set()

        def is_probed():
            probed.update(self.run.controller.take_probes().get(self.run.version, ()))
            return probed >= expected

        wait_until(is_probed)
        assert probed == expected


def as_said(host, clock_ahead_s, message):
    """What a host says whose clock is so far ahead. It pulls only what has changed since the weights that it has."""
    match message:
        case Pull(_, None, _):
            assert host.weights.puller.here is None
        case Join():
            return replace(message, unix_time=message.unix_time + clock_ahead_s)
        case Finished((trajectory,)):
            changes = {name: getattr(trajectory, name) + clock_ahead_s for name in TIMES}
            turns = tuple(tuple(at + clock_ahead_s for at in turn) for turn in trajectory.turns)
            return Finished([replace(trajectory, turns=turns, **changes)], None)
    return message


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_hosts_that_come_and_go_and_lose_their_network_keep_their_engines_and_weights(
    tmp_path, monkeypatch, seed
):
    """Nothing that a host had of an earlier session is trained on, and nothing shuts it out."""
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.05)
    monkeypatch.setattr("extras.swarm.run_connection.JOIN_S", 4.0)
    draw = random.Random(seed)

    def place_some(*given):
        placement = place(*given)
        return replace(placement, workers=placement.workers * draw.choice([1, 2]))

    monkeypatch.setattr("extras.swarm.host_engine.place", place_some)
    # how fast they are is noise, and one that hangs may seem the fastest
    monkeypatch.setattr("extras.swarm.leases.FASTER", 1e6)
    options = {"swarm": SwarmOptions(lease_s=1), "max_running_requests": 4}
    options |= {"num_own": seed, "num_eval": NUM_PROBLEMS}
    with running(tmp_path, **options) as run, contextlib.ExitStack() as stack:
        walk = HostWalk(run, seed, stack)
        walk.walk(40)
        walk.join()
        for host in walk.hosts:
            host.finish()
        for _ in range(3):
            walk.step()
            walk.check()
        walk.evaluate()
        run.swarm.stop()
        assert {host.end() for host in walk.hosts} == {"the run has ended"}


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"steps": 9, "lr": 0.1, "resume": "run", "run_name": "again"}, "the run has ended"),
        ({"temperature": 0.5}, "another run listens at "),
        (None, "the run was out of reach for "),
    ],
)
def test_a_host_joins_a_run_again_that_is_started_again_but_no_other_and_ends_if_it_stays_away(
    tmp_path, monkeypatch, changes, end
):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.05)
    with contextlib.ExitStack() as stack:
        with running(tmp_path, join_timeout_s=60.0 if changes else 0.5) as run:
            far = stack.enter_context(Far(run))
            run.step()
            engines = list(far.engines)
            run.swarm.members.hosts.clear()  # it is killed: nobody is told
        if changes is not None:
            with running(tmp_path, listen=run.address, join_timeout_s=60.0, **changes) as run:
                wait_until(lambda: run.step_if_ready() or run.version == 2 or far.ended)
                run.swarm.stop()
        assert str(far.end()).startswith(end) and far.engines == engines


LACKS_CODE = "loss.py:loss: not what the run has, or imports; copy runs/NAME/code"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("PROTOCOL", 99, "its protocol is 99, the run's 6; check out the same commit"),
        ("code_digest", lambda: "f" * 64, "its code is ffffffffffff, the run's "),
        ("visible_gpus", lambda: ["a GPU"], "it computes on cuda, the run on cpu: "),
        ("user_code_names", lambda config: ["loss.py:loss"], LACKS_CODE),
        ("user_code_names", lambda config: ["missing/loss.py:loss"], LACKS_CODE),
        ("read_key", lambda path: (OTHER[0], *OTHER), "has another key"),
        ("read_key", lambda path: (read_key(path)[0], *OTHER), "has another key"),
        ("CONNECT_MS", None, "no answer in 1 s; is the run there?"),
    ],
)
def test_a_host_that_cannot_sample_for_a_run_ends_in_one_line_before_it_starts_anything(
    tmp_path, monkeypatch, capsys, name, value, why
):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.05)
    (tmp_path / "loss.py").write_text("def loss(): ...  # another than the run's, which has none")
    monkeypatch.chdir(tmp_path)
    with running(tmp_path) as run:
        if value is None:
            run.address = "127.0.0.1:1"
            monkeypatch.setattr("extras.swarm.run_connection.JOIN_S", 0.6)
        else:
            module = "join" if name == "user_code_names" else "run_connection"
            monkeypatch.setattr(f"extras.swarm.{module}.{name}", value)
        with Far(run) as far:
            error = far.end()
            assert isinstance(error, ValueError) and not far.engines
            assert why in str(error) and "\n" not in str(error)
        wait_until(lambda: run.metric("machines") == 0)
    refused = [line for line in capsys.readouterr().out.splitlines() if "was refused" in line]
    assert len(refused) == why.startswith("it")
    assert all(line.startswith(f"swarm: far was refused: {why}") for line in refused)


class Engine:
    """Keeps what it is told."""

    def __init__(self):
        self.told = []
        self.send = self.told.append


def test_a_ticket_waits_for_the_answer_to_one_of_the_same_id_that_another_start_of_the_run_gave():
    old, new = (replace(make_trajectory(3, 0), ticket_id=17) for _ in range(2))
    tickets = [SimpleNamespace(ticket_id=number) for number in (17, 18)]
    engine = Engine()
    host = HostEngine(engine)
    host.tell(Tickets(tickets[:1]))
    host.forget_run()
    engine.told.clear()
    host.tell(Tickets(tickets))
    host.tell(Abort([17, 18]))
    assert engine.told == [Tickets(tickets[1:]), Abort([18])]
    engine.told.clear()
    assert host.hear(Finished([old], None)) is None
    assert engine.told == [Tickets(tickets[:1]), Abort([17])]
    assert host.hear(Finished([new], None)) == Finished([new], None)


@pytest.mark.parametrize("task", ["agent:bash -c id", "verifiers:wordle"])
def test_a_host_starts_no_program_that_its_own_command_line_does_not_name(task):
    welcome = SimpleNamespace(options=Config(task=task).as_dict())
    check_program(welcome, task)
    check_program(SimpleNamespace(options=Config(task="agent:a.py:run").as_dict()), None)
    with pytest.raises(
        ValueError, match=re.escape(f"if you allow it, add --task {shlex.quote(task)}")
    ):
        check_program(welcome, "agent:other")


def test_a_key_is_kept_by_a_run_that_goes_on_and_is_the_owners_alone(tmp_path):
    first = make_key(tmp_path / "swarm.key")
    assert make_key(tmp_path / "swarm.key") == first != make_key(tmp_path / "other.key")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert first[1].decode() not in (tmp_path / "swarm.key").read_text(), "it is the run's secret"


def test_a_host_whose_engine_dies_ends_with_its_report_and_the_run_goes_on(tmp_path, monkeypatch):
    """Engines have as many GPUs as the run's own, or as is told. They have user code from the host's folder.

    They have half of the run's timeout, so that they end first.
    """
    path = write_user_code(tmp_path / "own", "def loss(): ...\n")
    here = tmp_path / "here"
    shutil.copytree(path.parent, here)
    monkeypatch.chdir(here)
    with running(tmp_path, algo=f"{path}:loss", timeout_s=50.0, rollout_tp=2) as run:
        with Far(run) as far:
            assert "--rollout-tp 2 splits an engine over GPUs" in str(far.end())
            assert not far.engines
        with Far(run, rollout_tp=1) as far:
            run.step()
            assert (far.folder / "config.json").read_text() == MODEL_CONFIG
            process = far.engines[0].process
            config = process.spec.config
            assert (config.algo, config.timeout_s) == (f"{here / path.name}:loss", 25)
            far.holds = Stopped  # one that dies says nothing
            process.send(Stop())
            assert isinstance(far.end(), RuntimeError) and str(far.end()) == process.death_report()
        with Far(run, rollout_tp=1):
            for _ in range(2):
                run.step()


def test_a_host_that_is_stopped_again_and_again_leaves_in_order(tmp_path):
    folders = f"{Path.cwd()}:{Path.cwd() / 'tests'}"
    environment = os.environ | {"PYTHONPATH": folders, "TMPDIR": str(tmp_path)}
    with running(tmp_path) as run, open(tmp_path / "out", "w") as out:
        command = [sys.executable, "-c", PROGRAM, "--join", run.address, "--key", run.key_path]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        run.step()
        engines = psutil.Process(process.pid).children(recursive=True)
        (tmp_path / "is_due").touch()
        wait_until(run.left)
        for number in itertools.cycle((signal.SIGTERM, signal.SIGINT)):
            if process.poll() is not None:
                break
            process.send_signal(number)
            time.sleep(0.01)
        assert process.returncode == 0
        ((_, why),) = run.left()
        # Its connection may be gone before its last word is read.
        assert why in ("has left", "cannot be reached (Host unreachable)")
        assert not psutil.wait_procs(engines, 20)[1]
    joined, left = (tmp_path / "out").read_text().splitlines()
    assert joined.startswith("joined ") and left == "left: stopped here"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:7733", "host:7733 ", "é:7733", "host:65536"])
def test_an_address_that_is_no_host_and_port_is_refused_at_once(monkeypatch, address):
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--join", address, "--key", "none"])
    line = "error: --join must be HOST:PORT, as 127.0.0.1:7733, got"
    with pytest.raises(SystemExit, match=line):
        rollout.main()


def test_hosts_are_sent_to_the_node_with_the_fewest_workers(tmp_path):
    """The first node gets a host if both have as many."""
    with running(tmp_path) as first, running(tmp_path) as second:  # of one key
        admission = first.swarm.admission
        admission.addresses, admission.loads = [first.address, second.address], [1, 0]
        with Far(first), Far(first):
            wait_until(lambda: (first.metric("joins"), second.metric("joins")) == (1, 1))
            first.step()
            second.step()


def test_another_form_of_messages_has_another_number():
    """A changed digest needs a new PROTOCOL, a line in CHANGELOG.md and then the digest here."""
    kinds = *TO_ENGINE, *FROM_ENGINE, *TO_HOST, *FROM_HOST
    assert (PROTOCOL, digest_of_form(kinds)) == (6, "a84c33757c41eeba")
