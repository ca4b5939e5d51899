"""What vLLM for CUDA makes of our options, and what is called before its engine is forked; fake_h100.py says how."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_h100 import KV_BYTES

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("kind", ["share", "sleep", "nccl", "tp 2"])
def test_vllm_takes_our_options_for_an_h100_as_they_are_meant(found, kind):
    is_split = kind == "tp 2"
    assert found["configs"][kind] == {
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "async_scheduling": True,
        "v2": True,
        "kv_cache_memory_bytes": KV_BYTES if kind == "share" else None,
        "gpu_memory_utilization": {"share": 0.4, "sleep": 0.8}.get(kind, 0.9),
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "executor": "mp" if is_split else "uni",
        "tensor_parallel_size": 2 if is_split else 1,
        "sleep": kind == "sleep",
        "dtype": "torch.bfloat16",
        "logprobs_mode": "processed_logprobs",
        "transfer": "ipc" if kind in ("share", "sleep") else "nccl",
    }


def test_nothing_calls_cuda_or_forms_a_group_before_the_engine_is_forked(found):
    assert found["calls"] == ["engine, fork"]
