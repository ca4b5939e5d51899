"""What a run does that waits in vain, or whose workers die or are silent.

The walk's controller and workers are used. Their events are chosen, and the clock is moved by hand.
"""

import dataclasses
import functools
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from random_walk import Walk

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.cluster.processes import CannotContinue, RolloutEnded
from asyncrl.config import Config
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import MAX_DEATHS, MAX_RESTARTS, PROGRESS_S, WorkerDied, Workers
from asyncrl.job.publisher import LeadingPublisher
from asyncrl.runlog.metrics import merge_nodes
from asyncrl.weights.transport import Announcement

PLACEMENT = Placement((None,), 1, (WorkerPlacement(0, None, 0, 1, 0.0),), "shm")
"""One worker, on the trainer's GPU."""


class Run(Walk):
    """A walk of one worker, which acts from `acts_at` on while the trainer waits. Each wait takes a second."""

    def __init__(self, num_eval_problems):
        self.now, self.acts_at = 0.0, 0.0
        config = Config(groups_per_step=2, group_size=2, timeout_s=100.0)
        super().__init__(config, 1, num_eval_problems, random.Random(0))
        self.deaths_left = 0
        self.controller.workers.placement = PLACEMENT

    def _act_while_waiting(self, timeout):
        self.now += timeout
        events = [*self._events_of_workers()] if self.now >= self.acts_at else []
        if events:
            self._act(events)
        return bool(events)

    def begin(self):
        """Publish the first weights."""
        self._connect()
        self._stage()
        self._publish()


@pytest.fixture
def run(monkeypatch, request):
    run = Run(num_eval_problems=getattr(request, "param", 0))
    run.controller.workers[0].process.started_at = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: run.now)
    return run


@pytest.mark.parametrize(
    ("acts_at", "ended_at", "message"),
    [
        (99, 199, r"waited 100 s for a batch; stacks .*worker 0 .*groups_issued"),
        (math.inf, 100, "worker 0 was not ready 100 s after its start"),
    ],
)
def test_a_wait_has_all_its_time_after_a_worker_has_come(run, acts_at, ended_at, message, capfd):
    run.acts_at = acts_at
    with pytest.raises(RolloutEnded, match=message):
        run.controller.wait_on_clock(lambda: False)
    assert run.now == pytest.approx(ended_at, abs=3)
    assert "thread 0x" in capfd.readouterr().err, "stacks of the trainer"


@pytest.mark.parametrize(
    ("num_deaths", "is_up", "has_worked", "exit_code", "message"),
    [
        (1, False, False, -9, "^rollout worker 0 could not start: "),
        (1, True, False, 3, "^rollout worker 0 died before any response arrived: "),
        (MAX_RESTARTS + 1, True, False, -9, "all 3 restarts are used"),
        (MAX_RESTARTS + 1, False, True, 3, "all 3 restarts are used"),
    ],
)
def test_a_worker_that_dies_too_often_or_before_it_has_worked_ends_the_run(
    run, monkeypatch, num_deaths, is_up, has_worked, exit_code, message
):
    """Each one that starts on the trainer's GPU gets the memory that the trainer keeps. Every death is recorded."""
    freed, events = [], []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append("all"))
    journal = run.controller.journal
    monkeypatch.setattr(journal, "record_event", lambda event, **fields: events.append(event))
    workers = run.controller.workers
    workers.have_worked = has_worked
    for death in range(num_deaths):
        assert len(freed) == workers.num_restarts == death
        worker = workers[0]
        if is_up:
            worker.process.start()
            run._deliver(worker)
        worker.process.exit_code = exit_code
        if death < num_deaths - 1:
            run.controller.on_message(worker, None)
    run.controller.on_message(worker, None)
    with pytest.raises(WorkerDied, match=message):
        run.controller.wait_until_ready()
    with pytest.raises(WorkerDied, match=message):
        run.controller.wait_for_batch()
    assert worker.awaited == [] and run.controller.has_evaluated()
    assert events.count("worker_died") == num_deaths
    assert events.count("worker_started") == num_deaths - 1


