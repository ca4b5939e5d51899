"""The GPUs that this process may use, as NVIDIA's management library (NVML) describes them.

NVML makes no CUDA context. A context would take half a gigabyte of each GPU, and an engine that starts measures how
much of its GPU is free.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pynvml

LEAST_DRIVER = {"12": 525, "13": 580}
"""Oldest driver by the CUDA that torch was built for."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one part of a GPU that is divided by MIG."""

    name: str
    total_bytes: int
    used_bytes: int
    """Memory that processes and the driver hold now, ours included."""
    uuid: str = ""


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that torch may use, in CUDA's order; none on a host without GPUs.

    Raises ValueError for GPUs of several kinds, and for a driver that is too old for this torch. CUDA orders GPUs of
    several kinds by speed, unlike NVML, and the slowest would set the pace of all.
    """
    import torch

    count = torch.cuda.device_count()  # makes no context either
    if not count:
        return []
    gpus = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))[:count]
    if len({gpu.name for gpu in gpus}) > 1:
        kinds = ", ".join(f"gpu {i}: {gpu.name}" for i, gpu in enumerate(gpus))
        raise ValueError(
            f"GPUs of several kinds are visible ({kinds}); choose one kind by CUDA_VISIBLE_DEVICES"
        )
    check_driver(pynvml.nvmlSystemGetDriverVersion())
    return gpus


def check_driver(version: str) -> None:
    """Raise ValueError for a driver that is too old for this torch, unless CUDA's compat library stands in for it."""
    import torch

    least = LEAST_DRIVER.get((torch.version.cuda or "").partition(".")[0], 0)
    if int(version.partition(".")[0]) < least and "compat" not in os.environ.get(
        "LD_LIBRARY_PATH", ""
    ):
        raise ValueError(
            f"NVIDIA driver {version}: torch {torch.__version__} is for CUDA {torch.version.cuda} and needs {least} or "
            "newer; update the driver, or put CUDA's compat library into LD_LIBRARY_PATH"
        )


def list_gpus(visible: str | None) -> list[Gpu]:
    """Return the GPUs that `visible` names as CUDA_VISIBLE_DEVICES does, in its order; all for None.

    A name is an index, the UUID of a GPU or its beginning, or the UUID of a MIG instance. What no GPU has is left out.
    Raises RuntimeError if there is no driver that answers.
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
            f"no driver says which GPUs are here (CUDA_VISIBLE_DEVICES={visible}): {error}; install the driver, or "
            "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        ) from error


def _describe(handle) -> Gpu:
    """Return what NVML says of a GPU; of a divided one it is the first MIG instance, as CUDA takes that one."""
    with suppress(pynvml.NVMLError):  # it is not divided
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
