"""Hosts that join a run, sample for it and leave: real sockets and a real controller, made-up answers."""

import dataclasses
import functools
import itertools
import time
from collections import Counter

import pytest
from fake_host import MODEL_CONFIG, PROBE, FakeHost, running, wait_until

from asyncrl.config import SwarmOptions
from asyncrl.controller.workers import WorkerDied
from asyncrl.messages import Tickets, Update
from asyncrl.runlog.metrics import Sum
from extras.swarm.wire import Fetch, JoinAgain, JoinAt, Leave, Piece, Pull, Refused, Welcome


def test_a_run_without_workers_of_its_own_trains_on_what_a_host_samples(tmp_path, capsys):
    with running(tmp_path) as run:
        far = FakeHost(run).start()
        for _ in range(4):
            groups = run.step()
            assert {t.worker for group in groups for t in group.trajectories} == {0}
        assert run.swarm.take_metrics()["swarm/machines"].value == 1
    wait_until(lambda: far.saw(Leave))  # it is told that the run has ended
    far.close()
    (welcome,) = far.saw(Welcome)
    assert welcome.options["group_size"] == 2 and welcome.model_files == {
        "config.json": MODEL_CONFIG.encode()
    }
    assert capsys.readouterr().out.count("far has joined") == 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"protocol": 99}, "its protocol is 99, the run's "),
        ({"code": "f" * 64}, "its code is ffffffffffff, the run's"),
    ],
)
def test_a_host_with_another_protocol_or_code_is_refused_in_one_line(tmp_path, capsys, said, why):
    with running(tmp_path) as run, FakeHost(run, **said) as far:
        wait_until(lambda: far.saw(Refused))
        assert run.swarm.take_metrics()["swarm/machines"].value == 0
    (refused,) = far.saw(Refused)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "refused" in line]
    assert (
        why in refused.reason
        and why in line
        and "check out the same commit" in line
        and not far.saw(Welcome)
    )


@pytest.mark.parametrize("why", ["has left", "was silent", "cannot be"])
def test_the_tickets_of_a_host_that_is_gone_are_issued_again_and_what_it_says_later_is_late(
    tmp_path, monkeypatch, why
):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    with running(tmp_path) as run, FakeHost(run, "first") as first:
        first.holds = lambda ticket: True
        wait_until(lambda: len(first.held) == 8)
        if why == "has left":
            first.send(Leave())
        elif why == "was silent":
            monkeypatch.setattr("extras.swarm.link.SILENCE_S", 1.0)
            first.is_silent = True
        else:
            first.close()  # as when it is killed: it says nothing
        wait_until(run.left)
        monkeypatch.setattr("extras.swarm.link.SILENCE_S", 15.0)
        ((name, reported),) = run.left()
        assert name == "first" and reported.startswith(why)
        if why != "cannot be":  # it comes to, and does not know that it was given up
            first.is_silent = False
            first.finish()
            wait_until(
                lambda: first.saw(JoinAgain) and run.swarm.take_metrics()["swarm/late"].value == 8
            )
        with FakeHost(run, "second") as second:
            for _ in range(3):
                run.step()
        lost = {(t.group_id, t.member): t.seed for t in first.had}
        again = {(t.group_id, t.member): t.seed for t in second.had}
        assert lost.items() <= again.items(), "the same responses are asked for, by the same seeds"
        assert not {t.ticket_id for t in first.had} & set(run.taken)


def test_weights_are_fetched_while_tickets_go_on_and_loaded_only_then(tmp_path):
    with running(tmp_path, swarm=SwarmOptions(refresh_lag=1)) as run, FakeHost(run) as far:
        wait_until(lambda: far.saw(Update))
        far.answers_fetch = False
        run.step()
        run.step()
        wait_until(lambda: len(far.saw(Fetch)) == 2)
        assert len(far.saw(Update)) == 1, "it has not said that they are there"
        far.answers_fetch = True
        far._look_for_weights()
        wait_until(lambda: [update.version for update in far.saw(Update)] == [0, 1, 2])
        run.step()
    kinds = [
        type(message) for _, message in far.seen if isinstance(message, (Fetch, Update, Piece))
    ]
    assert kinds[:3] == [Fetch, Piece, Update], "fetched, then loaded"
    order = [message for _, message in far.seen if isinstance(message, (Fetch, Update, Tickets))]
    assert any(
        isinstance(m, Tickets)
        for m in order[order.index(far.saw(Fetch)[1]) : order.index(far.saw(Update)[1])]
    )


def test_a_host_refreshes_only_when_it_is_so_many_versions_behind_and_no_token_is_too_old(tmp_path):
    with (
        running(tmp_path, async_ratio=1.0, swarm=SwarmOptions(refresh_lag=3)) as run,
        FakeHost(run) as far,
    ):
        lags = []
        for step in range(12):
            lags += [step - group.min_version for group in run.step()]
        bound = run.controller.config.max_staleness
        wait_until(lambda: far.saw(Update)[-1].version >= 9)
        fetched = [fetch.version for fetch in far.saw(Fetch)]
    assert bound == 4 and 2 <= max(lags) <= bound and min(lags) >= 0
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(fetched))


