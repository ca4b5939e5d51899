"""GPUs as NVML describes them: a fake of the library with five of them, and the library itself without a driver."""

from types import SimpleNamespace

import psutil
import pytest

from asyncrl.cluster.gpus import Gpu, list_gpus, visible_gpus

GIB = 2**30
H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"
GPUS = [
    Gpu(H200, 140 * GIB, 4 * GIB, "GPU-aaaa1111-0000"),
    Gpu(H200, 140 * GIB, 70 * GIB, "GPU-bbbb2222-0000"),
    Gpu(A100, 80 * GIB, 0, "GPU-cccc3333-0000"),
    Gpu("NVIDIA GB10", 0, 0, "GPU-dddd4444-0000"),
    Gpu(A100, 80 * GIB, 0, "GPU-eeee5555-0000"),
]
INSTANCE = Gpu(f"{A100} MIG 1g.10gb", 10 * GIB, GIB, "MIG-eeee6666-0000")
"""The first instance of the last GPU, which is divided."""


class NVMLError(Exception):
    """Every error of the library."""


class NotSupported(NVMLError):
    """A GPU cannot say that."""


def memory_of(gpu):
    if gpu.name == "NVIDIA GB10":
        raise NotSupported
    return SimpleNamespace(total=gpu.total_bytes, free=gpu.total_bytes - gpu.used_bytes)


def instance_of(gpu, index):
    if gpu is not GPUS[-1]:
        raise NotSupported
    return INSTANCE


@pytest.fixture
def nvml(monkeypatch):
    """The library; torch counts those GPUs that CUDA_VISIBLE_DEVICES chooses."""
    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NotSupported,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(GPUS),
        nvmlDeviceGetHandleByIndex=GPUS.__getitem__,
        nvmlDeviceGetHandleByUUID=lambda uuid: {INSTANCE.uuid: INSTANCE}[uuid],
        nvmlDeviceGetMigDeviceHandleByIndex=instance_of,
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
    )
    monkeypatch.setattr("asyncrl.cluster.gpus.pynvml", fake)
    return fake


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        ("1,0", 2, [GPUS[1], GPUS[0]]),
        ("GPU-bbbb", 1, [GPUS[1]]),
        (" 2 ", 1, [GPUS[2]]),
        ("GPU-bbbb2222-0000,0", 2, [GPUS[1], GPUS[0]]),
        ("", 0, []),
        ("MIG-eeee6666-0000", 1, [INSTANCE]),
        ("4", 1, [INSTANCE]),
        ("1,0,7", 2, [GPUS[1], GPUS[0]]),
        ("0,9,1", 1, [GPUS[0]]),
    ],
)
def test_cuda_visible_devices_chooses_in_its_order_what_torch_counts_and_no_context_is_made(
    nvml, monkeypatch, visible, count, expected
):
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: pytest.fail("a context was made"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    assert visible_gpus() == expected


def test_without_a_choice_all_are_listed_and_a_divided_one_is_its_first_instance(nvml):
    listed = list_gpus(None)
    assert [gpu.uuid for gpu in listed] == [*(gpu.uuid for gpu in GPUS[:-1]), INSTANCE.uuid]
    assert listed[3].total_bytes == psutil.virtual_memory().total, (
        "this GPU shares the host's memory"
    )


def test_gpus_of_several_kinds_are_refused_by_name(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"gpu 0: NVIDIA H200, gpu 1: NVIDIA A100-SXM4-80GB\); select one kind"
    ):
        visible_gpus()
