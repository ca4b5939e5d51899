"""Whole jobs on one GPU, which trainer and engine share: torchrun, FSDP2, vLLM, weights by CUDA IPC."""

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["large_vocabulary_job", "tiny_job"])
def test_a_job_that_shares_one_gpu_ends_well_and_keeps_its_bound(name, request):
    """The run itself asserts at every step that its ledger balances."""
    job = request.getfixturevalue(name)
    assert "weights by ipc" in job.output()
    assert job.values("step") == [1, 2, 3, 4]
    assert job.values("eval/policy_version")[-1] == 4
    assert job.values("ledger/groups_consumed")[-1] == 4 * 8
    assert job.values("rollout/tokens_per_s_per_gpu") == job.values("rollout/tokens_per_s")
    staleness = job.values("staleness/max")
    assert staleness[0] == 0 and max(staleness) == 1


def test_engine_and_trainer_agree_because_weights_arrive_not_because_versions_are_alike(
    large_vocabulary_job,
):
    job = large_vocabulary_job
    assert max(job.values("mismatch/abs_mean")) < 1e-2
    assert max(job.values("drift/k3/lag_1")) > 10 * max(job.values("mismatch/k3"))


def test_rewards_make_gradients_through_the_gpu_attention(tiny_job):
    assert min(tiny_job.values("loss/grad_norm")) > 0
    assert max(tiny_job.values("mismatch/abs_mean")) < 5e-2