def test_a_host_that_is_behind_takes_over_from_one_that_was_ahead_and_leaves(tmp_path):
    limits = {"max_running_requests": 2, "swarm": SwarmOptions(refresh_lag=2), "timeout_s": 20.0}
    with running(tmp_path, **limits) as run, FakeHost(run, "behind") as behind:
        behind.holds = lambda ticket: ticket.group_id >= 2
        run.step()
        wait_until(lambda: {ticket.group_id for _, ticket in behind.held} == {2})
        ahead = FakeHost(run, "ahead")
        ahead.holds = lambda ticket: True
        with ahead:
            wait_until(
                lambda: (
                    [ticket.group_id for _, ticket in ahead.held] == [3, 3]
                    and ahead.versions == {0: 1}
                )
            )
            ahead.send(Leave())
            wait_until(run.left)
        assert behind.versions == {0: 0}
        behind.holds = lambda ticket: False
        behind.finish()
        assert [group.min_version for group in run.step()] == [0, 1]


def test_a_prompt_that_is_too_long_ends_the_run_and_is_not_blamed_on_the_host_that_made_room_for_it(
    tmp_path,
):
    changes = {
        "drop_zero_variance": True,
        "answers": lambda index: "ok" if index % 3 == 0 else "vary",
    }
    with (
        pytest.raises(RuntimeError, match="has 1000 tokens, --max-prompt-tokens is"),
        running(tmp_path, **changes) as run,
        FakeHost(run, "far"),
    ):
        prompts = run.controller.tickets.prompts
        encode = lambda problem: [2] * 1000 if problem.prompt == "p11" else [2, 3]  # noqa: E731
        run.controller.tickets.prompts = dataclasses.replace(prompts, encode=encode)
        for _ in range(6):
            run.step()
    assert not [why for _, why in run.left() if why.startswith("sent ")]


def test_a_host_whose_lease_has_ended_may_answer_too_late_and_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    with running(tmp_path, swarm=SwarmOptions(lease_s=1)) as run, FakeHost(run, "slow") as slow:
        slow.holds = lambda ticket: True
        wait_until(lambda: len(slow.held) == 8)
        slow.held, kept = [], slow.held  # it does not even abort
        with FakeHost(run, "fast"):
            run.step()
            slow.held = kept
            num_taken = len(run.taken)
            slow.finish()
            wait_until(lambda: run.controller.buffer.ledger.counts["tokens_dropped_late"])
            run.step()
        assert len(run.taken) > num_taken
        assert not {ticket.ticket_id for _, ticket in kept} & set(run.taken)
        assert "slow" not in dict(run.left())


def test_a_batch_of_a_host_that_lied_is_put_back_with_all_groups_of_its_engines(tmp_path):
    with running(tmp_path, async_ratio=0.0) as run, FakeHost(run, "liar", num_engines=2) as liar:
        wait_until(lambda: len(run.workers_of("liar")) == 2)
        num_groups = len(run.controller.hold_batch())
        workers = run.workers_of("liar")
        run.swarm.shut_out(workers[0], "sent what is not true")
        assert run.controller.refuse_batch(run.swarm.disbelieved)
        wait_until(lambda: liar.saw(Refused))
        assert not run.controller.buffer.groups_of(workers)
        with FakeHost(run, "honest"):
            trained = run.step()
        sampled_by = {t.worker for group in trained for t in group.trajectories}
        assert sampled_by == {*run.workers_of("honest")}
        dropped = run.controller.take_metrics()["ledger/groups_dropped_shut_out"].value
        assert dropped >= num_groups