def test_a_ticket_with_which_too_many_workers_died_ends_the_run_although_others_end(
    run, monkeypatch
):
    """Between the deaths other tickets end, so no worker has used up its restarts."""
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(run.oracle, "check", lambda: None)  # it knows no run that ends
    run.begin()
    controller = run.controller
    for death in range(MAX_DEATHS):
        controller.wait_until(lambda: controller.workers[0].num_running == 8, "tickets")
        worker = controller.workers[0]
        assert {ticket.attempt for ticket in worker.awaited} == {death}
        worker.num_restarts_since_ticket = 0
        worker.process.exit_code = -9
        controller.on_message(worker, None)
    message = (
        rf"{MAX_DEATHS} workers died with one ticket \(group 0, member 0, environment seed None\)"
    )
    with pytest.raises(WorkerDied, match=message):
        controller.wait_for_batch()
    state, _ = controller.snapshot()
    assert controller.workers[0] is worker and len(state.queue) == 8


def test_a_problem_that_cannot_be_made_ends_the_run_where_it_can_be_saved_and_is_met_again(
    run, monkeypatch
):
    """What is finished is trained on first. No step that runs is broken off."""
    tickets = run.controller.ticket_source
    make = tickets.for_group

    def for_group(group_id, problem, min_version):
        if problem == 3:
            raise RolloutEnded("problem 3 is too long")
        return make(group_id, problem, min_version)

    monkeypatch.setattr(tickets, "for_group", for_group)
    monkeypatch.setattr(run.oracle, "check", lambda: None)  # to it each free place is taken
    monkeypatch.setattr(tickets, "put_back", functools.partial(TicketSource.put_back, tickets))
    run.begin()
    run.controller.wait_until(run.controller.hold_batch, "groups")
    trained = [group.problem for group in run.controller.consume_batch()]
    with pytest.raises(RolloutEnded, match="problem 3 is too long"):
        run.controller.wait_for_batch()
    state, _ = run.controller.snapshot()
    assert state.buffer.num_consumed_batches == 1
    left = [resident.problem for resident in state.buffer.residents.values()]
    assert sorted(trained + left) == [0, 1, 2] and len(trained) == 2
    assert state.tickets.put_back == [3] and state.tickets.next_problem == 4
    assert merge_nodes([run.controller.take_metrics()])["rollout/failed_responses"] == 0


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_held_out_problem_that_cannot_be_made_ends_the_run_with_the_next_batch(run):
    """No host is blamed whose trajectory ended the evaluation before."""
    tickets = run.controller.ticket_source
    held_out = tickets.prompts.eval_problems

    def encode(problem):
        if problem in held_out:
            raise ValueError("its template took too long")
        return [2, 3]

    tickets.prompts = dataclasses.replace(tickets.prompts, encode=encode)
    begin_to_evaluate(run)
    assert run.controller.evaluation is None
    with pytest.raises(RolloutEnded, match="its template took too long"):
        run.controller.wait_for_batch()


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_cut_waits_for_weights_that_an_evaluation_holds_back(run):
    """Else a resumed run would not evaluate both versions. One line of metrics then has both."""
    run.begin()
    assert run.controller.evaluation.version == 0
    run.controller.buffer.num_consumed_batches = run.oracle.num_consumed_batches = 1
    run.oracle.is_evaluation_due = True
    staged = run.controller.stage(1, [])
    staged.messages[0] |= {"trainer_version": 1, "evaluate": True}
    run.controller.announce_or_defer(Announcement(1, 1, staged, (), evaluate=True))
    assert run.controller.announcements.deferred is not None
    state, _ = run.controller.snapshot()
    assert [evaluation.version for evaluation in state.evaluations] == [0]
    assert (state.published_version, state.evaluates) == (1, True)
    run.controller.finish_evaluations()
    first, second = [evaluation.metrics() for evaluation in run.controller.ended_evaluations]
    assert (first["eval/policy_version"], second["eval/policy_version"]) == (0, 1)
    assert run.controller.take_evaluation() == second | {"eval/earlier": [first]}
    assert run.controller.take_evaluation() == {}


