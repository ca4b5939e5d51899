"""Hosts that join a run, sample for it and leave: real sockets and a real controller, made-up answers."""

import itertools
import time

import pytest
from hosts import MODEL_CONFIG, PROBE, Client, Far, running, wait_until

from asyncrl.config import SwarmOptions
from asyncrl.controller.workers import WorkerDied
from asyncrl.messages import Tickets, Update
from asyncrl.runlog.metrics import Sum
from extras.swarm.wire import Fetch, Fetched, Piece, Pull, Welcome


def everything(trajectory):
    """Holds back all that a host has sampled."""
    return True


@pytest.fixture
def quick_beats(monkeypatch):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)


def test_a_run_without_workers_of_its_own_trains_on_what_a_host_samples(tmp_path, capsys):
    with running(tmp_path) as run, Far(run) as far:
        for _ in range(4):
            groups = run.step()
            assert {t.worker for group in groups for t in group.trajectories} == {0}
        assert run.metric("machines") == 1
        run.swarm.stop()
        assert far.end() == "the run has ended"
    (welcome,) = far.saw(Welcome)
    assert welcome.options["group_size"] == 2
    assert welcome.model_files == {"config.json": MODEL_CONFIG.encode()}
    assert capsys.readouterr().out.count("far has joined") == 1


@pytest.mark.usefixtures("quick_beats")
def test_the_tickets_of_a_host_that_dies_are_issued_again(tmp_path):
    with running(tmp_path, num_own=1, max_running_requests=2) as run, Far(run, "first") as first:
        first.holds = everything
        wait_until(lambda: run.step_if_ready() or len(first.held) == 2)
        first.die()
        wait_until(run.left)
        ((name, reported),) = run.left()
        assert name == "first" and reported.startswith("cannot be")
        old = {ticket.ticket_id for ticket in first.had}
        for _ in range(3):
            assert {t.worker for group in run.step() for t in group.trajectories} <= {0, 1}
        assert {t.worker for group in run.step() for t in group.trajectories} == {0}
        assert not old & run.taken


def test_weights_are_fetched_while_tickets_go_on_and_loaded_only_then(tmp_path):
    fetched = []
    with running(tmp_path, swarm=SwarmOptions(refresh_lag=1)) as run, Far(run) as far:
        wait_until(lambda: far.saw(Update))
        far.changes = lambda message: (
            fetched.append(message) if type(message) is Fetched else message
        )
        run.step()
        run.step()
        wait_until(lambda: fetched)
        assert len(far.saw(Update)) == 1, "it has not said that they are there"
        far.changes = lambda message: message
        far.say(fetched[0], 0)
        wait_until(lambda: [update.version for update in far.saw(Update)] == [0, 1, 2])
        run.step()
    kinds = [type(message) for message in far.heard if isinstance(message, (Fetch, Update, Piece))]
    assert kinds[:3] == [Fetch, Piece, Update], "fetched, then loaded"
    order = [type(m) for m in far.heard if isinstance(m, (Fetch, Update, Tickets))]
    second_fetch = order.index(Fetch, 1)
    assert Tickets in order[second_fetch : order.index(Update, second_fetch)]


def test_a_host_refreshes_only_when_it_is_so_many_versions_behind_and_no_token_is_too_old(tmp_path):
    swarm, lags = SwarmOptions(refresh_lag=3), []
    with running(tmp_path, async_ratio=1.0, swarm=swarm) as run, Far(run) as far:
        for step in range(12):
            lags += [step - group.min_version for group in run.step()]
        bound = run.controller.config.max_staleness
        wait_until(lambda: far.saw(Update)[-1].version >= 9)
        versions = [fetch.version for fetch in far.saw(Fetch)]
    assert bound == 4 and 2 <= max(lags) <= bound and min(lags) >= 0
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(versions))


@pytest.mark.usefixtures("quick_beats")
def test_a_host_whose_lease_has_ended_may_answer_too_late_and_stays(tmp_path):
    with running(tmp_path, swarm=SwarmOptions(lease_s=1)) as run, Far(run, "slow") as slow:
        slow.holds = everything
        wait_until(lambda: len(slow.held) == 8)
        old = {ticket.ticket_id for ticket in slow.had}
        with Far(run, "fast"):
            run.step()
            num_taken = len(run.taken)
            slow.finish()
            wait_until(lambda: run.controller.buffer.ledger.counts["tokens_dropped_late"])
            run.step()
        assert len(run.taken) > num_taken and not old & run.taken
        assert "slow" not in dict(run.left())


