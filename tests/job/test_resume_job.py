"""Whole jobs that end in every way and continue; sampling follows from seeds, in place of an engine."""

import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from fake_job import run_failing, run_forked, run_unread, run_without_buffers
from ranks import ForkedProcess, forkserver, torchrun_variables
from real_job import (
    ROOT,
    Job,
    assert_every_group_is_consumed_once,
    assert_ledger_balances,
    assert_nothing_is_left,
    new_output,
    without_times,
    words_of,
)
from user_files import contents

from asyncrl.runlog.header import read_run_id
from asyncrl.runlog.manifest import find_newest_checkpoint
from asyncrl.weights.models import weights_sha256
from scripts.lines import read

OPTIONS = {
    "groups_per_step": 4, "group_size": 4, "max_response_tokens": 24, "eval_every": 4, "eval_problems": 8,
    "save_every": 4, "timeout_s": 60,
}  # fmt: skip
GROUPS = 4
HOST = socket.gethostname()
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
USER_OPTIMIZER = re.search(
    r"^```python\n# my_optimizer.py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL
)[1]


BEGUN: list[Job] = []


@pytest.fixture(autouse=True)
def kill_what_is_left():
    """No process outlives a test that has failed, as the fork server would wait for it."""
    yield
    while BEGUN:
        job = BEGUN.pop()
        if job.process.poll() is None:
            job.kill()


def begin(run_path: Path, words: list[str], variables: dict[str, str], body=run_forked, *args):
    """Begin a rank of a job."""
    output_path = new_output(run_path)
    forkserver()
    process = ForkedProcess(target=body, args=(*args, variables, str(output_path), words))
    process.start()
    BEGUN.append(Job(process, run_path, output_path))
    return BEGUN[-1]


def start(folder: Path, *place, **options) -> Job:
    """Start a rank of a run in a folder, the only one if it has no other place."""
    words = [f"--runs-dir={folder}", "--run-name=run", *words_of(OPTIONS | options)]
    return begin(folder / "run", words, *place or [{}])


def resume(job: Job, **options) -> Job:
    """Have a run that has ended continue, on a rank."""
    return begin(job.run_path, [f"--resume={job.run_path}", *words_of(options)], {})


def stop(job: Job) -> int:
    """Ask a run to end; return its exit status."""
    os.kill(job.process.pid, signal.SIGTERM)
    return job.wait()


def test_with_alpha_0_a_run_that_is_stopped_killed_and_out_of_time_is_the_unbroken_one_to_the_bit(
    tmp_path,
):
    folders = [tmp_path / "unbroken", tmp_path / "broken"]
    optimizer = tmp_path / "my_optimizer.py"
    optimizer.write_text(USER_OPTIMIZER)
    options = {
        "async_ratio": 0,
        "advantage": "gae",
        "optimizer": f"{optimizer}:SignMomentum",
        "lr": 1e-3,
    }
    unbroken, job = (start(folder, steps=24, **options) for folder in folders)
    for run in (unbroken, job):
        run.wait_until(lambda run=run: "user code: " in run.output())
    optimizer.unlink()
    job.wait_until(lambda: job.num_steps() >= 5)
    assert stop(job) == 128 + signal.SIGTERM
    num_steps = job.num_steps()
    assert f"stopped by SIGTERM after step {num_steps}, which is saved; continue" in job.output()
    assert find_newest_checkpoint(job.run_path).step == num_steps < 24
    job = resume(job)
    job.wait_until(lambda: find_newest_checkpoint(job.run_path).step > num_steps)
    job.kill()
    num_steps = job.num_steps()
    assert num_steps < 24, "it ended before it was killed"
    assert unbroken.wait() == 0, unbroken.output()[-3000:]
    foreign = job.run_path / "checkpoints/step_23"
    shutil.copytree(find_newest_checkpoint(unbroken.run_path).path, foreign)
    job = resume(job, stop_after_s=1)
    assert job.wait() == os.EX_TEMPFAIL
    skipped = f"skipped checkpoint {foreign}: it is of run {read_run_id(unbroken.run_path)}, and "
    assert f"warning: {skipped}" in job.output()
    assert "stopped by --stop-after-s 1, which is nearly over" in job.output()
    assert find_newest_checkpoint(job.run_path).step == job.num_steps()
    job = resume(job, stop_after_s=0)
    assert job.wait() == 0, job.output()[-3000:]
    assert f"user code: {job.run_path}/code/my_optimizer.py:SignMomentum\n" in job.output()
    lines, expected = ([without_times(line) for line in run.metrics()] for run in (job, unbroken))
    assert lines == expected and {"loss/grad_norm", "drift/k3", "value/loss"} < lines[0].keys()
    assert job.evaluations() == unbroken.evaluations() and job.evaluations().keys() >= {0, 24}
    for step in (20, 24):
        saved = [run.run_path / f"checkpoints/step_{step}" for run in (job, unbroken)]
        assert weights_sha256(saved[0]) == weights_sha256(saved[1])
        heads = [path / "value_head/value_head.safetensors" for path in saved]
        assert heads[0].read_bytes() == heads[1].read_bytes()
    assert_every_group_is_consumed_once(job, 24, GROUPS)
    before = contents(job.run_path)
    job = resume(job)
    assert job.wait() == 0 and contents(job.run_path) == before
    assert "24 steps of 24; to continue, raise --steps\n" in job.output()
    header = json.loads((job.run_path / "run.json").read_text())
    assert (header["config"]["stop_after_s"], header["config"]["resume"]) == (0, None)
    assert len(header["resumed"]) == len(job.events("run_resumed")) == 3
    samples = [read(run.run_path / "samples.jsonl") for run in (job, unbroken)]
    assert samples[0] == samples[1] and samples[0][-1]["step"] == 24


