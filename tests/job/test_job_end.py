"""How several ranks end when one of them fails, and NCCL would have the others wait for it."""

import psutil
import pytest
from real_job import launch, torchrun, words_of

OPTIONS = {"steps": 1, "groups_per_step": 2, "group_size": 2, "eval_every": 0}


@pytest.fixture
def start(tmp_path):
    """Start a job whose rank fails that is named; none is left after the test."""
    jobs = []

    def start_job(rank):
        words = [*torchrun(2), "--shutdown-timeout=600", "tests/blocking_job.py", str(rank)]
        words += [f"--runs-dir={tmp_path}", "--run-name=run", *words_of(OPTIONS)]
        jobs.append(launch(words, tmp_path / "run"))
        return jobs[0]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.kill()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_an_error_on_one_rank_ends_all_though_the_other_stands_where_no_signal_reaches_it(
    start, rank
):
    """The reason comes first, torchrun has not to kill anybody, and no group is destroyed, as that would hang."""
    job = start(rank)
    job.wait_until(lambda: "is out of memory" in job.output())
    processes = job.descendants()
    assert job.wait(60) == 1
    assert "forcefully" not in job.output(), "torchrun had to kill a rank"
    assert f"error: rank {rank} is out of memory" in job.output().splitlines()
    assert f"error: rank {rank} is out of memory" in job.output().splitlines()[-2]
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, [process.cmdline() for process in alive]
    if rank == 0:
        (end,) = job.events("run_ended")
        assert end["reason"] == "RuntimeError: rank 0 is out of memory"
