"""Whole jobs of which something is killed, interrupted or broken; test_chaos.py kills engines and trainers."""

import os
import re
import signal

import pytest
from programs import run_python
from real_job import (
    assert_every_group_is_consumed_once,
    assert_nothing_is_left,
    resume_job,
    start_job,
    without_times,
)

from asyncrl.runlog.manifest import newest_checkpoint, weights_sha256

pytestmark = pytest.mark.e2e


@pytest.mark.study
def test_with_alpha_0_a_killed_run_goes_on_to_the_bit_of_the_unbroken_one(tmp_path):
    # One request at a time: else which of them share a batch depends on time, and with it the last bit of a log-prob.
    options = {"steps": 9, "save_every": 3, "eval_every": 3, "eval_problems": 8, "async_ratio": 0}
    unbroken, killed = (
        start_job(tmp_path / name, max_running_requests=1, **options)
        for name in ("unbroken", "killed")
    )
    killed.wait_until(lambda: killed.has_saved() and killed.num_steps() >= 4)
    killed.kill()
    job = resume_job(killed)
    assert job.wait() == 0 == unbroken.wait(), job.output()[-3000:]
    (resumed,) = job.events("run_resumed")
    assert resumed["step"] in (3, 6)
    lines, expected = ([without_times(line) for line in run.metrics()] for run in (job, unbroken))
    assert lines == expected
    assert job.evaluations() == unbroken.evaluations() and job.evaluations().keys() == {0, 3, 6, 9}
    last = "checkpoints/step_9"
    assert weights_sha256(unbroken.run_path / last) == weights_sha256(job.run_path / last)
    assert_every_group_is_consumed_once(job, 9, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "num_steps"), [(signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_an_interrupted_run_leaves_nothing_behind_but_its_records(tmp_path, number, num_steps):
    shared_memory = set(os.listdir("/dev/shm"))
    job = start_job(tmp_path, steps=100_000, num_ranks=2)
    job.wait_until(lambda: job.events("worker_started") and job.num_steps() >= num_steps)
    processes = job.descendants()
    os.killpg(job.process.pid, number)  # as a terminal does: torchrun passes it on to the ranks
    assert job.wait(timeout_s=60) != 0
    assert_nothing_is_left(processes, shared_memory)
    (ended,) = job.events("run_ended")
    assert ended["status"] == "ended early" and f"stopped by {number.name}" in ended["reason"]
    saved = "nothing is saved yet"
    if num_steps:
        step = job.num_steps()
        assert newest_checkpoint(job.run_path).step == step, "the step ends and is saved"
        saved = f"after step {step}, which is saved; continue from step {step}: "
    assert re.search(f"error: stopped by {number.name};? {saved}", job.output())


@pytest.mark.slow
def test_a_worker_whose_engine_cannot_sample_ends_the_run_within_a_minute_with_its_log(tmp_path):
    from tiny_policy import save_unservable_model

    model = save_unservable_model(str(tmp_path / "model"))
    job = start_job(tmp_path, steps=2, model=model, max_prompt_tokens=40, max_response_tokens=48)
    job.wait_until(lambda: job.events("worker_started"))
    assert job.wait(timeout_s=60) != 0
    assert "error: rollout worker 0 was up, and died before any response came back" in job.output()
    (*_, last) = re.findall(r"^  \| (.+)$", job.output(), re.M)
    assert "Error: " in last and "head_dim=20" in last, "the first error comes last"


@pytest.mark.slow
def test_first_weights_that_do_not_arrive_end_the_run_before_it_trains(tmp_path):
    job = start_job(tmp_path, 2, ["tests/corrupt_job.py", "0", "9"], steps=3)
    assert job.wait() != 0
    lines = [line for line in job.output().splitlines() if "error: worker 0 does not have" in line]
    assert "at version 0" in lines[0] and "--weight-sync shm" in lines[0]
    assert not job.metrics()


@pytest.mark.slow
def test_later_weights_that_do_not_arrive_are_warned_of_once_and_in_the_report(tmp_path):
    script = ["tests/corrupt_job.py", "2", "4"]
    job = start_job(tmp_path, script=script, steps=6, async_ratio=1)
    assert job.wait() == 0, job.output()[-3000:]
    (line,) = [line for line in job.output().splitlines() if line.startswith("warning: step")]
    (event,) = job.events("warning")
    assert event["text"] in line
    assert "worker 0 does not have the trainer's weights: at version 2" in line
    run_python("scripts/report.py", job.run_path)
    assert "worker 0 does not have the trainer" in (job.run_path / "report.html").read_text()
