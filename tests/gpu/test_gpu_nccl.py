"""Whole jobs on several GPUs: trainer ranks and engines apart, weights by NCCL."""

import pytest
import torch
from conftest import run_job

from scripts.qwen3_shapes import save_random_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "options"),
    [
        (2, 1, {}),
        (2, 1, {"weight-sync": "shm"}),
        (3, 2, {"save-memory": "optimizer"}),
        (4, 2, {"rollout-tp": 2}),
        (4, 2, {}),
    ],
)
def test_a_job_on_several_gpus_ends_well_and_engines_agree(tmp_path, num_gpus, num_ranks, options):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} NVIDIA GPUs: torch sees {torch.cuda.device_count()}")
    save_random_qwen3(tmp_path / "model", "0.6b", "cuda")
    moving = {"model": tmp_path / "model", "max-response-tokens": 64, "lr": 1e-3}
    job = run_job(
        f"{num_ranks} + {num_gpus - num_ranks} GPUs",
        tmp_path,
        moving | options,
        "weight_decay=50",
        num_gpus=num_gpus,
        num_ranks=num_ranks,
    )
    assert job.exit_code == 0, job.output[-4000:]
    assert f"weights by {options.get('weight-sync', 'nccl')}" in job.output
    mismatch = [line["mismatch/abs_mean"] for line in job.metrics if "mismatch/abs_mean" in line]
    assert mismatch and max(mismatch) < 1e-2
    assert all(line["staleness/max"] <= 1 for line in job.metrics)
