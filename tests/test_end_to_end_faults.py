"""Whole jobs of which something is killed or broken; test_chaos.py kills a trainer, test_end_to_end.py an engine."""

import re

import pytest
from programs import run_python
from real_job import (
    assert_every_group_is_consumed_once,
    resume_job,
    run_job,
    start_job,
    without_times,
)

from asyncrl.runlog.manifest import weights_sha256

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
def test_later_weights_that_do_not_arrive_are_warned_of_once_and_in_the_report(tmp_path):
    job = run_job(tmp_path, script=["tests/corrupt_job.py"], steps=6, async_ratio=1)
    (line,) = [line for line in job.output().splitlines() if line.startswith("warning: step")]
    (event,) = job.events("warning")
    assert event["text"] in line
    assert "worker 0 does not have the trainer's weights: at version 2" in line
    run_python("scripts/report.py", job.run_path)
    assert "worker 0 does not have the trainer" in (job.run_path / "report.html").read_text()
