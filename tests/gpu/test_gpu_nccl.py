"""Ranks that exchange by NCCL, also on one GPU; and whole jobs on several GPUs, trainer ranks and engines apart."""

import pytest
import torch
from conftest import run_random_job
from several_ranks import (
    check_ranks_are_gone_after_a_failure,
    check_two_engines_get_weights_and_one_can_die,
    check_two_ranks_train_as_one,
)

from scripts.qwen3_shapes import save_random_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def small_model(needs_gpu, tmp_path_factory) -> str:
    """A random Qwen3 of 8 layers with the vocabulary of the real one, 0.29 B parameters."""
    path = tmp_path_factory.mktemp("qwen3-8-layers")
    save_random_qwen3(path, "0.6b", "cuda", num_hidden_layers=8)
    return str(path)


def test_two_ranks_train_as_one(small_model, tmp_path):
    """Tolerance 2 %: bfloat16 keeps 8 bits, and ranks cut micro-batches in another way."""
    check_two_ranks_train_as_one("cuda", small_model, tmp_path, relative=0.02)


def test_ranks_are_gone_soon_after_one_has_failed(small_model, tmp_path):
    """The other rank waits in a kernel of NCCL, where no handler of a signal runs."""
    check_ranks_are_gone_after_a_failure("cuda", small_model, tmp_path, within_s=30)


def test_two_engines_get_weights_and_one_can_die(needs_gpu, tmp_path):
    pytest.importorskip("vllm", reason="needs vLLM's receiving end")
    check_two_engines_get_weights_and_one_can_die("cuda", tmp_path)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "options"),
    [
        pytest.param(2, 1, {}, id="two"),
        pytest.param(2, 1, {"weight_sync": "shm"}, id="shm"),
        pytest.param(3, 2, {"save_memory": "optimizer"}, id="three"),
        pytest.param(4, 2, {}, id="four"),
        pytest.param(4, 2, {"rollout_tp": 2}, id="tp"),
    ],
)
def test_a_job_on_several_gpus_ends_well_and_engines_agree(tmp_path, num_gpus, num_ranks, options):
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} NVIDIA GPUs: torch sees {torch.cuda.device_count()}")
    job = run_random_job(tmp_path, num_gpus, num_ranks, **options)
    assert f"weights by {options.get('weight_sync', 'nccl')}" in job.output()
    # ranks of one engine round partial sums, as in test_gpu_engine.py
    bound = 3e-2 if "rollout_tp" in options else 1e-2
    assert max(job.values("mismatch/abs_mean")) < bound
    assert max(job.values("staleness/max")) <= 1
