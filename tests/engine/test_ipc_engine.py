"""The ipc transport and vLLM's own engine for it, between two processes on the CPU: shared host memory has the part of
CUDA IPC, and all else is what runs on a GPU."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cpu_transports import patch_ipc
from engine_pair import Pair
from tiny_policy import save_tiny_model

import asyncrl.weights.ipc
from asyncrl.cluster.placement import WorkerPlacement
from asyncrl.config import Config
from asyncrl.engine.vllm_setup import worker_environment
from asyncrl.weights.ipc import IpcTransport

CHUNK_BYTES = 1 << 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Shims first: the engine is forked, and has them too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in worker_environment(WorkerPlacement(0, None, None, 1, 0.0)).items():
            patch.setenv(name, value)
        patch_ipc(patch, CHUNK_BYTES)
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        path = save_tiny_model(str(tmp_path_factory.mktemp("model")), tied=False)
        made = Pair(Config(model=path), "ipc", functools.partial(IpcTransport, device="cpu"))
        yield made
        made.run(made.shutdown())
        dist.destroy_process_group()


def test_chunks_of_which_some_end_within_a_layer_bring_every_version_to_vllms_engine(pair):
    messages = pair.transport.stage(0, pair.policy.named_full_parameters()).messages
    layers = [
        {name.split(".")[2] for name in message["names"] if ".layers." in name}
        for message in messages
    ]
    assert len(messages) > 3 and any(one & other for one, other in itertools.pairwise(layers))
    tokens = tuple(np.random.default_rng(0).integers(3, 150, 60).tolist())
    for version in range(1, 4):
        pair.perturb()
        trainer = pair.trainer_logprobs(tokens[:1], tokens[1:], raw=True)
        assert np.abs(pair.run(pair.proxy.score(tokens)) - trainer).max() > 1e-2, (
            "the engine has old weights"
        )
        pair.sync(version)
        assert np.abs(pair.run(pair.proxy.score(tokens)) - trainer).max() < 1e-4


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_which_no_other_process_may_open_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    with pytest.raises(ValueError, match=f"{name}=.*--weight-sync shm"):
        IpcTransport([], device="cpu")
    monkeypatch.setenv(name, "expandable_segments:False")
    asyncrl.weights.ipc.check_allocator()
