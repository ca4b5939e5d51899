"""Hosts that join a run, sample for it and leave: real sockets and a real controller, made-up answers."""

import itertools
import threading
import time

import pytest
import torch
from hosts import Client, Far, running
from programs import wait_until

from asyncrl.config import SwarmOptions
from asyncrl.controller.workers import WorkerDied
from asyncrl.messages import Finished, LoadWeights
from extras.swarm.delta import compute_digest
from extras.swarm.wire import Fetch, Piece, Pull, Welcome


def test_weights_come_slowly_while_tickets_go_on_and_are_loaded_only_then(tmp_path, monkeypatch):
    """The trainer waits neither for a digest nor for a host, which gets the version that it was told of.

    If that is gone before it was pulled, the newest are fetched.
    """
    pulls, is_open = [], threading.Event()
    monkeypatch.setattr("extras.swarm.swarm.PIECE_BYTES", 20)  # of 52
    options = {"swarm": SwarmOptions(refresh_lag=1)}
    with running(tmp_path, **options) as run, Far(run, "fast"), Far(run) as far:
        wait_until(lambda: far.saw(LoadWeights))
        far.changes = lambda m: pulls.append(m) or [] if type(m) is Pull else [m]
        monkeypatch.setattr(
            "extras.swarm.pull.compute_digest", lambda p: is_open.wait(60) and compute_digest(p)
        )
        run.value_of = lambda version: version + 0.25
        run.step()
        assert run.version == 1 and [fetch.version for fetch in far.saw(Fetch)] == [0]
        is_open.set()
        for number in range(3):
            wait_until(lambda: len(pulls) > number)  # noqa: B023
            run.step()
            assert len(far.saw(LoadWeights)) == 1 and pulls[number].version == 1
            far.say(pulls[number])
        wait_until(lambda: len(far.saw(LoadWeights)) == 2)
        assert far.weights.puller.here.version == 1 < run.version
        ((_, weights),) = far.weights.puller.parameters()
        assert torch.equal(weights, torch.full((4,), 1.25))
        wait_until(lambda: len(pulls) > 3)
        run.step()
        del run.controller.pulled._kept[pulls[3].version]
        far.changes = lambda message: [message]
        far.say(pulls[3])
        wait_until(lambda: len(far.saw(LoadWeights)) == 3)
        assert far.saw(LoadWeights)[2].version == run.version > pulls[3].version
    kinds = [
        type(message) for message in far.heard if isinstance(message, (Fetch, LoadWeights, Piece))
    ]
    order = [kind for kind, _ in itertools.groupby(kinds)]
    assert order == [Fetch, Piece, LoadWeights] * 3
    assert kinds.count(Fetch) == 4


def test_a_host_fetches_what_has_changed_when_it_is_so_many_versions_behind(tmp_path):
    options = {"swarm": SwarmOptions(refresh_lag=3), "num_floats": 1000}
    with running(tmp_path, **options) as run, Far(run) as far:
        for _ in range(12):
            run.step()
            # else so many steps may pass that its base is forgotten
            wait_until(lambda: all(worker.loading is None for worker in run.controller.workers))
        wait_until(lambda: far.saw(LoadWeights)[-1].version >= 9)
        versions = [fetch.version for fetch in far.saw(Fetch)]
    assert all(later - earlier >= 3 for earlier, later in itertools.pairwise(versions))
    assert [piece.is_delta for piece in far.saw(Piece)][:3] == [False, True, True]
    reported = [event.get("lag", 0) for event in run.events if event["event"] == "machine"]
    assert 1 < max(reported) <= run.controller.config.max_staleness


def test_a_run_whose_last_host_has_left_or_that_none_joins_ends_in_one_line(tmp_path):
    line = r"^no host has sampled for this run for 0 s, .* --join-timeout-s$"
    with (
        running(tmp_path, join_timeout_s=0.5) as run,
        pytest.raises(WorkerDied, match=line),
    ):
        run.step()
    with running(tmp_path, join_timeout_s=0.5) as run:
        with Far(run, "far"):
            wait_until(lambda: run.workers_of("far"))
            run.step()
        with pytest.raises(WorkerDied, match=line):
            for _ in range(5):
                run.step()


def test_a_run_that_is_asked_to_stop_and_has_no_worker_waits_for_nothing(tmp_path):
    options = {"num_eval": 1, "publishes": False, "join_timeout_s": 10.0}
    with running(tmp_path, **options) as run:
        with Far(run) as far:
            far.changes = lambda m: (
                [] if isinstance(m, Finished) and m.trajectories[0].is_evaluation else [m]
            )
            run.publish(evaluate=True)
            for _ in range(2):
                run.step()
            assert run.controller.announcements.deferred is not None
        wait_until(run.left)
        run.controller.is_asked_to_stop = True
        began = time.monotonic()
        assert run.controller.wait_for_batch() == []
        state, _ = run.controller.snapshot()
        run.controller.finish_evaluations()
        assert time.monotonic() - began < 8.0
        assert state.buffer.num_consumed_batches > state.published_version
        assert state.evaluates, "it is not at its end"


def test_a_host_that_does_not_read_is_cut_off_and_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("extras.swarm.hub.MAX_UNSENT", 10)
    with (
        running(tmp_path, num_floats=1 << 18) as run,
        Far(run, "good"),
        Client(run, rcvhwm=1) as deaf,
    ):
        deaf.join("deaf")
        wait_until(lambda: deaf.saw(Welcome))
        (far_end,) = [host for host in run.swarm.members.hosts.values() if host.name == "deaf"]

        def pull():
            num_sent = far_end.link.num_bytes["sent"]
            deaf.send(Pull(0, None, 0))
            wait_until(lambda: run.left() or far_end.link.num_bytes["sent"] > num_sent)
            return run.left()

        ((name, why),) = wait_until(pull)
        assert name == "deaf" and why.startswith("cannot be reached")
        run.step()


def test_a_host_with_wrong_weights_is_shut_out_and_the_run_is_told_when_it_was_the_last(tmp_path):
    with running(tmp_path) as run, Far(run, "a") as a, Far(run, "b") as b:
        with Far(run, "gone"):
            wait_until(lambda: all(map(run.workers_of, ("a", "b", "gone"))))
        problem = "does not have the trainer's weights"
        for name, has_another in (("gone", True), ("a", True), ("b", False)):
            (worker,) = run.workers_of(name)
            assert run.controller.try_to_ban_host(worker, problem) == has_another
            assert not run.controller.is_believed(worker)
        assert all(problem in str(host.end()) for host in (a, b))


@pytest.mark.parametrize("function", ["compute_digest", "encode_delta"])
def test_a_run_ends_with_the_first_error_of_what_it_does_beside_the_trainer_for_hosts(
    tmp_path, monkeypatch, function
):
    def fail(*_):
        raise MemoryError(f"no room for {function}")

    with running(tmp_path, num_floats=1000) as run, Far(run) as far:
        wait_until(lambda: far.saw(LoadWeights))
        monkeypatch.setattr(f"extras.swarm.pull.{function}", fail)
        with pytest.raises(MemoryError, match=f"^no room for {function}$"):
            for _ in range(4):
                run.step()
