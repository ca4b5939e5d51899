"""Whole runs, with sampling that follows from seeds in place of an engine, that end in every way and go on."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_job import ROOT, Job, assert_ledger_balances, without_times
from user_files import write_user_code

from asyncrl.messages import Update
from asyncrl.runlog.manifest import id_of, newest_checkpoint, weights_sha256
from extras.swarm.tests.hosts import Far
from scripts.lines import read

OPTIONS = {
    "groups-per-step": 4, "group-size": 4, "max-response-tokens": 24, "eval-every": 4, "eval-problems": 8,
    "save-every": 4, "timeout-s": 60, "run-name": "run",
}  # fmt: skip

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
OWN_OPTIMIZER = re.search(
    r"^```python\n# my_optimizer.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)[1]


def start(
    folder: Path, *arguments: str, environment: dict[str, str] | None = None, **options
) -> Job:
    """Start a run in a folder, or, with --resume, have the one that is there go on."""
    options = (
        {}
        if arguments
        else OPTIONS | {name.replace("_", "-"): value for name, value in options.items()}
    )
    arguments = (*arguments, *(f"--{name}={value}" for name, value in options.items()))
    arguments = (*arguments, f"--runs-dir={folder}")
    output_path = folder / f"output_{len(list(folder.glob('output_*')))}.txt"
    with open(output_path, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "tests/fake_job.py", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            }
            | (environment or {}),
            start_new_session=True,
        )
    return Job(process, folder / "run", output_path)


def go_on(job: Job, *arguments: str) -> Job:
    return start(job.run_path.parent, f"--resume={job.run_path}", *arguments)


def kill(job: Job) -> int:
    """SIGKILL a run and all its processes, and give the number of its steps."""
    processes = job.descendants()
    os.killpg(job.process.pid, signal.SIGKILL)
    for process in processes:
        process.kill()
    job.process.wait()
    return job.num_steps()


def has_saved(job: Job, num_checkpoints: int) -> bool:
    return (
        len(list((job.run_path / "checkpoints").glob("step_*[0-9]/config.json"))) >= num_checkpoints
    )


def evaluations(job: Job) -> dict[int, float]:
    return {
        line["eval/policy_version"]: line["eval/accuracy"]
        for line in job.metrics()
        if "eval/accuracy" in line
    }


def assert_every_group_is_consumed_once(job: Job, num_steps: int) -> None:
    """All steps are in the records, in order; no group is in two of them, none was skipped, and the ledger agrees."""
    steps, metrics = job.events("step"), job.metrics()
    assert (
        [event["step"] for event in steps]
        == [line["step"] for line in metrics]
        == list(range(1, num_steps + 1))
    )
    groups = [group for event in steps for group in event["groups"]]
    assert len(groups) == len(set(groups)) == 4 * num_steps == metrics[-1]["ledger/groups_consumed"]
    issued = len(groups) + metrics[-1]["ledger/groups_resident"]
    assert metrics[-1]["ledger/groups_issued"] == issued and max(groups) < issued
    assert_ledger_balances(metrics)


def test_with_alpha_0_a_run_that_is_killed_and_goes_on_is_the_unbroken_one_to_the_bit(tmp_path):
    folders = [tmp_path / "unbroken", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    own = tmp_path / "my_optimizer.py"
    own.write_text(OWN_OPTIMIZER)
    options = {
        "steps": 24,
        "async_ratio": 0,
        "advantage": "gae",
        "optimizer": f"{own}:SignMomentum",
    }
    unbroken, job = (start(folder, **options) for folder in folders)
    for run in (unbroken, job):
        run.wait_until(lambda run=run: "user code: " in run.output())
    own.unlink()
    job.wait_until(lambda: has_saved(job, 1) and job.num_steps() >= 6)
    num_steps = kill(job)
    assert num_steps < 24, "it ended before it was killed"
    unbroken.wait_until(lambda: has_saved(unbroken, 1))
    foreign = job.run_path / "checkpoints/step_23"
    shutil.copytree(newest_checkpoint(unbroken.run_path).path, foreign)
    job = go_on(job)
    assert job.wait() == 0 == unbroken.wait(), job.output()[-3000:]
    assert (
        f"warning: skipped checkpoint {foreign}: it is of run {id_of(unbroken.run_path)}, and "
        in job.output()
    )
    assert f"user code: {job.run_path}/code/{own.name}:SignMomentum\n" in job.output()
    (resumed,) = job.events("run_resumed")
    assert 4 <= resumed["step"] <= num_steps and resumed["step"] % 4 == 0
    lines, expected = ([without_times(line) for line in run.metrics()] for run in (job, unbroken))
    assert lines == expected and {"loss/grad_norm", "drift/k3", "value/loss"} < lines[0].keys()
    assert evaluations(job) == evaluations(unbroken) and evaluations(job).keys() >= {0, 24}
    for step in (20, 24):
        folder = f"checkpoints/step_{step}"
        assert weights_sha256(job.run_path / folder) == weights_sha256(unbroken.run_path / folder)
        heads = [
            run.run_path / folder / "value_head/value_head.safetensors" for run in (job, unbroken)
        ]
        assert heads[0].read_bytes() == heads[1].read_bytes()
    assert_every_group_is_consumed_once(job, 24)


@pytest.mark.study
def test_with_alpha_1_a_run_that_is_stopped_killed_and_out_of_time_consumes_every_group_once(
    tmp_path,
):
    job = start(tmp_path, steps=60, async_ratio=1, keep_last=2)
    job.wait_until(lambda: job.num_steps() >= 5)
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(60) == 128 + signal.SIGTERM
    num_steps = job.num_steps()
    python = Path(sys.executable).with_name("python")
    go_on_by = f"continue from step {num_steps}: {python} train_async.py --resume {job.run_path}"
    assert (
        f"error: stopped by SIGTERM after step {num_steps}, which is saved; {go_on_by}\n"
        in job.output()
    )
    assert newest_checkpoint(job.run_path).step == num_steps
    job = go_on(job)
    job.wait_until(lambda: newest_checkpoint(job.run_path).step > num_steps)
    kill(job)
    job = go_on(job, "--stop-after-s=1", "--steps=40")
    assert (
        job.wait(60) == 75 and "stopped by --stop-after-s 1, which is nearly over" in job.output()
    )
    assert newest_checkpoint(job.run_path).step == job.num_steps() > num_steps
    job = go_on(job, "--stop-after-s=0")
    assert job.wait(60) == 0, job.output()[-3000:]
    assert_every_group_is_consumed_once(job, 40)
    assert max(line["staleness/max"] for line in job.metrics()) <= 1
    assert len(job.events("run_resumed")) == 3
    made = json.loads((job.run_path / "run.json").read_text())
    assert (
        made["config"]["steps"] == 40
        and len(made["resumed"]) == 3
        and made["config"]["stop_after_s"] == 0
    )
    before = (job.run_path / "events.jsonl").read_bytes()
    job = go_on(job)
    assert (
        job.wait(60) == 0 and "has made 40 steps of 40; to continue, raise --steps" in job.output()
    )
    assert (job.run_path / "events.jsonl").read_bytes() == before


HANGING_TASK = """
import time
from data.addition import Addition


