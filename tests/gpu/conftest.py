"""Real jobs on the first visible GPUs. Without a GPU all tests here are skipped."""

import os
from pathlib import Path

import pytest
from real_job import Job, launch, torchrun, words_of

from scripts.qwen3_shapes import save_random_qwen3

OPTIONS = {
    "steps": 4,
    "groups_per_step": 8,
    "group_size": 4,
    "async_ratio": 1,
    "eval_every": 2,
    "eval_problems": 16,
    "save_every": None,
    "timeout_s": 300,
    "optim.warmup_steps": 0,
    "run_name": "run",
}


@pytest.fixture(scope="session", autouse=True)
def needs_gpu():
    import torch

    if not torch.cuda.device_count():
        pytest.skip("needs an NVIDIA GPU: torch sees none")
    os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def large_vocabulary_job(needs_gpu, tmp_path_factory) -> Job:
    """A random model of the shape of Qwen3-0.6B shares one GPU with its engine."""
    return run_random_job(tmp_path_factory.mktemp("qwen3-0.6b"))


@pytest.fixture(scope="session")
def tiny_job(needs_gpu, tmp_path_factory) -> Job:
    """The tiny model, which earns rewards and so has gradients."""
    return run_job(tmp_path_factory.mktemp("tiny"), ["--model=tiny"])


def run_random_job(folder: Path, num_gpus: int = 1, num_ranks: int = 1, **options) -> Job:
    """Run a job with a random model of the shape of Qwen3-0.6B.

    No response of it earns a reward and all gradients are zero, so weight decay moves the weights: by lr · decay = 5 %
    a step, which bfloat16 resolves and which makes one version's log-probs differ from the next one's.
    """
    save_random_qwen3(folder / "model", "0.6b", "cuda")
    moving = {"model": folder / "model", "max_response_tokens": 64, "lr": 1e-3}
    words = [*words_of(moving | options), "--optim.args", "weight_decay=50"]
    return run_job(folder, words, num_gpus, num_ranks)


def run_job(folder: Path, words: list[str], num_gpus: int = 1, num_ranks: int = 1) -> Job:
    """Run train_async.py with these options besides to its end, which must be a good one."""
    words = [*words_of(OPTIONS), f"--runs-dir={folder}", *words]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    command = [*torchrun(num_ranks), "train_async.py", *words]
    job = launch(command, folder / "run", gpus=",".join(visible[:num_gpus]))
    assert job.wait(500) == 0, job.output()[-4000:]
    return job
