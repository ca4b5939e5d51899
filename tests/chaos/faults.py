"""What else can go wrong, each in a small real job: disk, files, rewards, environments, engines, weight sync."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from real_job import ROOT, SMALL, Job, assert_ledger_balances

STEPS = 12


def start(
    folder: Path,
    fault: str = "",
    *,
    runs_dir: Path | None = None,
    limit: Callable | None = None,
    **options,
):
    """Start a small job, with a fault of faulty_job.py or as it is; `limit` is called in its first process."""
    chosen = {
        **SMALL,
        "steps": STEPS,
        "timeout-s": 60,
        "env-timeout-s": 1,
        "run-name": "run",
        "runs-dir": runs_dir or folder,
    }
    chosen |= {name.replace("_", "-"): value for name, value in options.items()}
    script = ["tests/chaos/faulty_job.py", fault] if fault else ["train_async.py"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *script]
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "CHAOS_FLAG": str(folder / "flag"),
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
    }
    output = folder / f"output_{len(list(folder.glob('output_*')))}.txt"
    with open(output, "w") as file:
        process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in chosen.items())],
            cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limit,
            env={**os.environ, **environment},
        )  # fmt: skip
    return Job(process, (runs_dir or folder) / "run", output)


def error_line(job: Job) -> str:
    """The first line that says why the job ended."""
    return next((line for line in job.output().splitlines() if line.startswith("error: ")), "")


def finished(job: Job) -> str:
    assert job.wait() == 0, job.output()[-3000:]
    metrics = job.metrics()
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert_ledger_balances(metrics)
    return f"finished, {metrics[-1]['rollout/restarts']:g} restarts"


def ended(job: Job, *words: str) -> str:
    assert job.wait() != 0, "it should not have finished"
    line, output = error_line(job), job.output()
    assert line and all(word in output[output.index(line) :] for word in words), (
        f"no {words}:\n{output[-3000:]}"
    )
    return f"ended: {line[:200]}"


def reward_that_hangs(folder: Path) -> str:
    job = start(folder, "reward-hangs")
    said = finished(job)
    failures = [
        event
        for event in job.events("trajectory")
        if "timed out after 1 s" in (event.get("failure") or "")
    ]
    assert failures, "no response hung"
    return f"{said}, {len(failures)} responses timed out"


def reward_that_forks(folder: Path) -> str:
    return finished(start(folder, "reward-forks"))


def reward_that_allocates(folder: Path) -> str:
    job = start(folder, "reward-allocates")
    said = finished(job)
    failures = [
        event for event in job.events("trajectory") if "MemoryError" in (event.get("failure") or "")
    ]
    assert failures, "no response took too much"
    return f"{said}, {len(failures)} responses without memory"


def reward_that_exits(folder: Path) -> str:
    job = start(folder, "reward-exits")
    said = finished(job)
    failures = [
        event
        for event in job.events("trajectory")
        if "its process died" in (event.get("failure") or "")
    ]
    assert failures, "no process died"
    return f"{said}, {len(failures)} responses lost their process"


def environment_that_crashes(folder: Path) -> str:
    job = start(
        folder, "environment-crashes", task="guess_number", model="tiny", max_prompt_tokens=120
    )
    said = finished(job)
    failures = {event.get("failure") or "" for event in job.events("trajectory")} - {""}
    assert len(failures) >= 3, failures
    return f"{said}, failures: {'; '.join(sorted(failures))[:160]}"


def engine_with_one_nan(folder: Path) -> str:
    job = start(folder, "engine-nan-once")
    said = finished(job)
    assert len(job.events("worker_died")) == 1
    assert "worker 0), token" in (job.run_path / "worker_0.log").read_text()
    return said


def engine_with_nans_only(folder: Path) -> str:
    return ended(start(folder, "engine-nan-always"), "rollout worker 0", "behavior log-prob nan")


def weight_sync_that_dies(folder: Path) -> str:
    job = start(folder, "sync-dies")
    said = finished(job)
    assert len(job.events("worker_died")) == 1
    return said


def run_directory_deleted(folder: Path) -> str:
    job = start(folder, steps=10_000)
    job.wait_until(lambda: job.num_steps() >= 3)
    shutil.rmtree(job.run_path)
    return ended(job, "was deleted under the run")


def few_file_descriptors(folder: Path) -> str:
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # noqa: E731
    job = start(folder, limit=limit)
    assert job.wait() != 0 and "Too many open files" in job.output(), job.output()[-3000:]
    return "ended: Too many open files"


@contextlib.contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path | None]:
    """A mount of its own, undone at the end; None where mounting is not allowed."""
    place = folder / "mount"
    place.mkdir()
    if subprocess.run(["mount", *arguments, str(place)], capture_output=True).returncode:
        yield None
        return
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def disk_full(folder: Path) -> str:
    with mounted(folder, "-t", "tmpfs", "-o", "size=2m", "tmpfs") as place:
        if place is None:
            return "skipped: mounting is not allowed"
        job = start(folder, runs_dir=place, steps=10_000)
        job.wait_until(lambda: job.num_steps() >= 3)
        with contextlib.suppress(OSError), open(place / "filler", "wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        said = ended(job, "No space left on device", "run/")
    return said


def checkpoint_on_a_full_disk(folder: Path) -> str:
    with mounted(folder, "-t", "tmpfs", "-o", "size=20m", "tmpfs") as place:
        if place is None:
            return "skipped: mounting is not allowed"
        said = ended(start(folder, runs_dir=place, save_every=2), "checkpoint", "GB free")
        assert not list(place.glob("run/checkpoints/*"))
    return said


def read_only_run_directory(folder: Path) -> str:
    """A file system that becomes read-only under a run, as ext4 does after an error."""
    with mounted(folder, "-t", "tmpfs", "-o", "size=64m", "tmpfs") as place:
        if place is None:
            return "skipped: mounting is not allowed"
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        return ended(start(folder, runs_dir=place), "Read-only file system")


ALL = (
    reward_that_hangs, reward_that_forks, reward_that_allocates, reward_that_exits, environment_that_crashes,
    engine_with_one_nan, engine_with_nans_only, weight_sync_that_dies, run_directory_deleted, few_file_descriptors,
    disk_full, checkpoint_on_a_full_disk, read_only_run_directory,
)  # fmt: skip


def run_all(folder: Path) -> list[dict]:
    """Make each fault once; prints a line per fault. An AssertionError is a defect."""
    rows = []
    for fault in ALL:
        place, began = folder / fault.__name__, time.monotonic()
        place.mkdir(parents=True)
        said = fault(place)
        rows.append({"fault": fault.__name__, "outcome": said, "took_s": time.monotonic() - began})
        print(rows[-1], flush=True)
    return rows
