"""Whole jobs on one GPU, which trainer and engine share: torchrun, FSDP2, vLLM, weights by CUDA IPC."""

import pytest

from asyncrl.controller.ledger import DROP_REASONS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(params=["large_vocabulary_job", "tiny_job"])
def job(request):
    return request.getfixturevalue(request.param)


def test_a_job_that_shares_one_gpu_ends_well(job):
    assert job.exit_code == 0, job.output[-4000:]
    assert "weights by ipc" in job.output
    assert [line["step"] for line in job.metrics] == [1, 2, 3, 4]
    assert job.metrics[-1]["eval/policy_version"] == 4


def test_no_sample_is_staler_than_the_bound(job):
    staleness = [line["staleness/max"] for line in job.metrics]
    assert staleness[0] == 0 and max(staleness) == 1


def test_the_ledger_balances(job):
    for line in job.metrics:
        for unit, source in (("groups", "issued"), ("tokens", "generated")):
            dropped = sum(line[f"ledger/{unit}_dropped_{reason}"] for reason in DROP_REASONS)
            parts = line[f"ledger/{unit}_consumed"] + dropped + line[f"ledger/{unit}_resident"]
            assert line[f"ledger/{unit}_{source}"] == parts
    assert job.metrics[-1]["ledger/groups_consumed"] == 4 * 8


def test_engine_and_trainer_agree_at_every_version_that_both_scored(large_vocabulary_job):
    mismatch = [line for line in large_vocabulary_job.metrics if "mismatch/abs_mean" in line]
    assert mismatch
    assert max(line["mismatch/abs_mean"] for line in mismatch) < 1e-2


def test_they_agree_because_weights_arrive_not_because_versions_are_alike(large_vocabulary_job):
    metrics = large_vocabulary_job.metrics
    drift = max(line["drift/k3/lag_1"] for line in metrics if "drift/k3/lag_1" in line)
    mismatch = max(line["mismatch/k3"] for line in metrics if "mismatch/k3" in line)
    assert drift > 10 * mismatch


def test_rewards_make_gradients_through_the_gpu_attention(tiny_job):
    assert all(line["loss/grad_norm"] > 0 for line in tiny_job.metrics)
    assert (
        max(line["mismatch/abs_mean"] for line in tiny_job.metrics if "mismatch/abs_mean" in line)
        < 5e-2
    )
