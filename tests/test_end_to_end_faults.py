"""Whole jobs of which something is killed, interrupted or broken."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from real_job import ROOT, assert_ledger_balances, assert_nothing_is_left, start_job

from asyncrl.runlog.manifest import newest_checkpoint

pytestmark = pytest.mark.e2e


@pytest.fixture
def temporary(monkeypatch):
    """Where a job makes temporary files, and nothing else does; tmp_path is too long for sockets."""
    path = tempfile.mkdtemp()
    monkeypatch.setenv("TMPDIR", path)
    yield path
    shutil.rmtree(path)


def test_a_run_survives_that_its_engine_is_killed_in_an_update_and_leaves_nothing_behind(
    tmp_path, temporary
):
    shared_memory = set(os.listdir("/dev/shm"))
    job, processes = start_and_kill_in_an_update(tmp_path, steps=12)
    assert_run_survived(job, 12, [1])
    assert_nothing_is_left(processes, shared_memory)
    assert left_behind(temporary) == []


def left_behind(folder):
    """What a run left in a folder of temporary files, but for torch's own: its logs, and its cache of compiled code."""
    kept = ("torchelastic_", "torchinductor_")
    return [name for name in os.listdir(folder) if not name.startswith(kept)]


@pytest.mark.study
def test_a_run_survives_that_its_engine_is_killed_updating_and_starting_and_then_its_worker(
    tmp_path, temporary
):
    shared_memory = set(os.listdir("/dev/shm"))
    job, processes = start_and_kill_in_an_update(tmp_path, steps=30)
    job.wait_until(lambda: job.engine() is not None and len(job.events("worker_started")) == 2)
    job.engine().kill()
    num_steps = job.num_steps()
    job.wait_until(lambda: job.num_steps() >= num_steps + 3)
    os.kill(job.titles()["rollout 0"], signal.SIGKILL)
    assert_run_survived(job, 30, [1, 1, -signal.SIGKILL])
    assert "killed by SIGKILL" in job.output()
    assert_nothing_is_left(processes, shared_memory)
    assert left_behind(temporary) == []


def start_and_kill_in_an_update(tmp_path, steps):
    """A job whose engine has just been killed, and the processes that it had before."""
    job = start_job(tmp_path, steps=steps, async_ratio=1, eval_every=10)
    job.wait_until(lambda: job.num_steps() >= 3)
    processes, titles = job.descendants(), job.titles()
    assert {"rollout 0", "rewards 0", "engine 0::EngineCore"} < titles.keys()
    assert any(title.startswith("trainer 0: train_async.py --runs-dir=") for title in titles)
    kill_in_an_update(job)
    return job, processes


def assert_run_survived(job, steps, exit_codes):
    """It made all its steps within the bound, with as many restarts as deaths; `exit_codes` are those of the dead."""
    assert job.wait() == 0, job.output()[-4000:]
    metrics = job.metrics()
    assert [death["exit_code"] for death in job.events("worker_died")] == exit_codes
    assert metrics[-1]["rollout/restarts"] == len(exit_codes) and len(metrics) == steps
    assert max(line["staleness/max"] for line in metrics) <= 1
    assert (job.run_path / "worker_0.log").read_text().count(
        "RuntimeError: the engine is dead"
    ) == 1
    assert "leaked semaphore" not in job.output(), "the last word of a good run"
    assert_ledger_balances(metrics)


def kill_in_an_update(job):
    """Freeze the engine until a step that ends meanwhile shows that the worker waits for it to load new weights."""
    engine = job.engine()
    for _ in range(20):
        engine.suspend()
        time.sleep(1)
        if job.num_steps() > max(event["version"] for event in job.events("update")):
            return engine.kill()
        engine.resume()
        time.sleep(0.05)
    raise AssertionError("the trainer never ended a step without the engine")


@pytest.mark.parametrize(
    ("number", "num_steps"),
    [pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow), (signal.SIGTERM, 0)],
)
def test_an_interrupted_run_leaves_nothing_behind_but_its_records(tmp_path, number, num_steps):
    shared_memory = set(os.listdir("/dev/shm"))
    job = start_job(tmp_path, steps=100_000, num_ranks=2)
    events = job.run_path / "events.jsonl"
    job.wait_until(
        lambda: events.exists() and job.events("worker_started") and job.num_steps() >= num_steps
    )
    processes = job.descendants()
    os.killpg(job.process.pid, number)  # as a terminal does: torchrun passes it on to the ranks
    assert job.wait(timeout_s=60) != 0
    assert f"error: stopped by {number.name}" in job.output()
    assert_nothing_is_left(processes, shared_memory)
    (ended,) = job.events("run_ended")
    assert ended["status"] == "ended early" and f"stopped by {number.name}" in ended["reason"]
    assert [line["step"] for line in job.metrics()] == list(range(1, job.num_steps() + 1))
    if num_steps:
        assert newest_checkpoint(job.run_path).step == job.num_steps(), (
            "in the loop the step ends and is saved"
        )
        torchrun = Path(sys.executable).with_name("torchrun")
        how = f"which is saved; continue from step {job.num_steps()}: {torchrun} train_async.py --resume {job.run_path}"
        assert how in job.output()
    else:
        assert f"stopped by {number.name}; nothing is saved, as no step had ended" in job.output()


@pytest.mark.slow
def test_a_worker_whose_engine_cannot_sample_ends_the_run_within_a_minute_with_its_log(tmp_path):
    from tiny_policy import save_unservable_model

    model = save_unservable_model(str(tmp_path / "model"))
    job = start_job(tmp_path, steps=2, model=model, max_prompt_tokens=40, max_response_tokens=48)
    events = job.run_path / "events.jsonl"
    job.wait_until(lambda: events.exists() and job.events("worker_started"))
    assert job.wait(timeout_s=60) != 0
    assert "error: rollout worker 0 was up, and died before any response came back" in job.output()
    assert "  | " in job.output() and "head_dim=20" in job.output()


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.study), pytest.param(2, marks=pytest.mark.slow)],
)
def test_first_weights_that_do_not_arrive_end_the_run_before_it_trains(tmp_path, num_ranks):
    job = start_job(tmp_path, num_ranks, steps=3, script="tests/corrupt_job.py 0 9")
    assert job.wait() != 0
    (line,) = {
        line
        for line in job.output().splitlines()
        if line.startswith("error: worker 0 does not have")
    }
    assert "at version 0" in line and "--weight-sync shm" in line and "qwen3" in line
    assert not job.metrics()


@pytest.mark.parametrize(
    ("first", "last"),
    [pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(6, 6, marks=pytest.mark.study)],
)
def test_later_weights_that_do_not_arrive_are_warned_of_once_on_the_terminal_and_in_the_report(
    tmp_path, first, last
):
    job = start_job(tmp_path, steps=6, async_ratio=1, script=f"tests/corrupt_job.py {first} {last}")
    assert job.wait() == 0, job.output()[-3000:]
    (line,) = [line for line in job.output().splitlines() if line.startswith("warning: step")]
    (event,) = job.events("warning")
    assert (
        f"worker 0 does not have the trainer's weights: at version {first}" in line
        and event["text"] in line
    )
    assert (
        subprocess.run(
            [sys.executable, "scripts/report.py", job.run_path], cwd=ROOT, check=False
        ).returncode
        == 0
    )
    assert "worker 0 does not have the trainer" in (job.run_path / "report.html").read_text()
