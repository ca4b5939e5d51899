"""What GPUs this node may use: kind, memory, what others hold of it. Asks nvidia-smi, so that no CUDA context is made.

A context would take half a gigabyte of the GPU before anything else is there, and an engine that starts on the same GPU
measures how much is free.
"""

import os
import subprocess
from dataclasses import dataclass

MIB = 2**20
QUERY = "index,uuid,name,memory.total,memory.used,mig.mode.current"
QUERY_TIMEOUT_S = 30


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver describes it."""

    name: str
    total_bytes: int
    used_bytes: int
    """Memory that processes hold now, ours included."""


@dataclass(frozen=True)
class _Listed:
    """A line of nvidia-smi."""

    index: str
    uuid: str
    gpu: Gpu
    is_split: bool
    """Whether the GPU is divided into MIG instances; its memory is then not what one instance has."""


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use, in CUDA's order; none on a machine without.

    Raises ValueError for GPUs of several kinds, among which CUDA's order is not nvidia-smi's and the slowest sets the
    pace of all.
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
    """None where nvidia-smi cannot say: it is missing, fails, or the GPU is divided into MIG instances."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    chosen = choose_visible(parse_nvidia_smi(answer.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if chosen is None or len(chosen) != count or any(listed.is_split for listed in chosen):
        return None
    return [listed.gpu for listed in chosen]


def parse_nvidia_smi(text: str) -> list[_Listed]:
    """Read `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        index, uuid, name, total, used, mig = (field.strip() for field in line.split(","))
        try:
            gpu = Gpu(name, int(total) * MIB, int(used) * MIB)
        except ValueError:  # "[N/A]", where memory is the host's
            continue
        found.append(_Listed(index, uuid, gpu, mig == "Enabled"))
    return found


def choose_visible(listed: list[_Listed], visible: str | None) -> list[_Listed] | None:
    """Those that CUDA_VISIBLE_DEVICES names, by index or the beginning of a UUID, in its order; None if unclear."""
    if visible is None:
        return listed
    chosen = []
    for name in filter(None, map(str.strip, visible.split(","))):
        matching = [one for one in listed if one.index == name or one.uuid.startswith(name)]
        if len(matching) != 1:
            return None
        chosen += matching
    return chosen


def _by_torch(count: int) -> list[Gpu]:
    """The same from CUDA itself, at the price of a context on each."""
    import torch

    found = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, total - free))
    return found
