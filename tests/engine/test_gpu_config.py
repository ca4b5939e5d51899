"""What vLLM for CUDA makes of our options, and what is called before its engine is forked; fake_h100.py says how."""

import json
import os
import subprocess
import sys

import pytest
from fake_h100 import KV_BYTES
from programs import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What fake_h100.py finds out."""
    folder = tmp_path_factory.mktemp("h100")
    removed = ("VLLM_", "CUDA_", "TORCH", "OMP_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(removed)
    }
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, ROOT / "tests/fake_h100.py", folder / "result", folder]
    run = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    log = folder / "tiny.log"
    text = log.read_text() if log.exists() else ""
    assert run.returncode == 0, run.stdout[-3000:] + text[-3000:]
    return json.loads((folder / "result").read_text())


def test_vllm_takes_our_options_for_an_h100_as_they_are_meant(found):
    shared = {
        "max_num_batched_tokens": 8192,
        "async_scheduling": True,
        "v2": True,
        "kv_cache_memory_bytes": KV_BYTES,
        "gpu_memory_utilization": 0.4,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "executor": "uni",
        "tensor_parallel_size": 1,
        "sleep": False,
        "dtype": "torch.bfloat16",
        "logprobs_mode": "processed_logprobs",
        "transfer": "ipc",
    }
    alone = {"kv_cache_memory_bytes": None}
    sleeps = {"gpu_memory_utilization": 0.8, "sleep": True}
    split = {"executor": "mp", "tensor_parallel_size": 2, "transfer": "nccl"}
    split |= {"gpu_memory_utilization": 0.9}
    assert found["engines"] == [shared, shared | alone | sleeps, shared | alone | split]


def test_nothing_calls_cuda_or_forms_a_group_before_the_engine_is_forked(found):
    assert found["calls"] == ["engine, fork"]
