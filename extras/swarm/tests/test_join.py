"""A host that joins a run: its real far end with a fake engine, a real swarm, and a network that fails."""

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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from fake_host import FakeHost, running, wait_until
from fake_worker import run_fake_worker
from own_files import write_own

from asyncrl.config import SwarmOptions
from asyncrl.messages import Probed
from extras.swarm.hub import make_key
from extras.swarm.join import JoinedHost
from extras.swarm.wire import Leave, read_key

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


class Far:
    """A joined host that serves in a thread."""

    def __init__(self, run, folder, main=run_fake_worker, rollout_tp=None):
        """`run` has an `address` and a `key_path`."""
        folder.mkdir(exist_ok=True)
        self.host = JoinedHost(run.address, str(run.key_path), main, folder, rollout_tp)
        self.ended = []
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        try:
            self.ended.append(self.host.serve())
        except Exception as error:  # whatever it is, the test looks at it
            self.ended.append(error)

    def end(self):
        """Wait for its end, leave in order. Returns why it ended."""
        self.thread.join(30)
        if not self.ended:
            self.host._hear(10**6, None)  # no such engine: an error ends it
            self.thread.join()
        self.host.close()
        return self.ended[0]

    def ends_with(self, run):
        """Whether it ends as it should when the run ends."""
        run.swarm.stop()
        assert self.end() == "the run has ended"

    def fails(self, kind, words):
        """Whether it ends by itself, in one line with these words."""
        error = self.end()
        assert isinstance(error, kind) and words in str(error) and "\n" not in str(error)


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
        answers = lambda index: "hang" if index in HANGING else "ok"  # noqa: E731
        with running(tmp_path, answers=answers, swarm=SwarmOptions(lease_s=3)) as run:
            run.relay, run.pulls = Relay(run.address), []
            open_way = run.controller.pulled.open
            run.controller.pulled.open = lambda version, base: (
                run.pulls.append(base) or open_way(version, base)
            )
            run.far = Far(
                SimpleNamespace(address=run.relay.address, key_path=run.key_path), tmp_path / "far"
            )
            run.host = run.far.host
            wait_until(lambda: run.host.engines and run.host.engines[0].is_up)
            run.step()
            run.process = run.host.engines[0].process.process.pid
            yield run
            run.far.ends_with(run)
            run.relay.close()
    assert not psutil.pid_exists(run.process)


HANGING = set()


def joins(run):
    return sum(event["event"] == "machine_joined" for event in run.events)


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
    "way", ["the run's side gave it up", "the connection broke", "neither side heard the other"]
)
def test_a_host_joins_again_with_its_engines_and_weights_and_says_nothing_of_the_old_session(
    lasting, monkeypatch, way
):
    run, num_joins = lasting, joins(lasting)
    lasting.pulls.clear()
    if way == "the connection broke":
        run.relay.drop()
    elif way == "the run's side gave it up":
        run.swarm.hub.do_soon(
            lambda: [run.swarm._lose(m, "was given up") for m in list(run.swarm._hosts.values())]
        )
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
    assert run.host.engines[0].process.process.pid == run.process and len(run.host.engines) == 1
    assert None not in run.pulls, "what it pulls is what has changed since"
    assert joins(run) == num_joins + 1 and run.swarm.take_metrics()["swarm/shut_out"].value == 0


def test_what_a_host_had_of_an_old_session_is_issued_again_and_not_trained_on(lasting):
    run, num_joins = lasting, joins(lasting)
    HANGING.update(range(10_000))
    wait_until(lambda: run.step_if_ready() or run.host.engines[0].tickets)
    old = set(run.host.engines[0].tickets)
    HANGING.clear()
    run.relay.drop()
    wait_until(lambda: joins(run) == num_joins + 1)
    assert not old & run.host.engines[0].tickets, "they were issued again, by other numbers"
    with FakeHost(run, "near"):  # where these tickets end, when their leases have
        for _ in range(3):
            run.step()


