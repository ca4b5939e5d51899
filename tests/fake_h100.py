"""vLLM for CUDA without a GPU: its own configuration for H100s, and what calls CUDA on the way to an engine's start.

To be run as a process, as nothing of it can be undone: `fake_h100.py RESULT.json FOLDER FACTS`. The CPU
wheel has all the Python of vLLM; its compiled modules for CUDA are empty here, and the driver's answers those of H100s.
"""

import contextlib
import json
import operator
import os
import sys
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

UUIDS = [f"GPU-{index}0000000-0000-0000-0000-000000000000" for index in range(2)]
H100_BYTES = 81559 << 20
KV_BYTES = 20 << 30


def raise_not_divided(*_) -> None:
    """A GPU has no MIG instance."""
    raise RuntimeError("Not Found")


def pretend() -> None:
    """Have vLLM, which must not be imported yet, believe in two H100s."""
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch"):
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    sleeps = ("init_module", "python_create_and_map", "python_unmap_and_release")
    sys.modules["vllm.cumem_allocator"] = SimpleNamespace(**dict.fromkeys(sleeps), __file__="")
    import vllm.platforms
    from vllm.platforms import cuda

    cuda.pynvml = sys.modules["pynvml"] = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(UUIDS),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=UUIDS.index,
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle],
        nvmlDeviceGetName=lambda handle: "NVIDIA H100 80GB HBM3",
        nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=H100_BYTES, free=H100_BYTES),
        nvmlDeviceGetMigDeviceHandleByIndex=raise_not_divided,
        nvmlDeviceGetNumaNodeId=lambda handle: 0,
        nvmlDeviceGetP2PStatus=lambda *_: 0,
        NVML_P2P_CAPS_INDEX_NVLINK=0,
        NVML_P2P_STATUS_OK=0,
        NVMLError=RuntimeError,
        NVMLError_NotSupported=NotImplementedError,
    )
    cuda._cuda_device_count_stateless = lambda *_: len(UUIDS)
    assert vllm.platforms._current_platform is None
    vllm.platforms._current_platform = cuda.NvmlCudaPlatform()
    # for which vLLM would want a Triton for CPUs
    vllm.platforms.vllm_version_matches_substr = lambda _: False
    import vllm.config.vllm
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.model_executor.models import registry

    # What vLLM finds out about a model it keeps in a file; to write that file it imports CUDA kernels, missing here.
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None
    vllm.config.vllm.HAS_TRITON = True
    cuda_wrapper.CudaRTLibrary.__init__ = lambda _: None


class Started(Exception):
    """The engine would be forked now."""


def record_calls() -> tuple[list, list]:
    """Record, from here on, each call that may reach CUDA and each start of an engine; and what engines are made of."""
    calls, engines = [], []

    def recorded(name, answer):
        def call(*_, **__):
            calls.append(name)
            return answer()

        return call

    def start(engine_config, **_):
        engines.append(engine_config)
        calls.append(f"engine, {os.environ.get('VLLM_WORKER_MULTIPROC_METHOD', 'fork')}")
        raise Started

    def is_available():
        """As torch's own in a build for CUDA: by the driver's management library, once vLLM has asked for that."""
        return os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1" or get_device_count() > 0

    get_device_count = recorded("_cuda_getDeviceCount", lambda: 1)
    torch.cuda.is_available, torch.cuda.device_count = is_available, lambda: 1
    torch.cuda._lazy_init = recorded("_lazy_init", lambda: None)
    torch.distributed.init_process_group = recorded("init_process_group", lambda: None)
    pretend()
    from vllm.v1.engine.async_llm import AsyncLLM

    AsyncLLM.from_vllm_config = start
    return calls, engines


def start_each(folder: Path, facts: list[str]) -> dict:
    """Start a rollout worker, then engines of other kinds of placement. Return what was called, and facts of each."""
    calls, engines = record_calls()
    from asyncrl.cluster.placement import WorkerPlacement, WorkerSpec
    from asyncrl.config import Config
    from asyncrl.engine.vllm_setup import start_engine
    from rollout import run_worker
    from scripts.qwen3_shapes import save_random_qwen3

    def spec(placement, transport, **options):
        return WorkerSpec(Config(model=path, **options), placement, path, transport, f"{path}.log")

    save_random_qwen3(folder / "tiny", "tiny")
    path = str(folder / "tiny")
    shared = WorkerPlacement(0, 0, 0, 1, 0.4, kv_cache_bytes=KV_BYTES)
    with contextlib.suppress(Started):
        run_worker(spec(shared, "ipc"), Pipe()[1])
    sleeps = {"colocate": "sleep", "async_ratio": 0.0}
    for engine in (
        spec(WorkerPlacement(0, 0, 0, 1, 0.8), "ipc", **sleeps),
        spec(WorkerPlacement(0, 0, None, 1, 0.9, num_gpus=2), "nccl", rollout_tp=2),
    ):
        with contextlib.suppress(Started):
            start_engine(engine)
    found = [{fact: str(operator.attrgetter(fact)(made)) for fact in facts} for made in engines]
    return {"calls": calls[:1], "engines": found}


if __name__ == "__main__":
    result, folder = map(Path, sys.argv[1:3])
    os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(UUIDS), "VLLM_LOGGING_LEVEL": "ERROR"}
    result.write_text(json.dumps(start_each(folder, sys.argv[3:])))
    os._exit(0)
