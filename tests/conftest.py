"""What tests of several modules start from."""

import pytest


def pytest_ignore_collect(collection_path, config):
    """Where whole jobs alone are chosen, no file without one is read: each process would import for a long time."""
    if not config.option.markexpr.startswith("e2e and ") or not collection_path.match("test_*.py"):
        return None
    return True if "pytest.mark.e2e" not in collection_path.read_text() else None


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone, as a run without torchrun has."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # two threads on a busy core wait for each other, and take many times as long
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def tiny_models():
    """The tiny models are there: made before the clock of any job starts."""
    from weights.models import resolve_model

    for task in ("addition", "frozen_lake", "guess_number"):
        resolve_model("tiny", task)
