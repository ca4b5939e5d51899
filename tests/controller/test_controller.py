"""The controller with real processes and pipes, and workers that have no engine."""

import os
import threading
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
from fake_link import SocketLink
from fake_worker import run_fake_worker

from asyncrl.cluster.placement import Placement, WorkerPlacement
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.tickets import PromptSource
from asyncrl.controller.workers import WorkerDied, Workers
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import Announcement, ParameterSpec
from data.problem import Problem
from extras.baselines import BaselineController, BaselineTickets

SPECS = [ParameterSpec("w", torch.float32, (4,))]


class Session:
    """A controller that has been started, and the trainer's part of its protocol."""

    def __init__(self, controller, kind):
        self.controller = controller
        nccl = (SPECS, torch.device("cpu"), 1, 20.0, SocketLink)
        self.transport = ShmTransport(SPECS) if kind == "shm" else NcclTransport(*nccl)
        self.events = []

    def publish(self, version, evaluate=False, trainer_version=None):
        trainer_version = version if trainer_version is None else trainer_version
        evaluate |= self.controller.withdraw()
        staged = self.controller.stage(version, [("w", torch.full((4,), float(version)))])
        self.controller.publish(Announcement(version, trainer_version, staged, (), evaluate))


@contextmanager
def session(
    tmp_path,
    answers=lambda index: "ok",
    eval_answers=(),
    num_workers=1,
    model="fine",
    transport="shm",
    restored=None,
    **options,
):
    defaults = {"groups_per_step": 2, "group_size": 2, "timeout_s": 30.0}
    config = Config(**{**defaults, **options})
    workers = tuple(WorkerPlacement(i, None, None, 1, 0.0) for i in range(num_workers))
    prompts = PromptSource(
        train_problem=lambda index: Problem(f"p{index}", answers(index)),
        eval_problems=[Problem(f"e{i}", answer) for i, answer in enumerate(eval_answers)],
        encode=lambda problem: [2, 3] if len(problem.prompt) < 20 else [2] * 1000,
    )
    events = []
    kind = BaselineController if config.is_baseline else Controller
    controller = kind(
        config,
        Workers(
            config, Placement((None,), 1, workers, transport), model, tmp_path, run_fake_worker
        ),
        BaselineTickets(config, prompts),
        lambda event, **fields: events.append({"event": event, **fields}),
        restored=restored,
    )
    started = Session(controller, transport)
    started.events = events
    try:
        controller.launch()
        controller.connect(started.transport)
        yield started
    finally:
        controller.stop()


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def states_of(events, worker):
    """What a worker said it did, in order: state and reason."""
    reports = [
        event for event in events if event["event"] == "worker_state" and event["worker"] == worker
    ]
    return [tuple(state) for report in reports for _, *state in report["changes"]]


def test_batches_are_whole_groups_within_the_bound_from_both_workers(tmp_path):
    with session(tmp_path, num_workers=2, max_running_requests=2, async_ratio=1.0) as s:
        s.publish(0)
        for step in range(1, 6):
            groups = s.controller.take_batch()
            assert [len(g.trajectories) for g in groups] == [2, 2]
            assert all(g.problem == g.group_id for g in groups), (
                "no group was dropped, and each has the next problem"
            )
            assert all(0 <= step - 1 - g.min_version <= 1 for g in groups)
            s.publish(step)
        assert s.controller.buffer.balance()["groups_consumed"] == 10
    assert {e["worker"] for e in s.events if e["event"] == "trajectory"} == {0, 1}


def test_with_alpha_0_tokens_are_always_of_the_newest_version(tmp_path):
    with session(tmp_path, num_workers=2, async_ratio=0.0) as s:
        s.publish(0)
        for step in range(1, 5):
            assert {g.min_version for g in s.controller.take_batch()} == {step - 1}
            s.publish(step)


def test_a_failed_trajectory_drops_its_group_counted_and_another_takes_the_place(tmp_path):
    with session(tmp_path, answers=lambda i: "fail" if i in (0, 3) else "ok", async_ratio=0.0) as s:
        s.publish(0)
        assert [g.group_id for g in s.controller.take_batch()] == [1, 2]
        s.publish(1)
        s.controller.take_batch()
        ledger = s.controller.buffer.balance()
    assert ledger["groups_dropped_failed"] == 2 and ledger["tokens_dropped_failed"] > 0


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(tmp_path):
    with session(tmp_path, answers=lambda i: "fail") as s:
        s.publish(0)
        with pytest.raises(
            RuntimeError, match="groups all failed, the newest with: ValueError: no good"
        ):
            s.controller.take_batch()