class Hanging(Addition):
    def __init__(self, seed, *, num_problems=1000, num_held_out=1000):
        super().__init__(seed)
        self.num_problems, self.num_held_out = num_problems, num_held_out

    def train_problem(self, index):
        self.num_problems -= 1
        if self.num_problems < 0:
            time.sleep(1000)
        return super().train_problem(index)

    def eval_problems(self, count):
        if count > self.num_held_out:
            time.sleep(1000)
        return super().eval_problems(count)
"""


@pytest.mark.parametrize(
    ("task_args", "status", "what", "option"),
    [
        ("num_problems=17", 2, "problem 17", "--env-timeout-s"),
        ("num_problems=530", 1, r"problem \d+", "--env-timeout-s"),
        ("num_held_out=1", 2, "eval_problems", "--timeout-s"),
    ],
)
def test_a_task_that_hangs_ends_the_run_in_one_line(tmp_path, task_args, status, what, option):
    task = write_user_code(tmp_path, HANGING_TASK)
    options = [f"--{name}={value}" for name, value in (OPTIONS | {"env-timeout-s": 5}).items()]
    job = start(
        tmp_path, *options, f"--task={task}:Hanging", f"--task-args={task_args}", f"{option}=3"
    )
    assert job.wait(60) == status
    said = f"{task}:Hanging: {what} is not there after 3 s; fix it, or raise {option} if it is only slow"
    assert re.search(f"^error: --task {said}$", job.output(), re.M), job.output()
    assert (job.num_steps() > 0) == job.run_path.exists() == (status == 1)


class Host(Far):
    """Samples for a job, and scores no probe, as it has no model."""

    def __init__(self, job: Job):
        job.wait_until(lambda: "--join " in job.output())
        address, key_path = re.search(r"--join (\S+) --key (\S+)", job.output()).groups()
        folder = job.output_path.parent
        super().__init__(SimpleNamespace(address=address, key_path=key_path, folder=folder))

    def _tell(self, engine, message):
        is_update = isinstance(message, Update)
        super()._tell(engine, dataclasses.replace(message, probe=()) if is_update else message)


SWARM = {"listen": "127.0.0.1:0", "num_rollout_workers": 0, "swarm.verify_share": 0}


@pytest.mark.slow
def test_a_run_whose_last_host_leaves_in_an_evaluation_is_saved_and_ended_by_a_signal(tmp_path):
    job = start(tmp_path, steps=12, async_ratio=1, **SWARM)
    with Host(job) as host:
        host.holds = lambda t: t.is_evaluation and t.min_version == 4
        # no more: version 5 waits for the evaluation of version 4
        job.wait_until(lambda: job.num_steps() == 6)
        os.kill(job.process.pid, signal.SIGTERM)
        time.sleep(2)
        assert job.process.poll() is None, "it ends the step, as somebody is there"
        host.leave()
        assert job.wait(10) == 128 + signal.SIGTERM
    assert (
        "error: stopped by SIGTERM after step 6, which is saved; continue from step 6: "
        in job.output()
    )
    job = go_on(job)
    with Host(job):
        assert job.wait(60) == 0, job.output()[-3000:]
    assert_every_group_is_consumed_once(job, 12)
    assert evaluations(job).keys() == {0, 6, 8, 12}


@pytest.mark.slow
def test_two_ranks_that_wait_for_a_first_host_are_ended_together_by_a_signal(tmp_path):
    ranks = [
        {"RANK": i, "WORLD_SIZE": 2, "GROUP_RANK": 0, "LOCAL_RANK": i, "LOCAL_WORLD_SIZE": 2}
        for i in (0, 1)
    ]
    jobs = start_ranks(tmp_path, ranks, steps=12, async_ratio=1, **SWARM)
    jobs[0].wait_until(lambda: "attention of the trainer" in jobs[0].output())
    time.sleep(3)  # until it waits for a batch
    for job in jobs:
        os.kill(job.process.pid, signal.SIGTERM)
    assert [job.wait(10) for job in jobs] == [128 + signal.SIGTERM] * 2
    assert "error: stopped by SIGTERM; nothing is saved, as no step had ended" in jobs[0].output()


def start_ranks(folder: Path, ranks: list[dict], **options) -> list[Job]:
    """Start a run of several ranks, each with these variables."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    environments = [{k: str(v) for k, v in (rank | place).items()} for rank in ranks]
    return [start(folder, environment=environment, **options) for environment in environments]