def test_a_run_that_nobody_reads_continues_and_is_saved_when_its_terminal_ends(tmp_path):
    words = [f"--runs-dir={tmp_path}", "--run-name=run", *words_of(OPTIONS | {"steps": 100_000})]
    job = begin(tmp_path / "run", [*words, "--save-every=0"], {}, run_unread)
    job.wait_until(lambda: job.num_steps() >= 3)
    os.kill(job.process.pid, signal.SIGHUP)
    assert job.wait() == 128 + signal.SIGHUP
    assert find_newest_checkpoint(job.run_path).step == job.num_steps()
    assert job.events("run_ended")[0]["reason"].startswith("Interrupted: stopped by SIGHUP after")
    assert all(path.read_text().startswith("{") for path in job.run_path.glob("*.jsonl"))


TASK = """
import os
import time
from pathlib import Path

from data.problem import Problem


class Numbers:
    def train_problem(self, index):
        if Path("{path}").exists():
            {action}
        return Problem("a1 b2 =", str(index))

    def eval_problems(self, count):
        return [Problem("a1 b2 =", "3")] * count

    @staticmethod
    def score(answer, response):
        return float(answer == response)
"""


ENDS_OF_ROLLOUT = {
    r".*my_task.py, line 12: IndexError: there is no problem \d+": {},
    r"waited 20 s for a free weight buffer; .*": {"timeout_s": 20, "eval_every": 0},
}
"""Options by what ends rollout."""


@pytest.mark.parametrize(
    "reason",
    [
        pytest.param(reason, marks=[pytest.mark.slow] * ("buffer" in reason))
        for reason in ENDS_OF_ROLLOUT
    ],
)
def test_what_ends_rollout_ends_all_ranks_after_the_last_step_which_is_saved(tmp_path, reason):
    file, end = tmp_path / "my_task.py", tmp_path / "end"
    options = {"steps": 100_000, "async_ratio": 1, "save_every": 0} | ENDS_OF_ROLLOUT[reason]
    body = [run_without_buffers, str(end)] if "buffer" in reason else []
    if not body:
        failure = 'raise IndexError(f"there is no problem {index}")'
        file.write_text(TASK.format(path=end, action=failure))
        options["task"] = f"{file}:Numbers"
    places = torchrun_variables([0, 0])
    job, other = (start(tmp_path, place, *body, **options) for place in places)
    job.wait_until(lambda: job.num_steps() >= 2)
    end.touch()
    assert job.wait() == other.wait() == 1
    num_steps = job.num_steps()
    assert find_newest_checkpoint(job.run_path).step == num_steps
    line = f"error: {reason}"
    assert re.search(rf"^{line}; continue from step {num_steps}: ", job.output(), re.MULTILINE)
    assert re.search(rf"^{line}$", other.output(), re.MULTILINE)
    end.unlink()
    job = resume(job, steps=num_steps + 4)
    assert job.wait() == 0, job.output()[-3000:]
    assert_every_group_is_consumed_once(job, num_steps + 4, GROUPS, may_drop=True)


