"""Real jobs on one GPU, and the table of what they measured. Without a GPU all tests here are skipped."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.lines import read
from scripts.qwen3_shapes import save_random_qwen3

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 500
OPTIONS = {
    "steps": 4,
    "groups-per-step": 8,
    "group-size": 4,
    "async-ratio": 1,
    "eval-every": 2,
    "eval-problems": 16,
    "timeout-s": 300,
    "optim.warmup": 0,
}
SHOWN = "mismatch/abs|time/publish_s|rollout/pause_s|rollout/tokens_per_s|memory/"
_finished: dict[str, list[dict]] = {}
"""Metrics of the jobs that ended well, by name, for the table."""


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    exit_code: int
    output: str
    metrics: list[dict]

    def values(self, name: str) -> list[float]:
        """A metric, of the steps that have it."""
        return [line[name] for line in self.metrics if name in line]


@pytest.fixture(scope="session", autouse=True)
def needs_gpu():
    import torch

    if not torch.cuda.device_count():
        pytest.skip("needs an NVIDIA GPU: torch sees none")


@pytest.fixture(scope="session")
def large_vocabulary_job(needs_gpu, tmp_path_factory) -> Job:
    """A random model of the shape of Qwen3-0.6B shares one GPU with its engine."""
    return run_random_job("random 0.6 B", tmp_path_factory.mktemp("qwen3-0.6b"))


@pytest.fixture(scope="session")
def tiny_job(needs_gpu, tmp_path_factory) -> Job:
    """The tiny model, which earns rewards and so has gradients."""
    return run_job("tiny", tmp_path_factory.mktemp("tiny"), {"model": "tiny"})


def run_random_job(
    name: str, folder: Path, num_gpus: int = 1, num_ranks: int = 1, **options
) -> Job:
    """Run a job with a random model of the shape of Qwen3-0.6B.

    No response of it earns a reward and all gradients are zero, so weight decay moves the weights: by lr · decay = 5 %
    a step, which bfloat16 resolves and which makes one version's log-probs differ from the next one's.
    """
    save_random_qwen3(folder / "model", "0.6b", "cuda")
    moving = {"model": folder / "model", "max-response-tokens": 64, "lr": 1e-3}
    return run_job(
        name, folder, moving | options, "weight_decay=50", num_gpus=num_gpus, num_ranks=num_ranks
    )


def run_job(
    name: str, folder: Path, options: dict, *optim_args: str, num_gpus: int = 1, num_ranks: int = 1
) -> Job:
    """Run `torchrun train_async.py` on the first visible GPUs, without network, to its end."""
    options = OPTIONS | options | {"runs-dir": folder, "run-name": "run"}
    arguments = [f"--{option}={value}" for option, value in options.items()]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(visible[:num_gpus]), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [*torchrun, "train_async.py", *arguments, "--optim.args", *optim_args],
        cwd=ROOT,
        env=os.environ | gpus,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT_S,
    )
    job = Job(result.returncode, result.stdout, read(folder / "run" / "metrics.jsonl"))
    if job.exit_code == 0:
        _finished[name] = job.metrics
    return job


def pytest_terminal_summary(terminalreporter) -> None:
    """Print what each job measured: engine against trainer, weight sync, speed, and memory where it is logged."""
    if not _finished:
        return
    import pandas as pd

    for name, metrics in _finished.items():
        numbers = pd.DataFrame(metrics).filter(regex=SHOWN).agg(["mean", "max"]).T
        terminalreporter.section(f"{name}, {len(metrics)} steps")
        terminalreporter.write_line(numbers.to_string(float_format="{:.4g}".format))