@pytest.mark.parametrize("has_host", [False, True])
def test_a_run_whose_last_host_has_left_or_that_none_joins_ends_in_one_line(tmp_path, has_host):
    line = r"^no host has sampled for this run for 1 s, .* --join-timeout-s$"
    with running(tmp_path, join_timeout_s=1.0) as run:
        if has_host:
            with Far(run):
                run.step()
        with pytest.raises(WorkerDied, match=line):
            for _ in range(5):
                run.step()


def test_a_run_that_is_asked_to_stop_and_has_no_worker_waits_for_nothing(tmp_path):
    options = {"eval_answers": ["ok"], "publishes": False, "join_timeout_s": 10.0}
    with running(tmp_path, **options) as run:
        with Far(run) as far:
            far.holds = lambda trajectory: trajectory.is_evaluation
            run.publish(evaluate=True)
            for _ in range(2):
                run.step()
            assert run.controller.announcements.deferred is not None
        wait_until(run.left)
        run.controller.is_asked_to_stop = True
        began = time.monotonic()
        assert run.controller.hold_batch() == []
        state = run.controller.cut()
        run.controller.finish_evaluations()
        assert time.monotonic() - began < 8.0
        assert state.buffer.trainer_version > state.announced
        assert state.evaluates, "it is not at its end"


def test_one_engine_of_each_host_scores_the_probe_and_all_evaluate(tmp_path):
    options = {"eval_answers": ["ok"] * 12, "publishes": False, "max_running_requests": 4}
    with running(tmp_path, **options) as run:
        with Far(run, "a", num_engines=2) as a, Far(run, "b") as b:
            wait_until(lambda: len(run.workers_of("a")) == 2 and run.workers_of("b"))
            a.holds = b.holds = lambda trajectory: trajectory.is_evaluation
            run.publish(evaluate=True, probe=PROBE)
            wait_until(lambda: len(a.held) == 8 and len(b.held) == 4)
            a.finish()
            b.finish()
            run.controller.finish_evaluations()
            evaluation = run.controller.take_evaluation()
            run.step()
            probes = {}
            wait_until(
                lambda: probes.update(run.controller.take_probes().get(0, {})) or len(probes) == 2
            )
        assert set(probes) == {run.workers_of("a")[0], *run.workers_of("b")}
        assert evaluation["eval/accuracy"] == 1.0 and evaluation["eval/problems"] == 12


def test_hosts_of_one_name_are_told_apart_and_a_name_is_used_again(tmp_path):
    with running(tmp_path) as run, Far(run, "twin"):
        wait_until(lambda: run.workers_of("twin"))
        with Far(run, "twin"):
            wait_until(lambda: run.workers_of("twin.2"))
        wait_until(run.left)
        with Far(run, "twin"):
            wait_until(lambda: len(run.workers_of("twin.2")) == 2)
            run.step()


def test_a_host_that_does_not_read_is_cut_off_and_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.hub.MAX_UNSENT", 10)
    with (
        running(tmp_path, num_floats=1 << 18) as run,
        Far(run, "good"),
        Client(run, rcvhwm=1) as deaf,
    ):
        deaf.join("deaf")
        num_bytes = 0.0
        for _ in range(100):
            deaf.send(Pull(0, None, 0))
            before = num_bytes
            while num_bytes < before + 1 and not run.left():
                num_bytes += run.swarm.take_metrics().get("swarm/deaf/mb_sent", Sum(0.0)).value
                time.sleep(0.005)
            if run.left():
                break
        run.step()
        ((name, why),) = run.left()
        assert name == "deaf" and why.startswith("cannot be reached")


def test_a_host_with_wrong_weights_is_shut_out_and_the_run_is_told_when_it_was_the_last(tmp_path):
    with running(tmp_path) as run, Far(run, "a") as a, Far(run, "b") as b:
        wait_until(lambda: run.workers_of("a") and run.workers_of("b"))
        for name, host, goes_on in (("a", a, True), ("b", b, False)):
            (worker,) = run.workers_of(name)
            problem = "does not have the trainer's weights"
            assert run.controller.shuts_out(worker, problem) == goes_on
            assert problem in str(host.end())
