"""A host that joins a run: its real far end, a real swarm, and a network that fails."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from fake_worker import run_fake_worker
from hosts import Far, running, wait_until
from user_files import write_user_code

import rollout
from asyncrl.config import SwarmOptions
from asyncrl.messages import Probed
from extras.swarm.hub import make_key

PROBED = Probed(1, (np.zeros(3, np.float32),))
"""Nobody asked for it in this session."""
PROGRAM = """
import sys, rollout, fake_worker
rollout.run_worker = fake_worker.run_fake_worker
rollout.main()
"""


class Relay:
    """A network between a host and its run, that stalls and breaks."""

    def __init__(self, address):
        self.upstream = address.split(":")
        self.is_stalled = self.is_closed = False
        self.sockets = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection((self.upstream[0], int(self.upstream[1])))
            except OSError:
                return  # the run has ended, or the relay is closed
            self.sockets += [near, far]
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while self.is_stalled:
                    time.sleep(0.005)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def drop(self):
        """Break all connections."""
        for connection in self.sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self.sockets.clear()

    def close(self):
        self.is_stalled = False
        self.listener.close()
        self.drop()


def fails(host, kind, words):
    """Whether a host ends by itself, in one line with these words."""
    error = host.end()
    return isinstance(error, kind) and words in str(error) and "\n" not in str(error)


def ends_with(run, host):
    """Whether a host ends as it should when the run ends."""
    run.swarm.stop()
    return host.end() == "the run has ended"


def joins(run):
    return sum(event["event"] == "machine_joined" for event in run.events)


@pytest.fixture(scope="module", autouse=True)
def _others_children():
    """A controller that stops ends all children of its process, and here those of the host are, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.controller.workers.kill_session", lambda pid: None)
        yield


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """A run, and a host that has joined it through a relay; the tests that share them do things to the relay."""
    tmp_path = tmp_path_factory.mktemp("lasting")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extras.swarm.link.BEAT_S", 0.2)
        patch.setattr("extras.swarm.join.JOIN_S", 4.0)
        with running(tmp_path, swarm=SwarmOptions(lease_s=3)) as run:
            run.relay, run.pulls = Relay(run.address), []
            open_way = run.controller.pulled.open
            run.controller.pulled.open = lambda version, base: (
                run.pulls.append(base) or open_way(version, base)
            )
            relayed = SimpleNamespace(
                address=run.relay.address, key_path=run.key_path, folder=tmp_path
            )
            with Far(relayed) as run.host:
                run.step()
                (run.engine,) = run.host.engines
                yield run
                assert ends_with(run, run.host)
            run.relay.close()


def stall(run):
    run.relay.is_stalled = True
    time.sleep(0.5)
    run.relay.is_stalled = False


def drop(run):
    run.relay.drop()


def give_up(run):
    hosts = list(run.swarm._hosts.values())
    run.swarm.hub.do_soon(lambda: [run.swarm._lose(host, "was given up") for host in hosts])


def fall_silent(run):
    num_left = len(run.left())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("extras.swarm.link.SILENCE_S", 1.0)
        run.relay.is_stalled = True
        wait_until(lambda: len(run.left()) > num_left)
        run.relay.is_stalled = False
        wait_until(lambda: joins(run) > num_left + 1)


@pytest.mark.parametrize("fault", [stall, drop, give_up, fall_silent])
def test_a_host_outlives_its_network_with_its_engines_and_weights_and_says_nothing_of_the_old_session(
    lasting, monkeypatch, fault
):
    """Versions are equal to the bit until the host is back."""
    run, num_joins, is_new = lasting, joins(lasting), fault is not stall
    run.pulls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(run, "value_of", lambda version: 7.0)
        run.host.holds = lambda trajectory: True
        wait_until(lambda: run.step_if_ready() or run.host.held)
        run.host.holds = lambda trajectory: False
        old = {message.trajectories[0].ticket_id for message, _ in run.host.held}
        fault(run)
        wait_until(lambda: joins(run) == num_joins + is_new)
        if is_new:
            for message in (*(message for message, _ in run.host.held), PROBED):
                run.host._hear(0, message)  # its engine answers only now
            run.host.held.clear()
        run.host.finish()
        for _ in range(3):
            run.step()
    run.step()
    assert run.host.engines == [run.engine] and joins(run) == num_joins + is_new
    assert None not in run.pulls, "what it pulls is what has changed since"
    assert not (is_new and old & run.taken) and run.metric("shut_out") == 0


def test_a_host_joins_again_when_the_run_was_started_again_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    with contextlib.ExitStack() as stack:
        with running(tmp_path) as run:
            port = run.swarm.hub.port
            far = stack.enter_context(Far(run))
            run.step()
            engines = list(far.engines)
            run.swarm._hosts.clear()  # it is killed: nobody is told
        # As --resume does, with options that may change.
        changes = {"steps": 9, "lr": 0.1, "resume": str(tmp_path), "run_name": "again"}
        with running(tmp_path, listen=f"127.0.0.1:{port}", **changes) as run:
            for _ in range(2):
                run.step()
            assert far.engines == engines and ends_with(run, far)


def test_a_key_is_kept_by_a_run_that_goes_on_and_is_the_owners_alone(tmp_path):
    first = make_key(tmp_path / "swarm.key")
    assert make_key(tmp_path / "swarm.key") == first != make_key(tmp_path / "other.key")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert first[1].decode() not in (tmp_path / "swarm.key").read_text(), (
        "hosts do not get the run's secret"
    )


def make_other_key(run, patch):
    make_key(run.folder / "other.key")


