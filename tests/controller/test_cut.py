"""A controller that is cut, stopped and gone on with by another, with real processes that have no engine."""

import threading
import time

import pytest
from test_controller import session, wait_until

import asyncrl.controller.workers
from asyncrl.controller.cut import ControllerState
from asyncrl.runlog.plain import decode, encode


def finished(events):
    """Group and member of each trajectory that has ended, and the versions that it began and ended with."""
    return {
        (event["group"], event["member"]): (event["min_version"], event["max_version"])
        for event in events
        if event["event"] == "trajectory" and event["finish_reason"] == "stop"
    }


def cut(s):
    return decode(ControllerState, encode(s.controller.cut()))


def running(state):
    return {(ticket.group_id, ticket.member): ticket for ticket in state.queue}


def one_hangs(index):
    return "hang 1" if index in (0, 3) else "ok"


def test_what_is_in_flight_goes_on_and_what_has_finished_is_there_when_another_controller_takes_over(
    tmp_path,
):
    options = {"async_ratio": 1.5, "num_workers": 2, "max_running_requests": 8}
    with session(tmp_path, one_hangs, **options) as s:
        s.publish(0)
        wait_until(lambda: len(finished(s.events)) == 8)
        s.controller.take_batch()
        s.publish(1)
        wait_until(lambda: len(finished(s.events)) == 12)
        state, ledger = cut(s), s.controller.buffer.balance()
        assert ledger == s.controller.buffer.balance(), "a cut changes nothing"
    assert running(state).keys() == {(0, 1), (3, 1)}
    assert [t.prefix.policy_versions.tolist() for t in state.queue] == [[1], [1]]
    assert (state.buffer.trainer_version, state.announced) == (1, 1)
    assert not state.evaluates
    before = {(e["group"], e["member"]) for e in s.events if e["event"] == "trajectory"}
    with session(tmp_path, one_hangs, restored=state, **options) as s:
        assert s.controller.buffer.balance() == ledger
        s.publish(1)
        (first, second) = s.controller.take_batch()
        assert {first.group_id, second.group_id} <= {
            i for i, r in state.buffer.residents.items() if len(r.members) == 2
        }
        again = {(e["group"], e["member"]) for e in s.events if e["event"] == "trajectory"}
        assert not again & before, "nothing that had finished is sampled again"
        s.publish(2)
        state = cut(s)
        assert [len(running(state)[key].prefix.tokens) for key in ((0, 1), (3, 1))] == [2, 2]
        assert s.controller.buffer.balance()["groups_consumed"] == 4


def test_at_alpha_0_nobody_is_asked_and_tickets_come_again_as_they_were(tmp_path):
    options = {"async_ratio": 0.0, "model": "does not say"}
    with session(tmp_path, lambda index: "hang", **options) as s:
        s.publish(0)
        wait_until(lambda: sum(worker.num_running for worker in s.controller.workers) == 4)
        given = {i: t for worker in s.controller.workers for i, t in worker.running.items()}
        start = time.monotonic()
        state = cut(s)
        assert time.monotonic() - start < 5.0
    assert {ticket.ticket_id: ticket for ticket in state.queue} == given
    assert all(ticket.prefix is None for ticket in state.queue)
    with session(tmp_path, lambda index: "hang", restored=state, **options) as s:
        s.publish(0)
        wait_until(lambda: sum(worker.num_running for worker in s.controller.workers) == 4)
        assert {i: t for worker in s.controller.workers for i, t in worker.running.items()} == given


def test_a_worker_that_dies_while_the_cut_waits_for_it_is_waited_for_no_longer(tmp_path):
    options = {"async_ratio": 1.0, "model": "dies at the cut", "num_workers": 1}
    with session(tmp_path, one_hangs, **options) as s:
        s.publish(0)
        wait_until(lambda: len(finished(s.events)) == 6)
        state = cut(s)
        assert [event["exit_code"] for event in s.events if event["event"] == "worker_died"] == [5]
        assert running(state).keys() == {(0, 1), (3, 1)}
        assert all(ticket.prefix is None and ticket.attempt == 1 for ticket in state.queue)
    with session(tmp_path, one_hangs, restored=state, **options) as s:
        assert s.controller.workers.num_restarts == 1