def test_a_dead_workers_tickets_are_issued_again_and_it_restarts(tmp_path):
    with session(
        tmp_path, answers=lambda i: "die" if i == 2 else "ok", num_workers=2, async_ratio=0.0
    ) as s:
        s.publish(0)
        for step in range(1, 4):
            assert len(s.controller.take_batch()) == 2
            s.publish(step)
        assert 1 <= s.controller.workers.num_restarts <= 2, (
            "both members of group 2 kill the worker that gets them first"
        )
        assert s.controller.buffer.balance()["groups_consumed"] == 6
    death = next(e for e in s.events if e["event"] == "worker_died")
    assert death["exit_code"] == 3
    assert [e["attempt"] for e in s.events if e["event"] == "worker_started"][:3] == [0, 0, 1]
    seconds = {e["worker"]: e["seconds"] for e in s.events if e["event"] == "worker_time"}
    assert 0 < seconds[death["worker"]]["restarting"] < sum(seconds[death["worker"]].values())


def test_a_worker_that_dies_too_often_ends_the_run(tmp_path):
    with session(tmp_path, answers=lambda i: "die always" if i > 1 else "ok") as s:
        s.publish(0)
        with pytest.raises(WorkerDied, match=r"exited with code 3(.|\n)*all 3 restarts are used"):
            for step in range(1, 4):
                s.controller.take_batch()
                s.publish(step)


