"""A host that joins a run: its real far end, a real swarm, and a network that fails."""

import contextlib
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


def test_a_short_stall_of_the_network_loses_nothing(lasting):
    lasting.relay.is_stalled = True
    time.sleep(1.0)
    lasting.relay.is_stalled = False
    for _ in range(3):
        lasting.step()
    assert joins(lasting) == 1 and not lasting.left() and lasting.host.puller.here.version >= 2


def test_versions_that_are_equal_to_the_bit_are_told_apart(lasting, monkeypatch):
    monkeypatch.setattr(lasting, "value_of", lambda version: 7.0)
    num_left = len(lasting.left())
    for _ in range(4):
        lasting.step()
    assert len(lasting.left()) == num_left


@pytest.mark.parametrize(
    "fault", ["the run's side gave it up", "the connection broke", "neither side heard the other"]
)
def test_a_host_joins_again_with_its_engines_and_weights_and_says_nothing_of_the_old_session(
    lasting, monkeypatch, fault
):
    run, num_joins = lasting, joins(lasting)
    run.pulls.clear()
    if fault == "the connection broke":
        run.relay.drop()
    elif fault == "the run's side gave it up":
        hosts = list(run.swarm._hosts.values())
        run.swarm.hub.do_soon(lambda: [run.swarm._lose(host, "was given up") for host in hosts])
    else:
        monkeypatch.setattr("extras.swarm.link.SILENCE_S", 1.0)
        run.relay.is_stalled = True
        wait_until(lambda: len(run.left()) == num_joins)
        run.relay.is_stalled = False
    wait_until(lambda: joins(run) == num_joins + 1)
    monkeypatch.undo()
    run.host._hear(0, Probed(1, (np.zeros(3, np.float32),)))  # asked for in the old session
    for _ in range(3):
        run.step()
    assert run.host.engines == [run.engine]
    assert None not in run.pulls, "what it pulls is what has changed since"
    assert joins(run) == num_joins + 1 and run.metric("shut_out") == 0


def test_what_a_host_had_of_an_old_session_is_issued_again_and_not_trained_on(lasting):
    run, num_joins = lasting, joins(lasting)
    run.host.holds = lambda trajectory: True
    wait_until(lambda: run.step_if_ready() or run.host.held)
    run.host.holds = lambda trajectory: False
    old = {message.trajectories[0].ticket_id for message, _ in run.host.held}
    run.relay.drop()
    wait_until(lambda: joins(run) == num_joins + 1)
    for message, _ in run.host.held:
        run.host._hear(0, message)  # its engine answers only now
    for _ in range(3):
        run.step()
    assert not old & run.taken and run.metric("shut_out") == 0


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


@pytest.mark.parametrize("is_same_run", [True, False])
def test_a_host_with_another_key_says_so_at_once(tmp_path, capsys, is_same_run):
    with running(tmp_path) as run:
        make_key(tmp_path / "other.key")
        if is_same_run:  # but not the hosts' key
            keys = json.loads((tmp_path / "other.key").read_text())
            keys["run"] = json.loads(run.key_path.read_text())["run"]
            (tmp_path / "other.key").write_text(json.dumps(keys))
        start = time.monotonic()
        other = SimpleNamespace(
            address=run.address, key_path=tmp_path / "other.key", folder=tmp_path
        )
        with Far(other, "stranger") as stranger:
            assert fails(stranger, ValueError, "has another key") and not stranger.heard
        assert time.monotonic() - start < 20
        with Far(run):
            run.step()
    assert "swarm: stranger" not in capsys.readouterr().out


def test_a_host_whose_run_is_not_there_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.join.JOIN_S", 1.0)
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    make_key(tmp_path / "swarm.key")
    nobody = SimpleNamespace(
        address="127.0.0.1:1", key_path=tmp_path / "swarm.key", folder=tmp_path
    )
    with Far(nobody) as far:
        assert fails(far, ValueError, "no answer in 1 s; is the run there?")


@pytest.mark.parametrize(
    ("name", "other", "why"),
    [
        ("PROTOCOL", 99, "its protocol is 99, the run's 4; check out the same commit"),
        ("code_digest", lambda: "f" * 64, "its code is ffffffffffff, the run's "),
        ("visible_gpus", lambda: ["a GPU"], "it computes on cuda, the run on cpu: their log-probs"),
    ],
)
def test_a_host_that_is_refused_ends_with_the_reason_and_the_run_says_it_in_one_line(
    tmp_path, monkeypatch, capsys, name, other, why
):
    monkeypatch.setattr(f"extras.swarm.join.{name}", other)
    with running(tmp_path) as run, Far(run) as far:
        assert fails(far, ValueError, why) and not far.engines
        assert run.metric("machines") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"swarm: far was refused: {why}")]


