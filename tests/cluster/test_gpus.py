import pytest

from asyncrl.cluster.gpus import MIB, Gpu, ask_nvidia_smi, check_one_kind, choose_visible, visible_gpus

SMI = """\
0, GPU-aaaa1111-0000, NVIDIA H200, 143771, 4, Disabled, 580.95.05
1, GPU-bbbb2222-0000, NVIDIA H200, 143771, 70000, Disabled, 580.95.05

2, GPU-cccc3333-0000, NVIDIA A100-SXM4-80GB, 81920, 0, Enabled, 580.95.05
3, GPU-dddd4444-0000, NVIDIA GB10, [N/A], [N/A], [N/A], 580.95.05
4, GPU-eeee5555-0000, NVIDIA H200, 143771, [N/A], Disabled, [N/A]
5, GPU-ffff6666
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A nvidia-smi that lists these GPUs, and torch that counts those which CUDA_VISIBLE_DEVICES chooses."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\ncat << END\n{SMI}END\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def choose(visible):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr("torch.cuda.device_count", lambda: visible.count(",") + 1)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda index: (1, 3))
        monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "by torch")
        return path

    return choose


def test_memory_is_read_in_bytes_and_where_nvidia_smi_cannot_say_by_torch(nvidia_smi):
    nvidia_smi("1,0")
    assert visible_gpus() == [Gpu("NVIDIA H200", 143771 * MIB, used * MIB) for used in (70000, 4)]
    nvidia_smi("2")
    assert visible_gpus() == [Gpu("by torch", 3, 2)], "it is divided"
    for unknown in ("3", "4", "5"):
        nvidia_smi(unknown)
        assert visible_gpus() == [Gpu("by torch", 3, 2)], "its memory is the host's, or nobody says"


@pytest.mark.parametrize(("cuda", "driver", "compat"), [("13.0", "570.1", ""), ("12.8", "470.199.02", "/usr/lib")])
def test_a_driver_that_is_too_old_for_torch_is_named_unless_cudas_own_library_stands_in(
    nvidia_smi, monkeypatch, cuda, driver, compat
):
    nvidia_smi("0").write_text(f"#!/bin/sh\necho 0, GPU-a, NVIDIA H200, 143771, 4, Disabled, {driver}\n")
    assert visible_gpus(), "torch is for the CPU"
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setenv("LD_LIBRARY_PATH", compat)
    with pytest.raises(ValueError, match=f"NVIDIA driver {driver}: torch .* is for CUDA {cuda} and needs 5.*update"):
        visible_gpus()
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/compat")
    assert visible_gpus()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("1,0", ["1", "0"]),
        ("GPU-bbbb", ["1"]),
        (" 2 ", ["2"]),
        ("", []),
        ("7", None),
        ("MIG-aaaa", None),
        ("GPU-", None),
    ],
)
def test_cuda_visible_devices_chooses_by_index_or_uuid_and_in_its_order(nvidia_smi, visible, expected):
    chosen = choose_visible(ask_nvidia_smi(), visible)
    assert (chosen and [one["index"] for one in chosen]) == expected


def test_gpus_of_several_kinds_are_refused_by_name():
    h200, a100 = Gpu("NVIDIA H200", 141, 0), Gpu("NVIDIA A100", 80, 0)
    check_one_kind([h200, h200])
    with pytest.raises(ValueError, match=r"gpu 0: NVIDIA H200, gpu 1: NVIDIA A100\); choose one kind"):
        check_one_kind([h200, a100])