def test_two_nodes_are_stopped_together_and_one_continues_with_what_both_had(tmp_path):
    job, other = (
        start(tmp_path, place, steps=40, async_ratio=1) for place in torchrun_variables([0, 1])
    )
    job.wait_until(lambda: job.num_steps() >= 6)
    assert (stop(other), job.wait()) == (128 + signal.SIGTERM,) * 2
    assert find_newest_checkpoint(job.run_path).step == job.num_steps()
    before = [*steps_in(job.run_path), *steps_in(job.run_path / "node_1")]
    job = resume(job, steps=24)
    assert job.wait() == 0, job.output()[-3000:]
    metrics, (resumed,) = job.metrics(), job.events("run_resumed")
    assert job.values("step") == list(range(1, 25))
    assert max(job.values("staleness/max")) <= 1
    after = [event for event in steps_in(job.run_path) if event["step"] > resumed["step"]]
    groups = [group for event in before + after for group in event["groups"]]
    assert len(groups) == len(set(groups)) == GROUPS * 24 == metrics[-1]["ledger/groups_consumed"]
    assert_ledger_balances(metrics)


def steps_in(folder: Path) -> list[dict]:
    return [event for event in read(folder / "events.jsonl") if event["event"] == "step"]


def test_nodes_that_differ_are_refused_by_what_differs(tmp_path):
    places = torchrun_variables([0, 1])
    jobs = [start(tmp_path, place, lr=0.1 + node) for node, place in enumerate(places)]
    assert jobs[0].wait() == 2 and jobs[1].wait() != 0
    line = f"error: node 1 ({HOST}) does not run the same as node 0 ({HOST}): --lr 1.1 instead"
    assert line in jobs[0].output()


def test_a_rank_that_fails_ends_at_once_with_its_worker_waits_for_no_other_and_the_other_node_knows_why(
    tmp_path,
):
    places = torchrun_variables([0, 0, 1])
    first, _, failing = [start(tmp_path, place, run_failing, 2) for place in places]
    failing.wait_until(lambda: len(failing.descendants()) > 0 and first.events("worker_ready"))
    workers = failing.descendants()
    assert failing.wait() == first.wait() == 1
    assert "error: rank 2 is out of memory" in failing.output().splitlines()
    assert f"error: node 1 ({HOST}) ended: rank 2 is out of memory\n" in first.output()
    (end,) = read(failing.run_path / "node_1/events.jsonl")[-1:]
    assert end["reason"] == "RuntimeError: rank 2 is out of memory"
    assert_nothing_is_left(workers, set(os.listdir("/dev/shm")))


def test_a_second_signal_ends_a_node_at_once_while_it_waits_for_the_other(tmp_path):
    file, is_late = tmp_path / "my_task.py", tmp_path / "is_late"
    delay = 'time.sleep(15 * (os.environ["GROUP_RANK"] == "1"))'
    file.write_text(TASK.format(path=is_late, action=delay))
    options = {"task": f"{file}:Numbers", "steps": 100_000, "async_ratio": 1}
    waits, late = (start(tmp_path, place, **options) for place in torchrun_variables([0, 1]))
    waits.wait_until(lambda: waits.num_steps() >= 2)
    is_late.touch()
    time.sleep(3)  # until it waits for the other
    start_s = time.monotonic()
    os.kill(waits.process.pid, signal.SIGINT)
    waits.wait_until(lambda: "SIGINT: saves and ends after this step" in waits.output())
    os.kill(waits.process.pid, signal.SIGINT)
    assert waits.wait(20) == 128 + signal.SIGINT
    assert time.monotonic() - start_s < 10
    assert "stopped by SIGINT; " in waits.output()
    assert late.wait(60) == 1
    assert f"error: node 0 ({HOST}) ended: stopped by SIGINT" in late.output()


def test_when_a_node_is_killed_the_other_ends_with_all_stacks_and_without_its_worker(tmp_path):
    places = torchrun_variables([0, 1])
    stays, killed = (start(tmp_path, place, steps=100_000, async_ratio=1) for place in places)
    stays.wait_until(lambda: stays.num_steps() >= 2)
    processes = stays.descendants()
    killed.kill()
    assert stays.wait(60) == 1
    assert f"error: node 1 ({HOST}) is gone without a word, killed or cut off" in stays.output()
    assert "Thread 0x" in (stays.run_path / "stacks.txt").read_text()
    assert_nothing_is_left(processes, set(os.listdir("/dev/shm")))


SWARM = {"listen": "127.0.0.1:0", "num_rollout_workers": 0, "swarm.verify_share": 0}


@pytest.mark.slow
def test_two_ranks_that_wait_for_a_first_host_are_ended_together_by_a_signal(tmp_path):
    jobs = [start(tmp_path, place, async_ratio=1, **SWARM) for place in torchrun_variables([0, 0])]
    jobs[0].wait_until(lambda: "attention of the trainer" in jobs[0].output())
    time.sleep(3)  # until it waits for a batch
    for job in jobs:
        os.kill(job.process.pid, signal.SIGTERM)
    assert 0 not in [job.wait(20) for job in jobs]
    assert "stopped by SIGTERM; nothing is saved yet" in jobs[0].output()