def test_a_worker_that_cannot_start_is_reported_with_its_log(tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught, session(tmp_path, model="broken"):
        pass
    assert "could not start: rollout worker 0" in str(caught.value) and "exited with code 7" in str(
        caught.value
    )
    assert "  | RuntimeError: this model is broken" in str(caught.value)
    assert time.monotonic() - start < 20


def test_a_worker_that_was_up_and_died_before_any_response_is_not_said_to_have_failed_to_start(
    tmp_path,
):
    with session(tmp_path, answers=lambda i: "die always") as s:
        s.publish(0)
        with pytest.raises(
            WorkerDied, match=r"^rollout worker 0 was up, and died before any response came back: "
        ):
            s.controller.take_batch()


def test_a_worker_that_hangs_at_its_start_is_said_to_be_running(tmp_path):
    with (
        pytest.raises(
            WorkerDied,
            match=r"not ready 2 s after its start .* is still running and did not answer",
        ),
        session(tmp_path, model="mute", timeout_s=2.0),
    ):
        pass


def test_a_wait_that_is_too_long_ends_with_the_state_of_everything(tmp_path, capfd):
    with session(tmp_path, answers=lambda i: "hang", timeout_s=1.0) as s:
        s.publish(0)
        with pytest.raises(
            RuntimeError, match=r"waited 1 s for a batch.*worker 0 sampling v0 running 8"
        ):
            s.controller.take_batch()
    assert "Thread" in capfd.readouterr().err, "the trainer's own stacks are dumped"


@pytest.mark.parametrize("options", [{}, {"over_sampling": 6.0}])
def test_a_batch_that_can_never_come_is_an_error_at_once(tmp_path, options):
    with session(tmp_path, async_ratio=0.0, timeout_s=60.0, **options) as s:
        s.publish(0)
        start = time.monotonic()
        with pytest.raises(
            RuntimeError, match=r"a batch can never come: nothing runs.*worker 0.*groups_issued"
        ):
            for _ in range(2):  # the second before anything is published anew
                s.controller.take_batch()
        assert time.monotonic() - start < 20


def test_an_evaluation_is_pinned_to_its_version_and_training_goes_on_meanwhile(tmp_path):
    with session(tmp_path, eval_answers=["slow"] * 6, num_workers=2, async_ratio=1.0) as s:
        s.publish(0, evaluate=True)
        s.controller.take_batch()
        s.publish(1)
        s.controller.take_batch()
        spent = s.controller.clock.take().spent
        assert spent["evaluate"] > 0, "what is waited for is held back by the evaluation"
        evaluation = s.controller.evaluation
        assert evaluation is not None and s.controller.buffer.oldest_to_start == 0, (
            "publishing waits, nothing else"
        )
        s.controller.finish_evaluations()
        (done,) = s.controller.ended_evaluations
        assert done.version == 0 and len(done.trajectories) == 6 and done.accuracy() == 1.0
        assert s.controller.buffer.oldest_to_start == 1


def test_an_evaluation_that_was_held_back_is_made_up_for_at_the_next_version(tmp_path):
    with session(tmp_path, eval_answers=["slow"] * 4, async_ratio=3.0) as s:
        s.publish(0, evaluate=True)
        s.controller.take_batch()
        s.publish(1, evaluate=True)
        s.controller.take_batch()
        s.publish(2)
        s.controller.finish_evaluations()
        assert [e.version for e in s.controller.ended_evaluations] == [0, 2]


def test_a_failed_evaluation_response_is_counted_and_scored_as_0(tmp_path):
    with session(tmp_path, eval_answers=["ok", "fail", "ok"]) as s:
        s.publish(0, evaluate=True)
        s.controller.finish_evaluations()
        (done,) = s.controller.ended_evaluations
    assert (done.accuracy(), done.num_failed) == (2 / 3, 1)


def test_a_worker_that_dies_while_it_loads_weights_gives_their_buffer_back(tmp_path):
    with session(tmp_path, model="dies at version 2", async_ratio=1.0) as s:
        s.publish(0)
        for step in range(1, 6):
            s.controller.take_batch()
            s.publish(step)
        assert s.controller.workers.num_restarts == 1
        assert s.controller.buffer.balance()["groups_consumed"] == 10


def test_a_worker_that_dies_in_an_evaluation_has_its_problems_asked_again(tmp_path):
    with session(tmp_path, eval_answers=["ok", "die", "slow"], async_ratio=1.0) as s:
        s.publish(0)
        s.controller.take_batch()
        s.publish(1, evaluate=True)
        s.controller.finish_evaluations()
        (done,) = s.controller.ended_evaluations
        assert (
            s.controller.workers.num_restarts == 1
            and len(done.trajectories) == 3
            and done.version == 1
        )


def test_under_drop_an_expired_group_is_aborted_and_its_problem_issued_again(tmp_path):
    hung = []

    def answers(index):
        hung.append(index)
        return "hang" if hung.count(0) == 1 and index == 0 else "ok"

    with session(tmp_path, answers=answers, stale_policy="drop", async_ratio=1.0) as s:
        s.publish(0)
        for step in range(1, 5):
            assert 0 not in [g.group_id for g in s.controller.take_batch()]
            s.publish(step)
        ledger = s.controller.buffer.balance()
    assert ledger["groups_dropped_stale"] == 1 and hung.count(0) == 2


def test_stopping_leaves_no_process_and_no_sockets(tmp_path):
    with session(tmp_path, answers=lambda i: "hang", num_workers=2) as s:
        s.publish(0)
        pids = [w.process.process.pid for w in s.controller.workers]
        assert all(psutil.pid_exists(pid) for pid in pids)
        sockets = (tmp_path / "sockets_path").read_text()
        assert os.path.isdir(sockets)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not os.path.exists(sockets)


def test_groups_without_variance_are_dropped_counted_and_replaced_at_once(tmp_path):
    answers = lambda i: "ok" if i % 3 else "vary"  # noqa: E731
    with session(tmp_path, answers=answers, drop_zero_variance=True, async_ratio=0.0) as s:
        s.publish(0)
        for step in range(1, 4):
            batch = s.controller.take_batch()
            assert all(set(group.rewards) == {0.0, 1.0} for group in batch)
            s.publish(step)
        ledger = s.controller.buffer.balance()
    assert ledger["groups_consumed"] == 6 and ledger["groups_dropped_filtered"] >= 10


def test_extra_groups_that_are_left_when_the_batch_is_full_are_aborted_and_their_problems_come_again(
    tmp_path,
):
    asked = []

    def answers(index):
        asked.append(index)
        return "hang" if index == 0 and asked.count(0) == 1 else "ok"

    with session(tmp_path, answers=answers, extra_groups=1, async_ratio=0.0) as s:
        s.publish(0)
        assert [group.group_id for group in s.controller.take_batch()] == [1, 2]
        s.publish(1)
        s.controller.take_batch()
        assert asked.count(0) == 2
        assert s.controller.buffer.balance()["groups_dropped_aborted"] == 2, (
            "one is left over in every step"
        )


def test_the_first_members_to_finish_make_the_group_and_a_hanging_one_is_aborted(tmp_path):
    with session(tmp_path, answers=lambda i: "hang 1", extra_members=1, async_ratio=0.0) as s:
        s.publish(0)
        for step in range(1, 4):
            assert [
                [t.member for t in group.trajectories] for group in s.controller.take_batch()
            ] == [[0, 2]] * 2
            s.publish(step)
        wait_until(lambda: sum(e.get("finish_reason") == "aborted" for e in s.events) >= 6)


def test_a_failed_member_is_no_loss_where_there_is_an_extra_one(tmp_path):
    with session(tmp_path, answers=lambda i: "fail 0", extra_members=1, async_ratio=0.0) as s:
        s.publish(0)
        assert [[t.member for t in group.trajectories] for group in s.controller.take_batch()] == [
            [1, 2]
        ] * 2
        assert s.controller.buffer.balance()["groups_dropped_failed"] == 0


def test_without_replication_a_group_is_one_ticket_on_one_worker(tmp_path):
    with session(
        tmp_path, replicate_prompts=False, num_workers=2, async_ratio=0.0, group_size=4
    ) as s:
        s.publish(0)
        for group in s.controller.take_batch():
            assert len(group.trajectories) == 4
            assert (
                len({t.worker for t in group.trajectories})
                == len({t.ticket_id for t in group.trajectories})
                == 1
            )


def test_batch_scheduling_splits_groups_evenly_in_advance_and_a_round_starts_after_the_last_response(
    tmp_path,
):
    with session(
        tmp_path, answers=lambda i: "barrier", scheduling="batch", num_workers=2, async_ratio=0.0
    ) as s:
        s.publish(0)
        for step in range(1, 4):
            batch = s.controller.take_batch()
            assert [{t.worker for t in group.trajectories} for group in batch] == [{0}, {1}]
            s.publish(step)
    arrivals = [e["group"] for e in s.events if e["event"] == "trajectory"]
    assert [sorted(arrivals[i : i + 4]) for i in (0, 4, 8)] == [
        [0, 0, 1, 1],
        [2, 2, 3, 3],
        [4, 4, 5, 5],
    ]


def test_with_batch_scheduling_a_filtered_round_is_followed_by_another(tmp_path):
    answers = lambda i: "vary" if i == 1 or i > 2 else "ok"  # noqa: E731
    options = {"scheduling": "batch", "drop_zero_variance": True, "async_ratio": 0.0}
    with session(tmp_path, answers=answers, num_workers=2, **options) as s:
        s.publish(0)
        assert [group.group_id for group in s.controller.take_batch()] == [1, 3], (
            "rounds: 0 and 1, then 2, then 3"
        )
    assert ("starved", "round") in states_of(s.events, 1), "it had no group in the second round"


def test_the_barrier_opens_when_every_running_ticket_of_every_worker_waits_there(tmp_path):
    answers = lambda i: "barrier" if i < 2 else "ok"  # noqa: E731
    with session(
        tmp_path, answers=answers, scheduling="lockstep", num_workers=2, async_ratio=1.0
    ) as s:
        s.publish(0)
        s.controller.take_batch()
        s.publish(1)
        s.controller.take_batch()
        assert {0, 1} <= {e["group"] for e in s.events if e["event"] == "trajectory"}


def test_over_sampling_suspends_the_workers_with_every_batch(tmp_path):
    with session(tmp_path, over_sampling=2.0, async_ratio=0.0) as s:
        s.publish(0)
        for step in range(1, 4):
            assert all(step - 1 - group.min_version <= 4 for group in s.controller.take_batch())
            s.publish(step)
        s.controller.take_batch()
        suspended = tmp_path / "worker_0.log.suspended"
        wait_until(lambda: suspended.read_text().split() == ["0", "1", "2", "3"])


# Where the workers' time went


def test_every_workers_time_sums_to_its_life_and_says_why_it_had_no_ticket(tmp_path):
    started_at, measured = time.time(), []
    with session(tmp_path, num_workers=2, async_ratio=0.0) as s:
        wait_until(lambda: all(worker.held == "weights" for worker in s.controller.workers))
        for step in range(2):
            s.publish(step)
            s.controller.take_batch()
            wait_until(lambda: all(worker.held == "bound" for worker in s.controller.workers))
            with s.controller.lock:
                measured.append(s.controller.journal.take_time())
        with s.controller.lock:
            measured.append(s.controller.journal.take_time())
            known = sum(spent.total() for spent in s.controller.journal.worker_time().values())
        assert sum(spent.total() for spent in measured) == known
    for worker, ledger in s.controller.journal._ledgers.items():
        assert states_of(s.events, worker)[:2] == [("starved", ""), ("gated", "weights")]
        assert {("gated", "bound"), ("decoding", "")} <= set(states_of(s.events, worker))
        assert ledger.total.total() == ledger.until - ledger.start
        assert started_at - 0.1 < ledger.start / 1e9 and ledger.until / 1e9 < time.time() + 0.1
        (spent,) = [e for e in s.events if e["event"] == "worker_time" and e["worker"] == worker]
        assert sum(spent["seconds"].values()) == pytest.approx((ledger.until - ledger.start) / 1e9)
        assert spent["seconds"]["gated"] > 0 and spent["until"] == ledger.until / 1e9


@pytest.mark.parametrize("model", ["fine", "dies at version 2", "dies while it receives version 2"])
def test_weights_are_sent_to_each_worker_when_it_is_ready_for_them(tmp_path, model):
    """A fake worker compares what it receives with the version, so one that is wrong dies for good."""
    with session(tmp_path, num_workers=2, model=model, transport="nccl") as s:
        s.publish(0)
        for step in range(1, 5):
            s.controller.take_batch()
            s.publish(step)
        wait_until(
            lambda: all(worker.is_up and not worker.loading for worker in s.controller.workers)
        )
        s.transport.check()
        restarts = s.controller.workers.num_restarts
    assert restarts == (0 if model == "fine" else 2)


def test_a_worker_that_comes_back_while_weights_are_written_over_the_announced_ones_waits_for_those(
    tmp_path,
):
    with session(tmp_path, transport="nccl") as s:
        s.publish(0)
        s.controller.take_batch()
        wait_until(lambda: not s.controller.workers[0].loading)

        def gathered():
            s.controller.workers[0].process.process.kill()
            wait_until(
                lambda: s.controller.workers[0].num_restarts and s.controller.workers[0].is_due
            )
            time.sleep(0.1)
            assert s.controller.workers[0].is_due and s.controller.workers[0].sent_version == -1
            yield "w", torch.full((4,), 1.0)

        s.controller.publish(Announcement(1, 1, s.controller.stage(1, gathered()), (), False))
        s.controller.take_batch()
        assert s.controller.workers[0].sent_version == 1


def test_weights_are_written_over_those_that_are_evaluated_when_that_has_ended(tmp_path):
    with session(tmp_path, eval_answers=["slow"], transport="nccl") as s:
        s.publish(0, evaluate=True)
        s.publish(1)
        assert [ended.version for ended in s.controller.ended_evaluations] == [0]
        assert s.controller.announcements.deferred is None


def test_an_engine_sleeps_from_the_batch_until_the_next_weights_and_after_its_evaluation(tmp_path):
    with session(tmp_path, eval_answers=["slow"], async_ratio=0.0, colocate="sleep") as s:
        s.publish(0, evaluate=True)
        s.controller.take_batch()
        assert s.controller.ended_evaluations, "it ended before the engine slept"
        assert s.controller.workers[0].state == "asleep"
        s.publish(1)
        s.controller.take_batch()
    assert (tmp_path / "worker_0.log.slept").read_text().split() == ["0", "1"]


@pytest.mark.parametrize(
    "options", [{"colocate": "sleep"}, {"over_sampling": 2.0, "on_update": "resume"}]
)
def test_what_stands_goes_on_although_a_late_version_is_published_again(tmp_path, options):
    with session(tmp_path, async_ratio=0.0, publish_delay=2, timeout_s=5.0, **options) as s:
        for step in range(5):
            s.publish(max(0, step - 2), trainer_version=step)
            s.controller.take_batch()


# How long it waits while workers come and go

TIMEOUT_S = 1.5
"""A little more than the second after which a wait looks again."""


class ComingWorkers:
    """Workers that take some time to come; none is there."""

    def __init__(self, seconds: float):
        self.come_at = time.monotonic() + seconds

    def __iter__(self):
        return iter(())

    @property
    def are_coming(self):
        return time.monotonic() < self.come_at

    def check(self): ...


def controller(are_coming_for_s: float) -> Controller:
    """A controller whose workers take some time to come."""
    return Controller(Config(timeout_s=TIMEOUT_S), ComingWorkers(are_coming_for_s), None, None)


def test_a_wait_has_all_its_time_after_a_worker_has_come_however_long_that_took():
    waited, answer = controller(are_coming_for_s=2 * TIMEOUT_S), []

    def answer_it():
        with waited.lock:
            answer.append(1)
            waited.lock.notify_all()

    threading.Timer(2.3 * TIMEOUT_S, answer_it).start()
    assert waited.wait_until(lambda: answer, "an answer") == [1]


def test_a_wait_without_a_worker_that_comes_ends_with_the_state_of_all():
    waited = controller(are_coming_for_s=0)
    expected = r"^waited 2 s for an answer; stacks .*; state: .*0 tickets queued"
    with pytest.raises(RuntimeError, match=expected):
        waited.wait_until(lambda: None, "an answer")