@pytest.mark.study
def test_two_nodes_are_stopped_together_and_one_goes_on_with_what_both_had(tmp_path):
    ranks = [
        {"RANK": i, "WORLD_SIZE": 2, "GROUP_RANK": i, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for i in (0, 1)
    ]
    job, other = start_ranks(tmp_path, ranks, steps=40, async_ratio=1)
    job.wait_until(lambda: job.num_steps() >= 6)
    os.kill(other.process.pid, signal.SIGTERM)
    assert 0 not in (other.wait(60), job.wait(60))
    assert (
        "after step" in other.output() and newest_checkpoint(job.run_path).step == job.num_steps()
    )
    before = [
        event for folder in (job.run_path, job.run_path / "node_1") for event in steps_in(folder)
    ]
    job = go_on(job, "--steps=24")
    assert job.wait(60) == 0, job.output()[-3000:]
    metrics, resumed = job.metrics(), job.events("run_resumed")[0]["step"]
    assert [line["step"] for line in metrics] == list(range(1, 25)) and max(
        x["staleness/max"] for x in metrics
    ) <= 1
    after = [event for event in steps_in(job.run_path) if event["step"] > resumed]
    groups = [group for event in before + after for group in event["groups"]]
    assert len(groups) == len(set(groups)) == 4 * 24 == metrics[-1]["ledger/groups_consumed"]
    assert_ledger_balances(metrics)


def steps_in(folder: Path) -> list[dict]:
    return [event for event in read(folder / "events.jsonl") if event["event"] == "step"]