def test_a_host_has_engines_of_as_many_gpus_as_the_runs_own_or_as_it_is_told(tmp_path):
    with running(tmp_path, rollout_tp=2) as run:
        with Far(run, main=run_fake_worker) as far:
            assert fails(far, ValueError, "--rollout-tp 2 splits an engine over GPUs")
            assert not far.engines
        with Far(run, main=run_fake_worker, rollout_tp=1) as far:
            run.step()
            assert len(far.engines) == 1 and not far.ended


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_text("def loss(): ...  # another\n"), Path.unlink]
)
def test_a_host_that_lacks_user_code_or_has_another_ends_before_it_starts_anything(
    tmp_path, monkeypatch, spoil
):
    path = write_user_code(tmp_path / "own", "def loss(): ...\n")
    monkeypatch.chdir(path.parent)
    with running(tmp_path, algo=f"{path}:loss") as run:
        spoil(path)
        line = f"{path}:loss: not what the run has, or imports; copy runs/NAME/code"
        with Far(run) as far:
            assert fails(far, ValueError, line) and not far.engines


def run_worker_that_dies(spec, connection):
    threading.Timer(1.0, os._exit, [3]).start()
    run_fake_worker(spec, connection)


def run_worker_that_notes_its_options(spec, connection):
    config = spec.config
    Path(spec.log_path).with_name("options").write_text(f"{config.algo} {config.timeout_s:g}")
    run_fake_worker(spec, connection)


def test_engines_of_a_host_have_user_code_from_its_folder_and_half_of_the_timeout_so_that_they_end_first(
    tmp_path, monkeypatch
):
    path = write_user_code(tmp_path / "own", "def loss(): ...\n")
    here = tmp_path / "here"
    shutil.copytree(path.parent, here)
    monkeypatch.chdir(here)
    main = run_worker_that_notes_its_options
    with running(tmp_path, algo=f"{path}:loss", timeout_s=50.0) as run, Far(run, main=main) as far:
        run.step()
        assert (far.folder / "options").read_text() == f"{here / path.name}:loss 25"
        (engine,) = far.engines
        far.leave()
        assert not psutil.pid_exists(engine.process.process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_host_that_is_stopped_again_and_again_leaves_in_order(tmp_path, number):
    folders = f"{Path.cwd()}:{Path.cwd() / 'tests'}"
    environment = os.environ | {"PYTHONPATH": folders, "TMPDIR": str(tmp_path)}
    with running(tmp_path) as run, open(tmp_path / "out", "w") as out:
        command = [sys.executable, "-c", PROGRAM, "--join", run.address, "--key", run.key_path]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        run.step()
        engines = psutil.Process(process.pid).children(recursive=True)
        while process.poll() is None:
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


@pytest.mark.parametrize(("num_joined", "node"), [({}, 1), ({1: 1}, 0), ({1: 3}, 0)])
def test_hosts_are_sent_to_the_node_with_the_fewest_workers(tmp_path, num_joined, node):
    """The first node gets a host if both have as many."""
    with running(tmp_path) as first, running(tmp_path) as second:  # of one key
        first.swarm.nodes = [(first.address, 1), (second.address, 0)]
        first.swarm.num_joined = Counter(num_joined)
        with Far(first) as far:
            (first, second)[node].step()
            assert (joins(first), joins(second)) == (1 - node, node)
            assert ends_with((first, second)[node], far)


def test_a_host_whose_engine_dies_ends_with_its_report_and_the_run_goes_on(tmp_path):
    with running(tmp_path) as run:
        with Far(run, main=run_worker_that_dies) as far:
            wait_until(lambda: run.step_if_ready() or far.ended)
            assert isinstance(far.end(), RuntimeError) and "exited with code 3" in str(far.ended)
        with Far(run, "other"):
            for _ in range(2):
                run.step()


def test_a_host_whose_disk_is_full_ends_in_one_line_and_the_run_goes_on(tmp_path):
    with running(tmp_path) as run:
        far = Far(run, "far", main=run_fake_worker)
        mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(far.folder)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("only root may mount a disk that is full")
        try:
            (far.folder / "full").write_bytes(bytes(4096))
            with far:
                assert isinstance(far.end(), OSError)
            assert "No space left on device" in str(far.ended)
            with Far(run, "other"):
                run.step()
        finally:
            subprocess.run(["umount", str(far.folder)], check=True)
