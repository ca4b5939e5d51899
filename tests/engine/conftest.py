"""The engine that these tests share, one for each of their files."""

import os

import pytest

from asyncrl.cluster.placement import WorkerPlacement
from asyncrl.config import Config
from asyncrl.engine.vllm_setup import worker_environment


@pytest.fixture(scope="module")
def options():
    """Options of the engine and the trainer that a file of tests may have its own of."""
    return {}


@pytest.fixture(scope="module")
def pair(tmp_path_factory, options):
    # Imported here, as pytest reads this file even where it collects no test beside it.
    import torch
    import torch.distributed as dist
    from engine_pair import Pair
    from tiny_policy import save_tiny_model

    torch.set_num_threads(1)
    before = dict(os.environ)
    os.environ.update(worker_environment(WorkerPlacement(0, None, None, 1, 0.0)))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    path = save_tiny_model(str(tmp_path_factory.mktemp("model")))
    sampling = {
        "temperature": 0.7,
        "top_p": 0.9,
        "max_prompt_tokens": 200,
        "max_response_tokens": 100,
    }
    pair = Pair(Config(model=path, lr=1e-3, **sampling, **options))
    yield pair
    pair.run(pair.shutdown())
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
