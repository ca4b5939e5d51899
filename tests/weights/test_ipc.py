import pytest

from asyncrl.weights.ipc import IpcTransport, check_allocator


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_which_no_other_process_may_open_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:512,expandable_segments:True")
    with pytest.raises(ValueError, match=f"{name}=.*--weight-sync shm"):
        IpcTransport([], device="cpu")
    monkeypatch.setenv(name, "expandable_segments:False")
    check_allocator()
