"""What tests of several modules start from, and which of them are begun first."""

import shutil
from pathlib import Path

import pytest

LONG = (
    "test_end_to_end.py",
    "job/test_resume_job.py",
    "test_several_nodes.py",
    "engine/test_proxy.py",
    "trainer/test_policy.py",
    "controller/test_controller_walk.py",
    "scripts/test_evaluate.py",
    "../extras/agents/tests/test_agents_of_hosts.py",
    "engine/test_family_logprobs.py",
    "scripts/test_scripts.py",
    "job/test_probe.py",
    "job/test_checkpoints.py",
    "trainer/test_checkpoint_writer.py",
    "engine/test_reward_pool.py",
    "../extras/swarm/tests/test_join.py",
    "trainer/test_model.py",
    "engine/test_gpu_config.py",
    "../extras/router_replay/tests/test_replay_engine.py",
    "test_rollout.py",
    "../extras/swarm/tests/test_verify.py",
    "../extras/planning/tests/test_plan.py",
    "../extras/planning/tests/test_memory_of_a_step.py",
    "test_extending.py",
    "cluster/test_cluster.py",
    "data/test_tasks.py",
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


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window; its tests are skipped if none is installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    with playwright.sync_playwright() as api:
        path = next(filter(None, map(shutil.which, names)), api.chromium.executable_path)
        if not Path(path).exists():
            pytest.skip(f"no browser is installed: none of {', '.join(names)}")
        browser = api.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