def test_a_host_joins_again_when_the_run_was_started_again_with_its_key(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    far, tmp = None, tmp_path
    with running(tmp) as run:
        port = run.swarm.hub.port
        far = Far(run, tmp / "far")
        run.step()
        process = far.host.engines[0].process.process.pid
        run.swarm._hosts.clear()  # it is killed: nobody is told
    # As --resume does, with options that may change.
    with running(
        tmp, listen=f"127.0.0.1:{port}", steps=9, lr=0.1, resume=str(tmp), run_name="again"
    ) as run:
        for _ in range(2):
            run.step()
        assert far.host.engines[0].process.process.pid == process
        far.ends_with(run)


def test_a_key_is_kept_by_a_run_that_goes_on_and_is_the_owners_alone(tmp_path):
    first = make_key(tmp_path / "swarm.key")
    assert make_key(tmp_path / "swarm.key") == first != make_key(tmp_path / "other.key")
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    assert first[1].decode() not in (tmp_path / "swarm.key").read_text(), (
        "hosts do not get the run's secret"
    )


@pytest.mark.parametrize("is_same_run", [True, False])
def test_a_host_with_another_key_says_so_at_once(tmp_path, is_same_run):
    with running(tmp_path) as run:
        keys_of_run = read_key(run.key_path)
        make_key(tmp_path / "other.key")
        if is_same_run:  # but not the hosts' key
            keys = json.loads((tmp_path / "other.key").read_text())
            keys["run"] = json.loads(Path(run.key_path).read_text())["run"]
            (tmp_path / "other.key").write_text(json.dumps(keys))
        start = time.monotonic()
        run.key_path = tmp_path / "other.key"
        Far(run, tmp_path / "far").fails(ValueError, "has another key")
        assert time.monotonic() - start < 20
        with FakeHost(run, keys=keys_of_run):
            run.step()


def test_a_host_whose_run_is_not_there_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.join.JOIN_S", 1.0)
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    make_key(tmp_path / "swarm.key")
    nobody = SimpleNamespace(address="127.0.0.1:1", key_path=tmp_path / "swarm.key")
    far = Far(nobody, tmp_path / "far")
    far.fails(ValueError, "no answer in 1 s; is the run there?")


def test_a_host_that_is_refused_ends_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.join.code_digest", lambda: "f" * 64)
    with running(tmp_path) as run:
        Far(run, tmp_path / "far").fails(ValueError, "its code is ffffffffffff")


def test_a_host_has_engines_of_as_many_gpus_as_the_runs_own_or_as_it_is_told(tmp_path):
    with running(tmp_path, rollout_tp=2) as run:
        far = Far(run, tmp_path / "as_the_run")
        far.fails(ValueError, "--rollout-tp 2 splits an engine over GPUs")
        assert not far.host.engines
        far = Far(run, tmp_path / "as_told", rollout_tp=1)
        run.step()
        assert len(far.host.engines) == 1 and not far.ended
        far.ends_with(run)


@pytest.mark.parametrize(
    "spoil", [lambda path: path.write_text("def loss(): ...  # another\n"), Path.unlink]
)
def test_a_host_that_lacks_user_code_or_has_another_ends_before_it_starts_anything(
    tmp_path, monkeypatch, spoil
):
    path = write_own(tmp_path / "own", "def loss(): ...\n")
    monkeypatch.chdir(path.parent)
    with running(tmp_path, algo=f"{path}:loss") as run:
        spoil(path)
        far = Far(run, tmp_path / "far")
        far.fails(ValueError, f"{path}:loss: not what the run has, or imports; copy runs/NAME/code")
    assert not far.host.engines


def run_worker_that_notes_its_options(spec, connection):
    Path(spec.log_path).with_name("options").write_text(
        f"{spec.config.algo} {spec.config.timeout_s:g}"
    )
    run_fake_worker(spec, connection)


def test_engines_of_a_host_have_user_code_from_its_folder_and_half_of_the_timeout_so_that_they_end_first(
    tmp_path, monkeypatch
):
    path = write_own(tmp_path / "own", "def loss(): ...\n")
    here = tmp_path / "here"
    shutil.copytree(path.parent, here)
    monkeypatch.chdir(here)
    with running(tmp_path, algo=f"{path}:loss", timeout_s=50.0) as run:
        far = Far(run, tmp_path / "far", main=run_worker_that_notes_its_options)
        run.step()
        assert (tmp_path / "far" / "options").read_text() == f"{here / path.name}:loss 25"
        far.ends_with(run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_host_that_is_stopped_leaves_in_order(tmp_path, number):
    environment = os.environ | {
        "PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'tests'}",
        "TMPDIR": str(tmp_path),
    }
    with running(tmp_path) as run, open(tmp_path / "out", "w") as out:
        command = [sys.executable, "-c", PROGRAM, "--join", run.address, "--key", run.key_path]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        run.step()
        engines = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        assert process.wait(20) == 0
        wait_until(run.left)
        ((_, why),) = run.left()
        # Its connection may be gone before its last word is read.
        assert why in ("has left", "cannot be reached (Host unreachable)")
        assert not psutil.wait_procs(engines, 20)[1]
    joined, left = (tmp_path / "out").read_text().splitlines()
    assert joined.startswith("joined ") and left == "left: stopped here"


def test_a_host_joins_the_node_that_it_is_sent_to(tmp_path):
    with running(tmp_path, publishes=False) as first, running(tmp_path) as second:  # of one key
        first.swarm.nodes = [(first.address, 1), (second.address, 0)]
        far = Far(first, tmp_path / "far")
        second.step()
        assert joins(second) == 1 and joins(first) == 0
        far.ends_with(second)


def test_a_host_whose_engine_dies_ends_with_its_report_and_the_run_goes_on(tmp_path):
    with running(tmp_path, answers=lambda index: "die" if index == 2 else "ok") as run:
        far = Far(run, tmp_path / "far")
        wait_until(lambda: run.step_if_ready() or far.ended)
        assert isinstance(far.end(), RuntimeError) and "exited with code 3" in str(far.ended)
        with FakeHost(run, "other"):
            for _ in range(2):
                run.step()


def test_a_host_whose_disk_is_full_ends_in_one_line_and_the_run_goes_on(tmp_path):
    (folder := tmp_path / "far").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a disk that is full")
    try:
        (folder / "full").write_bytes(bytes(4096))
        with running(tmp_path) as run:
            Far(run, folder).fails(OSError, "No space left on device")
            with FakeHost(run) as other:
                run.step()
                other.send(Leave())
    finally:
        subprocess.run(["umount", str(folder)], check=True)
