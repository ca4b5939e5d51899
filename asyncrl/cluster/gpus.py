"""The GPUs that this process may use, from NVIDIA's management library (NVML).

NVML makes no CUDA context. A context takes half a gigabyte of each GPU, and a starting engine measures its free memory.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pynvml


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one."""

    name: str
    total_bytes: int
    used_bytes: int
    """Memory that processes and the driver hold now."""
    uuid: str = ""


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch may use, in CUDA's order; [] on a host without GPUs.

    Raises ValueError for GPUs of several kinds. CUDA orders different GPUs by speed, and NVML does not. The slowest
    would determine the speed of a step.
    """
    import torch

    count = torch.cuda.device_count()  # makes no context either
    if not count:
        return []
    gpus = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))[:count]
    if len({gpu.name for gpu in gpus}) > 1:
        kinds = ", ".join(f"gpu {i}: {gpu.name}" for i, gpu in enumerate(gpus))
        raise ValueError(
            f"GPUs of several kinds are visible ({kinds}); select one kind by CUDA_VISIBLE_DEVICES"
        )
    return gpus


def list_gpus(visible: str | None) -> list[Gpu]:
    """Return the GPUs named by `visible`, a value of CUDA_VISIBLE_DEVICES, in its order; all for None.

    A name is an index, the UUID of a GPU or its beginning, or the UUID of a MIG instance. Unknown names are ignored.
    Raises RuntimeError if no driver answers.
    """
    try:
        pynvml.nvmlInit()
        gpus = [
            _describe(pynvml.nvmlDeviceGetHandleByIndex(i))
            for i in range(pynvml.nvmlDeviceGetCount())
        ]
        if visible is None:
            return gpus
        named_gpus = []
        for name in filter(None, map(str.strip, visible.split(","))):
            if name.startswith("MIG-"):
                named_gpus.append(_describe(pynvml.nvmlDeviceGetHandleByUUID(name)))
            else:
                named_gpus += [
                    gpu for i, gpu in enumerate(gpus) if name == str(i) or gpu.uuid.startswith(name)
                ]
        return named_gpus
    except pynvml.NVMLError as error:
        raise RuntimeError(
            f"no driver lists the GPUs (CUDA_VISIBLE_DEVICES={visible}): {error}; install the driver, or start the "
            "container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        ) from error


def _describe(handle) -> Gpu:
    """Return NVML's data of a GPU, or of its first MIG instance, because CUDA uses only that one."""
    with suppress(pynvml.NVMLError):  # it has no MIG instance
        handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = memory.total, memory.free
    except pynvml.NVMLError_NotSupported:  # the GPU shares the host's memory
        memory = psutil.virtual_memory()
        total, free = memory.total, memory.available
    return Gpu(
        pynvml.nvmlDeviceGetName(handle), total, total - free, pynvml.nvmlDeviceGetUUID(handle)
    )
