"""Real jobs on one GPU, and the table of what they measured. Without a GPU all tests here are skipped."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.qwen3_shapes import save_random_qwen3

ROOT = Path(__file__).parents[2]
JOB_TIMEOUT_S = 500
STEPS = 4
OPTIONS = {
    "steps": STEPS,
    "groups-per-step": 8,
    "group-size": 4,
    "async-ratio": 1,
    "eval-every": 2,
    "eval-problems": 16,
    "timeout-s": 300,
}
_finished: dict[str, list[dict]] = {}
"""Metrics of the jobs that ended well, by name, for the table."""


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    exit_code: int
    output: str
    metrics: list[dict]


@pytest.fixture(scope="session", autouse=True)
def needs_gpu():
    import torch

    if not torch.cuda.device_count():
        pytest.skip("needs an NVIDIA GPU: torch sees none")


@pytest.fixture(scope="session")
def large_vocabulary_job(needs_gpu, tmp_path_factory) -> Job:
    """A random model of the shape of Qwen3-0.6B shares one GPU with its engine.

    No response of it earns a reward and all gradients are zero, so weight decay moves the weights: by lr · decay = 5 %
    a step, which bfloat16 resolves and which makes one version's log-probs differ from the next one's.
    """
    folder = tmp_path_factory.mktemp("qwen3-0.6b")
    save_random_qwen3(folder / "model", "0.6b", "cuda")
    return run_job(
        "random 0.6 B",
        folder,
        {"model": folder / "model", "max-response-tokens": 64, "lr": 1e-3},
        "weight_decay=50",
    )


@pytest.fixture(scope="session")
def tiny_job(needs_gpu, tmp_path_factory) -> Job:
    """The tiny model, which earns rewards and so has gradients."""
    return run_job("tiny", tmp_path_factory.mktemp("tiny"), {"model": "tiny"})


@pytest.fixture(scope="session")
def random_qwen3_of_8_layers(tmp_path_factory) -> Path:
    """0.29 B parameters, more than half of them the embedding, for what needs no engine."""
    path = tmp_path_factory.mktemp("qwen3-8-layers")
    save_random_qwen3(path, "0.6b", num_hidden_layers=8)
    return path


def run_job(
    name: str, folder: Path, options: dict, *optim_args: str, num_gpus: int = 1, num_ranks: int = 1
) -> Job:
    """Run `torchrun train_async.py` on the first visible GPUs, without network, to its end."""
    arguments = [f"--{option}={value}" for option, value in (OPTIONS | options).items()]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    command = [
        *torchrun,
        "train_async.py",
        *arguments,
        "--optim.warmup=0",
        "--optim.args",
        *optim_args,
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    result = subprocess.run(
        [*command, f"--runs-dir={folder}", "--run-name=run"],
        cwd=ROOT,
        env=os.environ
        | {"CUDA_VISIBLE_DEVICES": ",".join(visible[:num_gpus]), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=JOB_TIMEOUT_S,
    )
    path = folder / "run" / "metrics.jsonl"
    metrics = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if result.returncode == 0:
        _finished[name] = metrics
    return Job(result.returncode, result.stdout, metrics)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print one line per job: engine against trainer, weight sync, speed, and memory where it is logged."""
    if not _finished:
        return
    terminalreporter.section("jobs on the GPU")
    for name, metrics in _finished.items():
        memory = {
            metric: value for metric, value in metrics[-1].items() if metric.startswith("memory/")
        }
        numbers = {
            "mismatch/abs_mean, nats": _worst(metrics, "mismatch/abs_mean"),
            "mismatch/abs_max, nats": _worst(metrics, "mismatch/abs_max"),
            "time/publish_s, mean": _mean(metrics, "time/publish_s"),
            "rollout/pause_s, mean": _mean(metrics, "rollout/pause_s"),
            "rollout/tokens_per_s, best step": _worst(metrics, "rollout/tokens_per_s"),
            **memory,
        }
        terminalreporter.write_line(f"{name}, {len(metrics)} steps")
        for label, value in numbers.items():
            terminalreporter.write_line(f"  {label:34} {value:.4g}")


def _worst(metrics: list[dict], name: str) -> float:
    return max((line[name] for line in metrics if name in line), default=float("nan"))


def _mean(metrics: list[dict], name: str) -> float:
    values = [line[name] for line in metrics if name in line]
    return sum(values) / len(values) if values else float("nan")
