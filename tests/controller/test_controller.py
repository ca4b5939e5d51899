"""The controller with real processes and pipes, and workers that have no engine; the walk has what needs neither."""

import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest
import torch
from fake_worker import run_fake_worker
from programs import wait_until

import asyncrl.controller.workers
from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import WorkerDied, Workers
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec
from data.problem import Problem

SPECS = [ParameterSpec("w", torch.float32, (4,))]


class Session:
    """A controller that has been started, and the trainer's part of its protocol."""

    def __init__(self, controller, transport, events):
        self.controller, self.transport, self.events = controller, transport, events

    def publish(self, version, evaluate=False, trainer_version=None):
        trainer_version = version if trainer_version is None else trainer_version
        evaluate |= self.controller.withdraw()
        staged = self.controller.stage(version, [("w", torch.full((4,), float(version)))])
        self.controller.publish(Announcement(version, trainer_version, staged, (), evaluate))

    def events_of(self, kind, worker=0):
        return [e for e in self.events if e["event"] == kind and e["worker"] == worker]


@contextmanager
def session(
    tmp_path,
    answer="ok",
    eval_answers=(),
    num_workers=1,
    model="fine",
    start_s=30.0,
    shared_with_rank=None,
    **options,
):
    """A session of a run whose workers have `start_s` to start. When it ends, no process is left."""
    defaults = {"groups_per_step": 2, "group_size": 2, "timeout_s": 30.0}
    config = Config(**{**defaults, **options})
    placed = tuple(WorkerPlacement(i, None, shared_with_rank, 1, 0.0) for i in range(num_workers))
    prompts = PromptSource(
        train_problem=lambda index: Problem("p", answer(index) if callable(answer) else answer),
        eval_problems=[Problem("e", answer) for answer in eval_answers],
        encode=lambda problem: [2, 3],
    )
    events = []
    placement = Placement((None,), 1, placed, "shm")
    controller = Controller(
        config,
        Workers(replace(config, timeout_s=start_s), placement, model, tmp_path, run_fake_worker),
        TicketSource(config, prompts),
        lambda event, **fields: events.append({"event": event, **fields}),
    )
    transport = ShmTransport(SPECS)
    try:
        controller.launch()
        controller.connect(transport)
        yield Session(controller, transport, events)
    finally:
        pids = [worker.process.process.pid for worker in controller.workers]
        controller.stop()
        assert pids and not any(map(psutil.pid_exists, pids))


def test_two_workers_load_each_version_and_are_started_again_when_they_die_meanwhile(
    tmp_path, monkeypatch
):
    """On the trainer's GPU each gets the memory that the trainer keeps."""
    freed = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append("all"))
    options = {"model": "dies at version 2", "shared_with_rank": 0}
    with session(tmp_path, num_workers=2, async_ratio=1.0, **options) as s:
        s.publish(0)
        for step in range(1, 6):
            groups = s.controller.take_batch()
            assert [len(group.trajectories) for group in groups] == [2, 2]
            assert all(0 <= step - 1 - group.min_version <= 1 for group in groups)
            s.publish(step)
        workers = s.controller.workers
        wait_until(lambda: all(worker.is_up and not worker.loading for worker in workers))
        s.transport.check()
        assert workers.num_restarts == len(freed) == 2
    for worker in (0, 1):
        assert s.events_of("trajectory", worker)
        assert [e["attempt"] for e in s.events_of("worker_started", worker)] == [0, 1]
        assert [e["exit_code"] for e in s.events_of("worker_died", worker)] == [5]


NEVER = r"a batch can never come: nothing runs.*worker 0.*groups_issued"
ENDS = {
    "all rewards fail": (
        {"answer": "fail"},
        "groups all failed, the newest with: ValueError: no good",
    ),
    "dies too often": (
        {"answer": lambda index: "die always" if index > 1 else "ok"},
        r"exited with code 3(.|\n)*all 3 restarts are used",
    ),
    "cannot start": (
        {"model": "broken"},
        r"could not start: rollout worker 0 .*exited with code 7(.|\n)*  \| RuntimeError: this model is broken",
    ),
    "dies before any response": (
        {"answer": "die always"},
        r"^rollout worker 0 was up, and died before any response came back: ",
    ),
    "hangs at its start": (
        {"model": "mute", "start_s": 2.0},
        r"not ready 2 s after its start .* is still running and did not answer",
    ),
    "hangs": (
        {"answer": "hang", "timeout_s": 1.0},
        r"waited 1 s for a batch; stacks .*worker 0 sampling v0 running 8; 0 tickets queued",
    ),
    "is not published": ({"async_ratio": 0.0}, NEVER),
    "is not published after a suspension": ({"async_ratio": 0.0, "over_sampling": 6.0}, NEVER),
}
"""Options of a session, and the error that ends it, at once unless something hangs."""


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_cannot_go_on_ends_with_its_reason(tmp_path, end, capfd):
    options, message = ENDS[end]
    start = time.monotonic()
    with (
        pytest.raises((RuntimeError, WorkerDied), match=message),
        session(tmp_path, **options) as s,
    ):
        for step in range(4):
            if step == 0 or not end.startswith("is not published"):
                s.publish(step)
            s.controller.take_batch()
    hangs = end.startswith("hangs")
    assert hangs or time.monotonic() - start < 20
    assert ("Thread" in capfd.readouterr().err) == hangs, "stacks of the trainer"


def test_a_worker_that_does_not_say_how_far_it_is_holds_the_cut_up_for_a_while_and_is_named(
    tmp_path, monkeypatch, capsys
):
    """No thread can write a record of what the state has not: records are measured while the lock is held."""
    monkeypatch.setattr(asyncrl.controller.workers, "CUT_S", 0.5)
    with session(tmp_path, "hang", async_ratio=1.0, model="does not say") as s:
        s.publish(0)
        wait_until(lambda: s.controller.workers[0].num_running == 8)

        def measure():
            taken = []
            take = lambda: taken.append(s.controller.lock.acquire(timeout=0.2))  # noqa: E731
            other = threading.Thread(target=take)
            other.start()
            other.join()
            return {"taken": int(taken[0])}

        state = s.controller.cut(measure)
    assert state.records == {"taken": 0} and len(state.queue) == 8
    line = "warning: worker 0 sampling v0 running 8 does not say how far it is"
    assert capsys.readouterr().out.count(line) == 1


def test_a_wait_has_all_its_time_after_a_worker_has_come_however_long_that_took(tmp_path):
    """The timeout is a little more than the second after which a wait looks again."""
    with session(tmp_path, model="late", timeout_s=1.5) as s:
        assert s.controller.workers[0].is_up
