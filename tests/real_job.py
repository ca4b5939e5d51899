"""Starts real jobs (torchrun, FSDP, vLLM) for the end-to-end tests and looks at what they leave behind."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from programs import ROOT, wait_until

from asyncrl.cluster.stacks import title
from asyncrl.config import words_of
from scripts.lines import read

TORCHRUN = ("-m", "torch.distributed.run")
SMALL = {
    "groups_per_step": 8, "group_size": 4, "max_response_tokens": 40, "eval_every": 0, "eval_problems": 32,
    "timeout_s": 150,
}  # fmt: skip


def copy_without(folder: Path, *names: str) -> Path:
    """A copy of all that a run needs, without some of the optional systems, each a file or a folder of extras."""
    for name in ("algos", "data", "asyncrl", "extras"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder / path.name)
    for path in [folder / "extras" / name for name in names]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


@dataclass
class Job:
    """A job that was started."""

    process: subprocess.Popen
    run_path: Path
    output_path: Path
    root: Path = ROOT
    """Of the code that it runs."""

    def metrics(self) -> list[dict]:
        """The lines of metrics.jsonl."""
        return read(self.run_path / "metrics.jsonl")

    def values(self, name: str) -> list[float]:
        """A metric, of the steps that have it."""
        return [line[name] for line in self.metrics() if name in line]

    def evaluations(self) -> dict[int, float]:
        """The accuracy at each version that was evaluated."""
        lines = [line for line in self.metrics() if "eval/accuracy" in line]
        return {line["eval/policy_version"]: line["eval/accuracy"] for line in lines}

    def events(self, kind: str) -> list[dict]:
        """The events of one kind."""
        return [
            event
            for event in read(self.run_path / "events.jsonl", may_be_cut=True)
            if event["event"] == kind
        ]

    def output(self) -> str:
        """All that the job has printed so far."""
        return self.output_path.read_text()

    def descendants(self, named: str = "") -> list[psutil.Process]:
        """All processes below torchrun that are alive now, or those whose title begins so."""
        processes = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in processes if title(process).startswith(named)]

    def kill(self) -> None:
        """SIGKILL all processes at once."""
        processes = [psutil.Process(self.process.pid), *self.descendants()]
        for process in processes:
            process.kill()
        self.process.wait()

    def wait(self, timeout_s: float = 240) -> int:
        """Wait for the end; a job that does not end is killed and fails the test."""
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the job did not end within {timeout_s} s:\n{self.output()[-3000:]}"
            ) from None

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 150) -> None:
        """Poll until the condition holds while the job runs."""

        def is_met() -> bool:
            is_true = condition()
            has_ended = self.process.poll() is not None
            assert is_true or not has_ended, f"the job ended early:\n{self.output()[-3000:]}"
            return is_true

        wait_until(is_met, timeout_s, poll_s=0.1)

    def has_saved(self) -> bool:
        """Whether there is a whole checkpoint."""
        return any(self.run_path.glob("checkpoints/step_*[0-9]/resume/manifest.json"))

    def num_steps(self) -> int:
        """Steps finished so far."""
        path = self.run_path / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def engine(self) -> psutil.Process | None:
        """The engine of the only worker, once it is there; it has its worker's title until it has one of its own."""
        return next(iter(self.descendants("engine ")), None)


def torchrun(num_ranks: int = 1) -> list[str]:
    """Words that start a program on some ranks of this host."""
    return [*TORCHRUN, "--standalone", f"--nproc-per-node={num_ranks}"]


def start_job(
    folder: Path, num_ranks: int = 1, agent: Sequence[str] | None = None, **options
) -> Job:
    """Start a run with the small settings, changed by `options`, by torchrun or another agent."""
    words = [*(torchrun(num_ranks) if agent is None else agent), "train_async.py"]
    words += [f"--runs-dir={folder}", "--run-name=run", *words_of(SMALL | options)]
    return launch(words, folder / "run")


