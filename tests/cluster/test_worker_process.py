"""A worker's process and its pipe."""

import multiprocessing
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.cluster.processes import exit_with_parent
from asyncrl.cluster.worker_process import WorkerProcess, cause_in, end_safe_path


def end_at_once(spec, connection):
    """Be a worker that dies before it has read anything."""
    os.setsid()


class SlowToWrite:
    """A message in the middle of being written until `go_on` is set."""

    def __init__(self):
        self.go_on = threading.Event()

    def __reduce__(self):
        self.go_on.wait(30)
        return SlowToWrite, ()


SPEC = SimpleNamespace(log_path=os.devnull, placement=SimpleNamespace(worker=0))


def open_sockets() -> set[int]:
    return {int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.is_socket()}


def test_the_pipe_of_a_dead_worker_keeps_its_number_while_a_message_to_it_is_being_written():
    message, opened_since, before = SlowToWrite(), [], open_sockets()

    def on_message(told):
        assert told is None  # the worker is dead: its successor's pipe would be opened now
        for _ in range(20):
            opened_since.extend(socket.socketpair())
        message.go_on.set()

    with ThreadPoolExecutor(4) as threads:
        worker = WorkerProcess(SPEC, end_at_once, on_message, threads)
        [ours] = open_sockets() - before
        worker.send(message)
        worker.reading.result(timeout=60)
    assert ours not in {one.fileno() for one in opened_since}
    for one in opened_since:
        one.close()
    assert ours not in open_sockets()  # closed, once nobody writes any more


def test_a_start_that_is_interrupted_between_its_two_threads_leaves_none_that_waits():
    with ThreadPoolExecutor(2) as threads:
        first = iter([threads.submit])
        interrupted = SimpleNamespace(submit=lambda *call: next(first)(*call))
        with pytest.raises(StopIteration):
            WorkerProcess(SPEC, end_at_once, lambda message: None, interrupted)


def report_safe_path(spec, connection):
    """Be a worker that tells its PYTHONSAFEPATH before and after its engine has started."""
    os.setsid()
    is_safe = bool(os.environ.get("PYTHONSAFEPATH"))
    end_safe_path()
    connection.send((is_safe, os.environ.get("PYTHONSAFEPATH")))


@pytest.mark.parametrize("given", [None, "", "1"])
def test_a_worker_starts_on_a_safe_path_and_then_has_what_the_user_has_set(given, monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", given)
    told = []
    with ThreadPoolExecutor(2) as threads:
        worker = WorkerProcess(SPEC, report_safe_path, told.append, threads)
        assert os.environ.get("PYTHONSAFEPATH") == given
        worker.reading.result(timeout=60)
    assert told == [(True, given or None), None]


def wait_for_parent():
    """Be an engine, which ends with its worker alone."""
    exit_with_parent()
    time.sleep(600)


def fail_beside_a_child(spec, connection):
    """Be a worker that fails once its engine is up."""
    os.setsid()
    log = os.open(spec.log_path, os.O_WRONLY)
    os.dup2(log, sys.stderr.fileno())
    multiprocessing.get_context("fork").Process(target=wait_for_parent).start()
    raise FileNotFoundError("words.json")


def test_a_worker_that_fails_beside_its_engine_ends_at_once_and_its_log_says_why(tmp_path):
    spec = SimpleNamespace(log_path=str(tmp_path / "log"), placement=SPEC.placement)
    told = []
    with ThreadPoolExecutor(2) as threads:
        worker = WorkerProcess(spec, fail_beside_a_child, told.append, threads)
        worker.process.join(timeout=60)
        worker.stop()
    assert told == [None] and worker.exit_code == 1
    assert worker.death_line().endswith("exited with code 1: FileNotFoundError: words.json")
    assert worker.death_report().startswith(f"{worker.death_line()}; its last log lines, from ")


CONSEQUENCE = "ERROR 11-28 [core.py:9] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ([], ""),
        (["no error here", "an Error without a colon"], ""),
        (["  ValueError: first", "KeyError: second"], ": ValueError: first"),
        (
            [
                CONSEQUENCE,
                "(EngineCore pid=7) ERROR [core.py:3] RuntimeError: no head_dim=16",
                "OSError: x",
            ],
            ": RuntimeError: no head_dim=16",
        ),
        (
            [CONSEQUENCE, "RuntimeError: the engine is dead"],
            ": its engine was killed, most likely because memory ran out",
        ),
    ],
)
def test_the_cause_of_a_death_is_its_first_error_and_that_an_engine_is_dead_is_none(log, cause):
    assert cause_in(log) == cause
