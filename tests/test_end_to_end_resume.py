"""Whole jobs that are killed outright after a checkpoint, and go on."""

import json

import numpy as np
import pytest
from real_job import (
    Job,
    assert_every_group_is_consumed_once,
    resume_job,
    start_job,
    without_times,
)

from asyncrl.runlog.manifest import weights_sha256

pytestmark = pytest.mark.e2e


def kill_after_a_checkpoint(job: Job, num_steps: int) -> list[dict]:
    """SIGKILL all processes of a job at once; returns the lines of metrics that it had written."""
    checkpoints = job.run_path / "checkpoints"
    job.wait_until(
        lambda: (
            list(checkpoints.glob("step_*[0-9]/resume/manifest.json"))
            and job.num_steps() >= num_steps
        )
    )
    job.kill()
    written = (job.run_path / "metrics.jsonl").read_text()
    return [json.loads(line) for line in written[: written.rindex("\n")].splitlines()]


@pytest.mark.study
def test_with_alpha_0_a_killed_run_goes_on_to_the_bit_of_the_unbroken_one(tmp_path):
    (tmp_path / "unbroken").mkdir()
    (tmp_path / "killed").mkdir()
    # One request at a time: else which of them share a batch depends on time, and with it the last bit of a log-prob.
    options = {
        "steps": 9,
        "eval_every": 3,
        "eval_problems": 8,
        "async_ratio": 0,
        "max_running_requests": 1,
    }
    unbroken, killed = (
        start_job(tmp_path / name, save_every=3, **options) for name in ("unbroken", "killed")
    )
    before = kill_after_a_checkpoint(killed, 4)
    assert unbroken.wait() == 0, unbroken.output()[-3000:]
    job = resume_job(killed)
    assert job.wait() == 0, job.output()[-3000:]
    (resumed,) = job.events("run_resumed")
    assert resumed["step"] in (3, 6) and len(before) > resumed["step"]
    expected = [without_times(line) for line in unbroken.metrics()]
    assert [without_times(line) for line in before] == expected[: len(before)], (
        "two runs are equal to begin with"
    )
    assert [without_times(line) for line in job.metrics()] == expected
    assert job.evaluations() == unbroken.evaluations()
    assert job.evaluations().keys() == {0, 3, 6, 9}
    for step in (6, 9):
        folder = f"checkpoints/step_{step}"
        assert weights_sha256(unbroken.run_path / folder) == weights_sha256(job.run_path / folder)
    assert_every_group_is_consumed_once(job, 9, 8)


@pytest.mark.study
def test_with_alpha_1_a_killed_run_consumes_every_prompt_once_and_keeps_the_bound_and_what_was_in_flight(
    tmp_path,
):
    job = start_job(tmp_path, steps=24, save_every=4, async_ratio=1, keep_last=1)
    kill_after_a_checkpoint(job, 10)
    job = resume_job(job, steps=28)
    assert job.wait() == 0, job.output()[-3000:]
    (resumed,) = job.events("run_resumed")
    assert resumed["step"] >= 4 and resumed["skipped"] == []
    assert_every_group_is_consumed_once(job, 28, 8)
    metrics = job.metrics()
    assert max(line["staleness/max"] for line in metrics) <= 1
    groups = sorted(group for event in job.events("step") for group in event["groups"])
    resident = metrics[-1]["ledger/groups_resident"]
    assert groups[-1] < len(groups) + resident, (
        "no group is skipped: what is not consumed is resident"
    )
    at_end = json.loads((job.run_path / "run.json").read_text())
    assert at_end["config"]["steps"] == 28 and [start["step"] for start in at_end["resumed"]] == [
        resumed["step"]
    ]
    assert [path.name for path in (job.run_path / "checkpoints").iterdir()] == ["step_28"]
    members = [(e["group"], e["member"]) for e in job.events("trajectory") if e["group"] >= 0]
    assert len(members) == len(set(members)), "no response is there twice"
    assert np.mean([line["reward/mean"] for line in metrics[-4:]]) > np.mean(
        [x["reward/mean"] for x in metrics[:4]]
    )
