"""Whole jobs on several GPUs: trainer ranks and engines apart, weights by NCCL."""

import pytest
import torch
from conftest import run_random_job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "options"),
    [
        (2, 1, {}),
        (2, 1, {"weight_sync": "shm"}),
        (3, 2, {"save_memory": "optimizer"}),
        (4, 2, {"rollout_tp": 2}),
        (4, 2, {}),
    ],
)
def test_a_job_on_several_gpus_ends_well_and_engines_agree(tmp_path, num_gpus, num_ranks, options):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} NVIDIA GPUs: torch sees {torch.cuda.device_count()}")
    job = run_random_job(tmp_path, num_gpus, num_ranks, **options)
    assert f"weights by {options.get('weight_sync', 'nccl')}" in job.output()
    assert max(job.values("mismatch/abs_mean")) < 1e-2
    assert max(job.values("staleness/max")) <= 1