def test_a_host_that_holds_the_batch_back_loses_its_tickets_sooner(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.link.BEAT_S", 0.1)
    with (
        running(tmp_path, async_ratio=0.0, swarm=SwarmOptions(lease_s=1000)) as run,
        FakeHost(run, "fast"),
    ):
        run.step()  # now it is known how long a trajectory takes
        slow = FakeHost(run, "slow")
        slow.holds = lambda ticket: True
        with slow:
            while not slow.held:
                run.step()
            for _ in range(2):
                run.step()
            assert not run.left()


@pytest.mark.parametrize("has_host", [False, True])
def test_a_run_whose_last_host_has_left_or_that_none_joins_ends_in_one_line(tmp_path, has_host):
    with running(tmp_path, join_timeout_s=1.0) as run:
        if has_host:
            with FakeHost(run):
                run.step()
        with pytest.raises(
            WorkerDied, match=r"^no host has sampled for this run for 1 s, .* --join-timeout-s$"
        ):
            for _ in range(5):
                run.step()


def test_a_run_that_is_asked_to_stop_and_has_no_worker_waits_for_nothing(tmp_path):
    with running(tmp_path, eval_answers=["ok"], publishes=False, join_timeout_s=10.0) as run:
        with FakeHost(run) as far:
            far.holds = lambda ticket: ticket.is_evaluation
            run.publish(evaluate=True)
            for _ in range(2):
                run.step()
            assert run.controller.announcements.deferred is not None
            far.send(Leave())
            wait_until(run.left)
        run.controller.is_asked_to_stop = True
        began = time.monotonic()
        assert run.controller.hold_batch() == []
        state = run.controller.cut()
        run.controller.finish_evaluations()
        assert time.monotonic() - began < 5.0
        assert state.buffer.trainer_version > state.announced
        assert state.evaluates, "it is not at its end"


def test_one_engine_of_each_host_scores_the_probe_and_all_evaluate(tmp_path):
    with running(
        tmp_path, eval_answers=["ok"] * 12, publishes=False, max_running_requests=4
    ) as run:
        with FakeHost(run, "a", num_engines=2) as a, FakeHost(run, "b") as b:
            wait_until(lambda: len(run.workers_of("a")) == 2 and run.workers_of("b"))
            a.holds = b.holds = lambda ticket: ticket.is_evaluation
            run.publish(evaluate=True, probe=PROBE)
            wait_until(lambda: len(a.held) == 8 and len(b.held) == 4)
            for host in (a, b):
                host.holds = lambda ticket: False  # also for a ticket that is moved here
                host.finish()
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
    with running(tmp_path) as run, FakeHost(run, "twin"):
        wait_until(lambda: run.workers_of("twin"))
        with FakeHost(run, "twin") as other:
            wait_until(lambda: run.workers_of("twin.2"))
            other.send(Leave())
            wait_until(run.left)
        with FakeHost(run, "twin"):
            wait_until(lambda: len(run.workers_of("twin.2")) == 2)
            run.step()


def test_a_host_that_does_not_read_is_cut_off_and_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.hub.MAX_UNSENT", 10)
    with running(tmp_path, num_floats=1 << 18) as run, FakeHost(run, "good"):
        deaf, sent = FakeHost(run, "deaf", rcvhwm=1).join(), []

        def has_sent(megabytes):
            sent.append(run.swarm.take_metrics().get("swarm/deaf/mb_sent", Sum(0.0)).value)
            return sum(sent) > megabytes or run.left()

        for num_sent in range(100):
            deaf.send(Pull(0, None, 0))
            wait_until(functools.partial(has_sent, 1 + num_sent))
            if run.left():
                break
        run.step()
        ((name, why),) = run.left()
        assert name == "deaf" and why.startswith("cannot be reached")
        deaf.close()


def test_a_run_with_workers_of_its_own_goes_on_when_the_hosts_have_gone(tmp_path):
    with running(tmp_path, num_own=1, max_running_requests=2) as run:
        with FakeHost(run) as far:
            while not far.had:
                run.step()
            far.send(Leave())
            wait_until(run.left)
        for _ in range(2):
            assert {t.worker for group in run.step() for t in group.trajectories} <= {0, 1}
        assert {t.worker for group in run.step() for t in group.trajectories} == {0}


def test_what_hosts_sent_is_kept_for_verification_only_where_there_is_any(tmp_path):
    for share in (0, 1):
        folder = tmp_path / str(share)
        folder.mkdir()
        with running(folder, swarm=SwarmOptions(verify_share=share)) as run, FakeHost(run):
            run.step()
            assert bool(run.swarm.take_answered()) == bool(share)


def test_hosts_are_sent_to_the_node_with_the_fewest_workers(tmp_path):
    with running(tmp_path) as run:
        run.swarm.nodes = [(run.address, 1), ("elsewhere:1", 0)]
        sent_to = []
        for num_joined in ({}, {1: 1}, {1: 3}):  # of two that have as many the first
            run.swarm.num_joined = Counter(num_joined)
            with FakeHost(run) as host:
                wait_until(lambda: host.saw(Welcome) or host.saw(JoinAt))
                sent_to += [message.address for message in host.saw(JoinAt)] or ["here"]
        assert sent_to == ["elsewhere:1", "here", "here"]


def test_a_host_with_wrong_weights_is_shut_out_and_the_run_is_told_when_it_was_the_last(tmp_path):
    with running(tmp_path) as run, FakeHost(run, "a") as a, FakeHost(run, "b") as b:
        wait_until(lambda: run.workers_of("a") and run.workers_of("b"))
        for name, host, goes_on in (("a", a, True), ("b", b, False)):
            (worker,) = run.workers_of(name)
            assert (
                run.controller.shuts_out(worker, "does not have the trainer's weights") == goes_on
            )
            wait_until(lambda host=host: host.saw(Refused))
