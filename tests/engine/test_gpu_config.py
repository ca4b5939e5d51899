"""What vLLM for CUDA makes of our options, and what is called before its engine is forked; fake_h100.py says how."""

import json
import os

from fake_h100 import KV_BYTES
from programs import run_python

SHARED = {
    "scheduler_config.max_num_batched_tokens": "8192",
    "scheduler_config.async_scheduling": "True",
    "use_v2_model_runner": "True",
    "cache_config.kv_cache_memory_bytes": str(KV_BYTES),
    "cache_config.gpu_memory_utilization": "0.4",
    "compilation_config.cudagraph_mode.name": "FULL_AND_PIECEWISE",
    "parallel_config.distributed_executor_backend": "uni",
    "parallel_config.tensor_parallel_size": "1",
    "model_config.enable_sleep_mode": "False",
    "model_config.dtype": "torch.bfloat16",
    "model_config.logprobs_mode": "processed_logprobs",
    "weight_transfer_config.backend": "ipc",
}
"""What vLLM's configuration has for an engine that shares a GPU with the trainer."""
SLEEPS = SHARED | {
    "cache_config.kv_cache_memory_bytes": "None",
    "cache_config.gpu_memory_utilization": "0.8",
    "model_config.enable_sleep_mode": "True",
}
SPLIT = SHARED | {
    "cache_config.kv_cache_memory_bytes": "None",
    "cache_config.gpu_memory_utilization": "0.9",
    "parallel_config.distributed_executor_backend": "mp",
    "parallel_config.tensor_parallel_size": "2",
    "weight_transfer_config.backend": "nccl",
}


def test_vllm_takes_our_options_for_an_h100_as_they_are_meant_and_cuda_is_not_called_before_the_fork(
    tmp_path, monkeypatch
):
    for name in list(os.environ):
        if name.startswith(("VLLM_", "TORCH", "OMP_")):
            monkeypatch.delenv(name)
    run = run_python("tests/fake_h100.py", tmp_path / "result", tmp_path, *SHARED)
    logs = "".join(log.read_text()[-3000:] for log in tmp_path.glob("*.log"))
    assert run.returncode == 0, run.stderr[-3000:] + logs
    found = json.loads((tmp_path / "result").read_text())
    assert found["engines"] == [SHARED, SLEEPS, SPLIT]
    assert found["calls"] == ["engine, fork"], "nothing else has called CUDA or formed a group"