def test_a_worker_that_does_not_say_how_far_it_is_holds_the_cut_up_for_a_while_and_is_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(asyncrl.controller.workers, "CUT_S", 0.5)
    with session(tmp_path, one_hangs, async_ratio=1.0, model="does not say") as s:
        s.publish(0)
        wait_until(lambda: len(finished(s.events)) == 6)
        state = cut(s)
        assert (
            capsys.readouterr().out.count(
                "warning: worker 0 sampling v0 running 2 does not say how far it is"
            )
            == 1
        )
    assert running(state).keys() == {(0, 1), (3, 1)} and all(
        ticket.prefix is None for ticket in state.queue
    )


def test_weights_that_wait_for_an_evaluation_are_announced_before_the_cut(tmp_path):
    with session(tmp_path, eval_answers=["slow"], async_ratio=1.0) as s:
        s.publish(0, evaluate=True)
        s.controller.take_batch()
        s.publish(1)
        assert s.controller.announcements.deferred is not None
        state = cut(s)
    assert state.buffer.trainer_version == state.announced == 1
    assert not state.evaluates and [evaluation.version for evaluation in state.evaluations] == [0]
    with session(tmp_path, restored=state, async_ratio=1.0) as s:
        assert s.controller.take_evaluation() == {
            "eval/accuracy": 1.0, "eval/policy_version": 0, "eval/problems": 1, "eval/failed": 0,
        }  # fmt: skip


def test_an_evaluation_that_runs_at_the_cut_is_made_anew(tmp_path):
    options = {"eval_answers": ["slow", "ok", "ok"], "async_ratio": 1.0}
    with session(tmp_path, **options) as s:
        s.publish(0, evaluate=True)
        wait_until(lambda: len([i for i, _ in finished(s.events) if i < 0]) > 0)
        state = cut(s)
    assert state.evaluates and not any(ticket.is_evaluation for ticket in state.queue)
    with session(tmp_path, restored=state, **options) as s:
        s.publish(0, evaluate=state.evaluates)
        s.controller.finish_evaluations()
        assert s.controller.take_evaluation()["eval/problems"] == 3


def test_records_are_measured_in_the_instant_of_the_cut(tmp_path):
    """While the lock is held, so that no thread can write of what the state has not."""
    with session(tmp_path, one_hangs, async_ratio=1.0) as s:
        s.publish(0)
        wait_until(lambda: len(finished(s.events)) == 6)

        def measure():
            taken = []
            other = threading.Thread(
                target=lambda: taken.append(s.controller.lock.acquire(timeout=0.2))
            )
            other.start()
            other.join()
            assert taken == [False]
            return {"events": len(s.events)}

        assert s.controller.cut(measure).records == {"events": len(s.events)}


@pytest.mark.parametrize(
    "options", [{"drop_zero_variance": True}, {"extra_members": 1}, {"over_sampling": 2.0}]
)
def test_a_run_that_is_cut_after_every_step_consumes_each_problem_once(tmp_path, options):
    def answers(index):
        return "vary" if index % 3 else "ok"

    state, consumed = None, []
    for step in range(4):
        with session(
            tmp_path, answers, num_workers=2, restored=state, async_ratio=0.0, **options
        ) as s:
            s.publish(step)
            consumed += [int(group.group_id) for group in s.controller.take_batch()]
            s.publish(step + 1)
            state = cut(s)
            ledger = s.controller.buffer.balance()
    assert len(set(consumed)) == 8 == ledger["groups_consumed"]
    done = ledger["groups_consumed"] + ledger["groups_dropped_filtered"] + ledger["groups_resident"]
    assert state.tickets.next_problem == done + len(state.tickets.put_back)
