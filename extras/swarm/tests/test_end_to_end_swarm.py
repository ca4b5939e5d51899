"""Whole jobs on hosts that join, sample and leave: real engines, real sockets, on one host.

Slow, as test_swarm.py and test_join.py have the same without engines.
"""

import os
import signal
import time

import pytest
from real_job import assert_ledger_balances, assert_nothing_is_left, join_host, start_job

pytestmark = [pytest.mark.e2e, pytest.mark.study]

LISTENS = {"listen": "127.0.0.1:0", "num_rollout_workers": 0}
LYING_HOST = """
import dataclasses, os, sys
sys.path.insert(0, os.getcwd())
import rollout
from asyncrl.messages import Finished
from extras.swarm.link import Link

send_honestly = Link.send

def send(link, message, *engine):
    if isinstance(message, Finished):
        halved = [dataclasses.replace(t, behavior_logprobs=t.behavior_logprobs * 0.5) for t in message.trajectories]
        message = dataclasses.replace(message, trajectories=halved)
    send_honestly(link, message, *engine)

if __name__ == "__main__":
    Link.send = send
    rollout.main()
"""


def test_no_update_trains_on_what_was_found_false_before_it(tmp_path):
    options = LISTENS | {"swarm.verify_share": 1, "eval_every": 0}
    job = start_job(tmp_path, steps=4, async_ratio=0, **options)
    (tmp_path / "lying_host.py").write_text(LYING_HOST)
    liar = join_host(job, str(tmp_path / "lying_host.py"))
    job.wait_until(
        lambda: "is let in no more" in job.output() or "sent what is not true" in job.output()
    )
    honest = join_host(job)
    assert job.wait() == 0, job.output()[-3000:]
    assert liar.wait(timeout_s=30) != 0 and honest.wait(timeout_s=30) == 0
    metrics = job.metrics()
    assert metrics[-1]["swarm/shut_out"] == 1 and metrics[-1]["swarm/verify_failed"] > 0
    assert metrics[-1]["ledger/groups_dropped_shut_out"] > 0
    assert max(line["drift/k3"] for line in metrics) < 1e-6, "no step trained on a false log-prob"
    assert_ledger_balances(metrics)


def test_a_run_outlives_a_host_whose_engine_is_stopped_while_it_samples(tmp_path):
    job = start_job(tmp_path, steps=40, async_ratio=0, timeout_s=40, **LISTENS)
    first = join_host(job)
    job.wait_until(lambda: job.num_steps() >= 2)
    stop_while_it_samples(first.engine(), job)
    assert first.wait(timeout_s=40) == 1
    assert "an answer of the engine took more than 20 s" in first.output()
    job.wait_until(lambda: job.events("machine_left"), timeout_s=5)
    assert job.num_steps() < 40
    join_host(job)
    assert job.wait() == 0, job.output()[-3000:]
    assert len(job.metrics()) == 40
    assert_ledger_balances(job.metrics())


def stop_while_it_samples(engine, job):
    """Stop the engine, and let it continue until it is stopped when it has loaded the newest weights."""
    for _ in range(20):
        engine.suspend()
        time.sleep(1)
        if max(event["version"] for event in job.events("update")) == job.num_steps():
            return
        engine.resume()
        time.sleep(0.05)
    raise AssertionError("the engine never sampled when it was stopped")


def test_a_run_without_workers_of_its_own_trains_on_hosts_that_come_are_killed_and_leave(tmp_path):
    shared_memory = set(os.listdir("/dev/shm"))
    options = LISTENS | {"eval_every": 12, "swarm.verify_share": 0.5}
    job = start_job(tmp_path, steps=24, async_ratio=1, **options)
    first = join_host(job)
    job.wait_until(lambda: job.num_steps() >= 3)
    killed = first.descendants()
    first.process.kill()
    second, steps = join_host(job), job.num_steps()
    job.wait_until(lambda: job.num_steps() >= steps + 3)
    second.process.send_signal(signal.SIGTERM)
    assert second.wait(timeout_s=30) == 0 and "left: stopped here" in second.output()
    third = join_host(job)
    job.wait_until(lambda: any(event["worker"] == 2 for event in job.events("worker_started")))
    processes = [*killed, *job.descendants(), *third.descendants()]
    assert job.wait() == 0, job.output()[-3000:]
    assert third.wait(timeout_s=30) == 0 and "left: the run has ended" in third.output()
    metrics = job.metrics()
    assert len(metrics) == 24 and max(line["staleness/max"] for line in metrics) <= 1
    assert max(line.get("mismatch/abs_max", 0.0) for line in metrics) < 1e-4
    evaluated = {line["eval/policy_version"] for line in metrics if "eval/accuracy" in line}
    assert {0, 12, 24} <= evaluated
    assert {event["worker"] for event in job.events("trajectory")} == {0, 1, 2}
    counts = [metrics[-1][f"swarm/{name}"] for name in ("joins", "leaves", "shut_out")]
    assert counts == [3, 2, 0]
    assert_ledger_balances(metrics)
    assert_nothing_is_left(processes, shared_memory)
