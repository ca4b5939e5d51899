"""What tests of several modules start from, and which of them are begun first."""

from pathlib import Path

import pytest

LONG = (
    "test_end_to_end.py",
    "job/test_resume_job.py",
    "engine/test_family_logprobs.py",
    "engine/test_proxy.py",
    "test_several_nodes.py",
    "trainer/test_policy.py",
    "../extras/agents/tests/test_end_to_end_agents.py",
    "scripts/test_scripts.py",
    "controller/test_controller_walk.py",
    "trainer/test_model.py",
    "../extras/swarm/tests/test_join.py",
    "job/test_probe.py",
    "test_rollout.py",
    "engine/test_gpu_config.py",
    "test_extending.py",
    "engine/test_reward_pool.py",
    "../extras/swarm/tests/test_verify.py",
    "scripts/test_ablate.py",
    "trainer/test_checkpoint.py",
    "job/test_checkpoints.py",
    "../extras/planning/tests/test_memory_of_a_step.py",
    "../extras/planning/tests/test_plan.py",
    "job/test_command_line.py",
    "cluster/test_cluster.py",
    "trainer/test_attention.py",
    "scripts/test_report.py",
    "data/test_tasks.py",
    "test_errors.py",
    "test_docs.py",
)
"""The files that take longest, in this order: one that is begun last leaves the other processes nothing to do."""


def pytest_collection_modifyitems(items):
    """Long files first, as --dist loadfile deals them out in this order if told --no-loadscope-reorder."""
    places = {(Path(__file__).parent / name).resolve(): place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, as a run without torchrun has."""
    import torch
    import torch.distributed as dist

    # two threads on a busy core wait for each other, and take many times as long
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny random Qwen3 whose head is its embedding; no test changes it."""
    from tiny_policy import save_tiny_model

    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """The same with a head of its own."""
    from tiny_policy import save_tiny_model

    return save_tiny_model(str(tmp_path_factory.mktemp("untied")), tied=False)
