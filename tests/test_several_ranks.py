"""The bodies of the tests of several GPUs, on the CPU: gloo has NCCL's part. tests/gpu/test_gpu_nccl.py has NCCL."""

import pytest
from several_ranks import (
    check_ranks_are_gone_after_a_failure,
    check_two_engines_get_weights_and_one_can_die,
    check_two_ranks_train_as_one,
)


def test_two_ranks_train_as_one(model, tmp_path):
    check_two_ranks_train_as_one("cpu", model, tmp_path, relative=1e-4)


@pytest.mark.slow
def test_ranks_are_gone_soon_after_one_has_failed(model, tmp_path):
    check_ranks_are_gone_after_a_failure("cpu", model, tmp_path, within_s=30)


def test_two_engines_get_weights_and_one_can_die(tmp_path):
    check_two_engines_get_weights_and_one_can_die("cpu", tmp_path)
