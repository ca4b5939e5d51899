import pytest

from cluster.gpus import MIB, Gpu, check_one_kind, choose_visible, parse_nvidia_smi

SMI = """\
0, GPU-aaaa1111-0000, NVIDIA H200, 143771, 4, Disabled
1, GPU-bbbb2222-0000, NVIDIA H200, 143771, 70000, Disabled

2, GPU-cccc3333-0000, NVIDIA A100-SXM4-80GB, 81920, 0, Enabled
3, GPU-dddd4444-0000, NVIDIA GB10, [N/A], [N/A], [N/A]
"""


def test_memory_is_read_in_bytes_and_a_gpu_without_its_own_is_left_out():
    listed = parse_nvidia_smi(SMI)
    assert [one.index for one in listed] == ["0", "1", "2"]
    assert listed[1].gpu == Gpu("NVIDIA H200", 143771 * MIB, 70000 * MIB)
    assert [one.is_split for one in listed] == [False, False, True]


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
def test_cuda_visible_devices_chooses_by_index_or_uuid_and_in_its_order(visible, expected):
    chosen = choose_visible(parse_nvidia_smi(SMI), visible)
    assert (chosen and [one.index for one in chosen]) == expected


def test_gpus_of_several_kinds_are_refused_by_name():
    h200, a100 = Gpu("NVIDIA H200", 141, 0), Gpu("NVIDIA A100", 80, 0)
    check_one_kind([h200, h200])
    with pytest.raises(ValueError, match=r"gpu 0: NVIDIA H200, gpu 1: NVIDIA A100\); choose one kind"):
        check_one_kind([h200, a100])
