"""Whole runs, with sampling that follows from seeds in place of an engine, that end in every way and continue."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from real_job import (
    ROOT,
    Job,
    assert_every_group_is_consumed_once,
    assert_ledger_balances,
    launch,
    resume_job,
    start_job,
    start_nodes,
    without_times,
    words_of,
)

from asyncrl.runlog.manifest import id_of, newest_checkpoint, weights_sha256
from scripts.lines import read

OPTIONS = {
    "groups_per_step": 4, "group_size": 4, "max_response_tokens": 24, "eval_every": 4, "eval_problems": 8,
    "save_every": 4, "timeout_s": 60,
}  # fmt: skip
GROUPS = 4
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
USER_OPTIMIZER = re.search(
    r"^```python\n# my_optimizer.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)[1]


PROGRAM = "tests/fake_job.py"


def start(folder: Path, **options) -> Job:
    """Start a run in a folder."""
    words = [f"--runs-dir={folder}", "--run-name=run", *words_of(OPTIONS | options)]
    return launch([PROGRAM, *words], folder / "run")


def resume(job: Job, **options) -> Job:
    """Have a run that has ended continue."""
    return resume_job(job, [PROGRAM], **options)


def test_with_alpha_0_a_run_that_is_killed_and_continues_is_the_unbroken_one_to_the_bit(tmp_path):
    folders = [tmp_path / "unbroken", tmp_path / "killed"]
    optimizer = tmp_path / "my_optimizer.py"
    optimizer.write_text(USER_OPTIMIZER)
    options = {"async_ratio": 0, "advantage": "gae", "optimizer": f"{optimizer}:SignMomentum"}
    unbroken, job = (start(folder, steps=24, **options) for folder in folders)
    for run in (unbroken, job):
        run.wait_until(lambda run=run: "user code: " in run.output())
    optimizer.unlink()
    job.wait_until(lambda: job.has_saved() and job.num_steps() >= 6)
    job.kill()
    num_steps = job.num_steps()
    assert num_steps < 24, "it ended before it was killed"
    unbroken.wait_until(lambda: unbroken.has_saved())
    foreign = job.run_path / "checkpoints/step_23"
    shutil.copytree(newest_checkpoint(unbroken.run_path).path, foreign)
    job = resume(job)
    assert job.wait() == 0 == unbroken.wait(), job.output()[-3000:]
    skipped = f"skipped checkpoint {foreign}: it is of run {id_of(unbroken.run_path)}, and "
    assert f"warning: {skipped}" in job.output()
    assert f"user code: {job.run_path}/code/my_optimizer.py:SignMomentum\n" in job.output()
    (resumed,) = job.events("run_resumed")
    assert 4 <= resumed["step"] <= num_steps and resumed["step"] % 4 == 0
    lines, expected = ([without_times(line) for line in run.metrics()] for run in (job, unbroken))
    assert lines == expected and {"loss/grad_norm", "drift/k3", "value/loss"} < lines[0].keys()
    assert job.evaluations() == unbroken.evaluations() and job.evaluations().keys() >= {0, 24}
    for step in (20, 24):
        saved = [run.run_path / f"checkpoints/step_{step}" for run in (job, unbroken)]
        assert weights_sha256(saved[0]) == weights_sha256(saved[1])
        heads = [path / "value_head/value_head.safetensors" for path in saved]
        assert heads[0].read_bytes() == heads[1].read_bytes()
    assert_every_group_is_consumed_once(job, 24, GROUPS)


@pytest.mark.slow
def test_with_alpha_1_a_run_that_is_stopped_killed_and_out_of_time_consumes_every_group_once(
    tmp_path,
):
    job = start(tmp_path, steps=60, async_ratio=1, keep_last=2)
    job.wait_until(lambda: job.num_steps() >= 5)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    num_steps = job.num_steps()
    python = Path(sys.executable).with_name("python")
    how = f"continue from step {num_steps}: {python} train_async.py --resume {job.run_path}"
    line = f"error: stopped by SIGTERM after step {num_steps}, which is saved; {how}\n"
    assert line in job.output()
    assert newest_checkpoint(job.run_path).step == num_steps
    job = resume(job)
    job.wait_until(lambda: newest_checkpoint(job.run_path).step > num_steps)
    job.kill()
    job = resume(job, stop_after_s=1, steps=40)
    assert job.wait(60) == 75
    assert "stopped by --stop-after-s 1, which is nearly over" in job.output()
    assert newest_checkpoint(job.run_path).step == job.num_steps() > num_steps
    job = resume(job, stop_after_s=0)
    assert job.wait(60) == 0, job.output()[-3000:]
    assert_every_group_is_consumed_once(job, 40, GROUPS)
    assert max(job.values("staleness/max")) <= 1
    header = json.loads((job.run_path / "run.json").read_text())
    assert (header["config"]["steps"], header["config"]["stop_after_s"]) == (40, 0)
    assert len(header["resumed"]) == len(job.events("run_resumed")) == 3


SWARM = {"listen": "127.0.0.1:0", "num_rollout_workers": 0, "swarm.verify_share": 0}


@pytest.mark.slow
def test_two_ranks_that_wait_for_a_first_host_are_ended_together_by_a_signal(tmp_path):
    job = start_job(tmp_path, 2, [PROGRAM], async_ratio=1, **OPTIONS, **SWARM)
    job.wait_until(lambda: "attention of the trainer" in job.output())
    time.sleep(3)  # until it waits for a batch
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(20) != 0
    assert "error: stopped by SIGTERM; nothing is saved yet" in job.output()


@pytest.mark.slow
def test_two_nodes_are_stopped_together_and_one_continues_with_what_both_had(tmp_path):
    job, other = start_nodes(tmp_path, 2, [PROGRAM], steps=40, async_ratio=1, **OPTIONS)
    job.wait_until(lambda: job.num_steps() >= 6)
    os.kill(other.process.pid, signal.SIGTERM)
    assert 0 not in (other.wait(60), job.wait(60))
    assert "after step" in other.output()
    assert newest_checkpoint(job.run_path).step == job.num_steps()
    before = [*steps_in(job.run_path), *steps_in(job.run_path / "node_1")]
    job = resume(job, steps=24)
    assert job.wait(60) == 0, job.output()[-3000:]
    metrics, (resumed,) = job.metrics(), job.events("run_resumed")
    assert job.values("step") == list(range(1, 25))
    assert max(job.values("staleness/max")) <= 1
    after = [event for event in steps_in(job.run_path) if event["step"] > resumed["step"]]
    groups = [group for event in before + after for group in event["groups"]]
    assert len(groups) == len(set(groups)) == GROUPS * 24 == metrics[-1]["ledger/groups_consumed"]
    assert_ledger_balances(metrics)


def steps_in(folder: Path) -> list[dict]:
    return [event for event in read(folder / "events.jsonl") if event["event"] == "step"]