def begin_to_evaluate(run):
    """Publish the first weights, which are evaluated by a worker that says nothing from now on."""
    run.oracle.check = lambda: None  # it knows no run that ends
    run.begin()
    run.acts_at = math.inf


@pytest.mark.parametrize("run", [2], indirect=True)
@pytest.mark.parametrize("wait", ["an evaluation", "a cut", "a buffer"])
def test_a_wait_in_vain_leaves_a_state_to_save_and_is_raised_by_the_next_batch(run, wait, capfd):
    begin_to_evaluate(run)
    controller = run.controller
    if wait == "an evaluation":
        controller.finish_evaluations()
    elif wait == "a cut":
        staged = controller.announcements.newest.staged
        controller.announcements.deferred = Announcement(1, 1, staged, (), evaluate=True)
        controller.snapshot()
    else:
        run.transport.try_reserve_buffer = lambda: False
        read = []
        with pytest.raises(RolloutEnded, match="waited 100 s for a free weight buffer"):
            controller.stage(1, (read.append(name) for name in "abc"))
        assert not read, "a rank gathers what the others gather"
    ended_at = run.now
    state, _ = controller.snapshot()
    assert state.evaluates and len(state.queue) == len(controller.workers[0].awaited) - 2
    run.acts_at = run.now
    controller.buffer.find_batch = lambda: [0, 1]
    with pytest.raises(RolloutEnded, match=r"waited 100 s for an? (evaluation|free weight)"):
        controller.wait_for_batch()
    rank = SimpleNamespace(
        controller=controller, probe=SimpleNamespace(tokens_at=lambda _: ((1, 2),))
    )
    with pytest.raises(CannotContinue, match="the last evaluation has not ended"):
        LeadingPublisher.check_last(SimpleNamespace(rank=rank), 1)
    assert run.now == pytest.approx(ended_at, abs=PROGRESS_S + 2), "nothing is waited for once more"


def test_a_silent_worker_holds_the_cut_up_for_a_while_and_is_named(run, capsys):
    """No thread can write a record of what the state has not: records are measured while the lock is held."""
    run.begin()
    run.controller.wait_until(lambda: run.controller.workers[0].num_running == 8, "tickets")
    run.acts_at, began = math.inf, run.now

    def measure_records():
        taken = []
        take = lambda: taken.append(run.controller.lock.acquire(blocking=False))  # noqa: E731
        other = threading.Thread(target=take)
        other.start()
        other.join()
        return {"taken": int(taken[0])}

    state, record_bytes = run.controller.snapshot(measure_records)
    assert record_bytes == {"taken": 0} and len(state.queue) == 8
    assert run.now == pytest.approx(began + PROGRESS_S, abs=2)
    line = "warning: worker 0 updating v0 running 8 sent no progress"
    assert capsys.readouterr().out.count(line) == 1


def end_with_an_error(spec, connection):
    """Be a worker that cannot start."""
    os.setsid()
    with open(spec.log_path, "a") as log:
        log.write("RuntimeError: this model is broken\nand more\n")
    os._exit(7)


def test_a_process_that_dies_is_reported_with_its_status_and_the_first_error_of_its_log(tmp_path):
    workers, ended = (
        Workers(Config(), PLACEMENT, "", tmp_path, end_with_an_error),
        threading.Event(),
    )
    workers.launch(lambda worker, message: workers.replace(worker), lambda thread: ended.set())
    try:
        assert ended.wait(60)
        message = r"exited with code 7: RuntimeError: this model is broken; its last log lines"
        with pytest.raises(WorkerDied, match=message):
            workers.check()
    finally:
        workers.stop()


def test_the_end_of_a_run_ends_a_worker_whose_start_was_interrupted(tmp_path):
    """Its process is there, and it is in no list yet. A process from before the run is the caller's, and lives."""
    context = multiprocessing.get_context("spawn")
    before = context.Process(target=time.sleep, args=(300,), daemon=True)
    before.start()
    workers = Workers(Config(), PLACEMENT, "", tmp_path, end_with_an_error)
    child = context.Process(target=time.sleep, args=(300,), daemon=True)
    child.start()
    workers.stop()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL and before.is_alive()
    before.kill()
    before.join(60)
