"""What GPUs this node may use: kind, memory, what others hold of it. Asks nvidia-smi, so that no CUDA context is made.

A context would take half a gigabyte of the GPU before anything else is there, and an engine that starts on the same GPU
measures how much is free.
"""

import csv
import os
import subprocess
from dataclasses import dataclass

MIB = 2**20
QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "mig.mode.current", "driver_version")
"""What nvidia-smi is asked of each GPU."""
LEAST_DRIVER = {"12": 525, "13": 580}
"""By the CUDA that torch was built for."""
QUERY_TIMEOUT_S = 30


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    name: str
    total_bytes: int
    used_bytes: int
    """Memory that processes hold now, ours included."""


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use, in CUDA's order; none on a machine without.

    Raises ValueError for GPUs of several kinds, among which CUDA's order is not nvidia-smi's and the slowest sets the
    pace of all, and for a driver that is too old for this torch.
    """
    import torch

    count = torch.cuda.device_count()  # by the driver's management library: makes no context
    if not count:
        return []
    gpus = _by_nvidia_smi(count) or _by_torch(count)
    check_one_kind(gpus)
    return gpus


def check_one_kind(gpus: list[Gpu]) -> None:
    """Raise ValueError for GPUs of several kinds."""
    if len({gpu.name for gpu in gpus}) > 1:
        kinds = ", ".join(f"gpu {i}: {gpu.name}" for i, gpu in enumerate(gpus))
        raise ValueError(f"GPUs of several kinds are visible ({kinds}); choose one kind by CUDA_VISIBLE_DEVICES")


def _by_nvidia_smi(count: int) -> list[Gpu] | None:
    """None where nvidia-smi cannot say: it is missing, fails, or a GPU is divided into MIG instances, each of which has
    a part of its memory."""
    chosen = choose_visible(ask_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if chosen is None or len(chosen) != count or any(one["mig.mode.current"] == "Enabled" for one in chosen):
        return None
    return [Gpu(one["name"], int(one["memory.total"]) * MIB, int(one["memory.used"]) * MIB) for one in chosen]


def ask_nvidia_smi() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU, by QUERY: of none where it is missing or fails, or the memory is the host's.

    Raises ValueError for a driver that is too old for this torch.
    """
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    listed = [*csv.DictReader(answer.stdout.splitlines(), QUERY, restval="", skipinitialspace=True)]
    for version in {one["driver_version"] for one in listed}:
        _check_driver(version)
    return [one for one in listed if one["memory.total"].isdigit() and one["memory.used"].isdigit()]


def _check_driver(version: str) -> None:
    import torch

    least = LEAST_DRIVER.get((torch.version.cuda or "").partition(".")[0], 0)
    major, stands_in = version.partition(".")[0], "compat" in os.environ.get("LD_LIBRARY_PATH", "")
    if major.isdigit() and int(major) < least and not stands_in:
        raise ValueError(
            f"NVIDIA driver {version}: torch {torch.__version__} is for CUDA {torch.version.cuda} and needs {least} or "
            "newer; update the driver, or put CUDA's compat library into LD_LIBRARY_PATH"
        )


def choose_visible(listed: list[dict[str, str]], visible: str | None) -> list[dict[str, str]] | None:
    """Those that CUDA_VISIBLE_DEVICES names, by index or the beginning of a UUID, in its order; None if unclear."""
    if visible is None:
        return listed
    chosen = []
    for name in filter(None, map(str.strip, visible.split(","))):
        matching = [one for one in listed if one["index"] == name or one["uuid"].startswith(name)]
        if len(matching) != 1:
            return None
        chosen += matching
    return chosen


def _by_torch(count: int) -> list[Gpu]:
    """The same from CUDA itself, at the price of a context on each."""
    import torch

    memory = enumerate(map(torch.cuda.mem_get_info, range(count)))
    return [Gpu(torch.cuda.get_device_name(index), total, total - free) for index, (free, total) in memory]