def make_other_key_of_hosts(run, patch):
    """The run's own key is right."""
    make_key(run.folder / "other.key")
    keys = json.loads((run.folder / "other.key").read_text())
    keys["run"] = json.loads(run.key_path.read_text())["run"]
    (run.folder / "other.key").write_text(json.dumps(keys))


def leave_nobody(run, patch):
    run.address = "127.0.0.1:1"
    patch.setattr("extras.swarm.join.JOIN_S", 1.0)
    patch.setattr("extras.swarm.link.BEAT_S", 0.1)


def differ_in(name, value):
    return lambda run, patch: patch.setattr(f"extras.swarm.join.{name}", value)


def change_user_code(run, patch):
    Path("loss.py").write_text("def loss(): ...  # another\n")


def remove_user_code(run, patch):
    Path("loss.py").unlink()


LACKS_CODE = "loss.py:loss: not what the run has, or imports; copy runs/NAME/code"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (make_other_key, "has another key"),
        (make_other_key_of_hosts, "has another key"),
        (leave_nobody, "no answer in 1 s; is the run there?"),
        (differ_in("PROTOCOL", 99), "its protocol is 99, the run's 4; check out the same commit"),
        (differ_in("code_digest", lambda: "f" * 64), "its code is ffffffffffff, the run's "),
        (differ_in("visible_gpus", lambda: ["a GPU"]), "it computes on cuda, the run on cpu: "),
        (change_user_code, LACKS_CODE),
        (remove_user_code, LACKS_CODE),
    ],
)
def test_a_host_that_cannot_sample_for_a_run_ends_in_one_line_before_it_starts_anything(
    tmp_path, monkeypatch, capsys, spoil, why
):
    monkeypatch.chdir(tmp_path)
    Path("loss.py").write_text("def loss(): ...\n")
    with running(tmp_path, algo=f"{Path.cwd() / 'loss.py'}:loss") as run:
        spoil(run, monkeypatch)
        if (tmp_path / "other.key").exists():
            run.key_path = tmp_path / "other.key"
        with Far(run) as far:
            assert fails(far, ValueError, why) and not far.engines
        assert run.metric("machines") == 0
    refused = [line for line in capsys.readouterr().out.splitlines() if "was refused" in line]
    assert len(refused) == why.startswith("it")
    assert all(line.startswith(f"swarm: far was refused: {why}") for line in refused)


def test_a_host_has_engines_of_as_many_gpus_as_the_runs_own_or_as_it_is_told(tmp_path):
    with running(tmp_path, rollout_tp=2) as run:
        with Far(run, main=run_fake_worker) as far:
            assert fails(far, ValueError, "--rollout-tp 2 splits an engine over GPUs")
            assert not far.engines
        with Far(run, main=run_fake_worker, rollout_tp=1) as far:
            run.step()
            assert len(far.engines) == 1 and not far.ended


def run_worker_that_dies(spec, connection):
    config = spec.config
    Path(spec.log_path).with_name("options").write_text(f"{config.algo} {config.timeout_s:g}")
    threading.Timer(1.0, os._exit, [3]).start()
    run_fake_worker(spec, connection)


def test_a_host_whose_engine_dies_ends_with_its_report_and_the_run_goes_on(tmp_path, monkeypatch):
    """Engines have user code from the host's folder, and half of the run's timeout, so that they end first."""
    path = write_user_code(tmp_path / "own", "def loss(): ...\n")
    here = tmp_path / "here"
    shutil.copytree(path.parent, here)
    monkeypatch.chdir(here)
    with running(tmp_path, algo=f"{path}:loss", timeout_s=50.0) as run:
        with Far(run, main=run_worker_that_dies) as far:
            wait_until(lambda: run.step_if_ready() or far.ended)
            assert isinstance(far.end(), RuntimeError) and "exited with code 3" in str(far.ended)
            assert (far.folder / "options").read_text() == f"{here / path.name}:loss 25"
        with Far(run, "other"):
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
        for number in itertools.cycle((signal.SIGTERM, signal.SIGINT)):
            if process.poll() is not None:
                break
            process.send_signal(number)
            time.sleep(0.01)
        assert process.returncode == 0
        wait_until(run.left)
        ((_, why),) = run.left()
        # Its connection may be gone before its last word is read.
        assert why in ("has left", "cannot be reached (Host unreachable)")
        assert not psutil.wait_procs(engines, 20)[1]
    joined, left = (tmp_path / "out").read_text().splitlines()
    assert joined.startswith("joined ") and left == "left: stopped here"


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:7733", "host:port", "host:7733 ", "é:7733", "127.0.0.1:0", "127.0.0.1:65536"],
)
def test_an_address_that_is_no_host_and_port_is_refused_at_once(monkeypatch, address):
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--join", address, "--key", "none"])
    line = "error: --join must be HOST:PORT, as 127.0.0.1:7733, got"
    with pytest.raises(SystemExit, match=line):
        rollout.main()


@pytest.mark.parametrize(("num_joined", "node"), [({}, 1), ({1: 1}, 0)])
def test_hosts_are_sent_to_the_node_with_the_fewest_workers(tmp_path, num_joined, node):
    """The first node gets a host if both have as many."""
    with running(tmp_path) as first, running(tmp_path) as second:  # of one key
        first.swarm.nodes = [(first.address, 1), (second.address, 0)]
        first.swarm.num_joined = Counter(num_joined)
        with Far(first) as far:
            (first, second)[node].step()
            assert (joins(first), joins(second)) == (1 - node, node)
            assert ends_with((first, second)[node], far)