def start_nodes(folder: Path, num_nodes: int, **options) -> list[Job]:
    """Start as many torchrun agents, each a node with one rank, that meet on this host; all write one directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    agent = [*TORCHRUN, "--nproc-per-node=1", "--local-addr=127.0.0.1", f"--nnodes={num_nodes}"]
    agent += ["--rdzv-id=test", "--rdzv-backend=c10d", meeting]
    return [start_job(folder, agent=agent, **options) for _ in range(num_nodes)]


def resume_job(
    job: Job, command: Sequence[str] = (*torchrun(), "train_async.py"), **options
) -> Job:
    """Have a job that has ended continue, with changed options."""
    words = [*command, f"--resume={job.run_path}", *words_of(options)]
    return launch(words, job.run_path, root=job.root)


def launch(arguments: Sequence[str], run_path: Path, *, root: Path = ROOT, gpus: str = "") -> Job:
    """Start a Python program in a session of its own; what it prints goes to a file beside the run."""
    output_path = new_output(run_path)
    # packages may also come by PYTHONPATH, but no code of ours beside that of `root`
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    packages = [path for path in given if path not in ("", str(ROOT))]
    python_path = os.pathsep.join([str(root), *packages])
    alone = {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": python_path}
    with open(output_path, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=root,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | alone,
            start_new_session=True,
        )
    return Job(process, run_path, output_path, root)


def new_output(run_path: Path) -> Path:
    """A new file beside a run for what is printed."""
    folder = run_path.parent
    folder.mkdir(exist_ok=True)
    output_path = folder / f"output_{len(list(folder.glob('output_*')))}.txt"
    output_path.touch()
    return output_path


def join_host(job: Job, program: str = "rollout.py") -> Job:
    """Have a remote host join a job that listens, by the line that it prints."""
    job.wait_until(lambda: "--join " in job.output())
    address, key_path = re.search(r"--join (\S+) --key (\S+)", job.output()).groups()
    return launch([program, "--join", address, "--key", key_path], job.run_path)


def run_job(tmp_path: Path, num_ranks: int = 1, **options) -> Job:
    """Run a job to its end, which must be a good one."""
    job = start_job(tmp_path, num_ranks, **options)
    assert job.wait() == 0, job.output()[-4000:]
    return job


def assert_nothing_is_left(processes: list[psutil.Process], shared_memory_before: set[str]) -> None:
    """All of a job's processes are gone within seconds, and so is its shared memory; another job's comes and goes."""
    _, alive = psutil.wait_procs(processes, timeout=15)
    assert not alive, [p.cmdline() for p in alive]
    left, deadline = set(os.listdir("/dev/shm")) - shared_memory_before, time.monotonic() + 90
    while left:
        assert time.monotonic() < deadline, f"still in /dev/shm: {sorted(left)}"
        time.sleep(0.5)
        left &= set(os.listdir("/dev/shm"))


def total(metrics: dict, prefix: str) -> float:
    """The sum of a step's metrics whose names begin so."""
    return sum(value for name, value in metrics.items() if name.startswith(prefix))


def assert_ledger_balances(metrics: list[dict]) -> None:
    """All groups and tokens that were ever issued are consumed, dropped or resident, after every step."""
    for line in metrics:
        for unit, source in (("groups", "issued"), ("tokens", "generated")):
            dropped = total(line, f"ledger/{unit}_dropped_")
            parts = line[f"ledger/{unit}_consumed"] + dropped + line[f"ledger/{unit}_resident"]
            assert line[f"ledger/{unit}_{source}"] == parts


OF_TIME = (
    "time/", "trainer_time/", "worker_time/", "rollout/", "eval/", "mismatch/", "tokens/generated",
    "ledger/tokens_generated", "ledger/tokens_resident", "ledger/groups_issued", "ledger/groups_resident",
)  # fmt: skip
"""Metrics that depend on when something happened: times, rates, and what has come in until the line is written. A
running evaluation defers the weights, and so the groups that are issued with them."""


def without_times(line: dict) -> dict:
    """What two runs of the same responses have in common, of a line of metrics."""
    return {name: value for name, value in line.items() if not name.startswith(OF_TIME)}


def assert_every_group_is_consumed_once(
    job: Job, num_steps: int, groups_per_step: int, may_drop: bool = False
) -> None:
    """All steps are in the records, in order; no group is in two of them, none was skipped, and the ledger agrees."""
    steps, metrics = job.events("step"), job.metrics()
    expected = list(range(1, num_steps + 1))
    assert [event["step"] for event in steps] == job.values("step") == expected
    groups = [group for event in steps for group in event["groups"]]
    assert len(groups) == len(set(groups)) == groups_per_step * num_steps
    assert len(groups) == metrics[-1]["ledger/groups_consumed"]
    assert may_drop or not total(metrics[-1], "ledger/groups_dropped_")
    assert max(groups) < metrics[-1]["ledger/groups_issued"]
    assert_ledger_balances(metrics)
