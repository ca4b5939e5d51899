from types import SimpleNamespace

import pytest
import torch

from asyncrl.weights.ipc import chunks_of
from asyncrl.weights.shm import (
    NO_CHECKSUM,
    SharedBuffer,
    ShmTransport,
    parameter_views,
    payload_bytes,
)
from asyncrl.weights.transport import Buffers, ParameterSpec, Staged

SPECS = [ParameterSpec("a", torch.float32, (3, 5)), ParameterSpec("b", torch.bfloat16, (7,))]


def parameters(value):
    return [("a", torch.full((3, 5), value)), ("b", torch.full((7,), value))]


def reader(transport, staged):
    path = transport.init_info()["paths"][staged.buffer]
    return SharedBuffer(path, SPECS)


def test_what_is_staged_is_read_in_the_dtype_that_is_sent():
    transport = ShmTransport(SPECS)
    staged = transport.stage(4, parameters(2.5))
    buffer = reader(transport, staged)
    buffer.check(4, staged.messages[0]["checksum"])
    read = dict(buffer.parameters)
    assert read["a"].equal(torch.full((3, 5), 2.5))
    assert read["b"].equal(torch.full((7,), 2.5, dtype=torch.bfloat16))


def test_a_buffer_that_was_overwritten_or_is_half_written_is_refused():
    transport = ShmTransport(SPECS)
    staged = transport.stage(4, parameters(2.5))
    buffer = reader(transport, staged)
    with pytest.raises(RuntimeError, match="holds version 4, expected 3"):
        buffer.check(3, NO_CHECKSUM)
    dict(buffer.parameters)["a"][1, 1] = 0.0
    with pytest.raises(RuntimeError, match="version 4 arrived broken: checksum"):
        buffer.check(4, staged.messages[0]["checksum"])


def test_a_buffer_is_written_only_while_it_is_neither_announced_nor_read():
    transport = ShmTransport(SPECS)
    first = transport.stage(0, parameters(0.0))
    transport.announce(first)
    transport.acquire(first)
    second = transport.stage(1, parameters(1.0))
    assert second.buffer != first.buffer
    transport.announce(second)
    assert not transport.reserve(), "one is being read, the other is announced"
    with pytest.raises(RuntimeError, match="no weight buffer is free"):
        transport.stage(2, parameters(2.0))
    transport.release(first)
    assert transport.stage(2, parameters(2.0)).buffer == first.buffer


def test_of_one_buffer_nobody_begins_to_read_what_is_being_written():
    buffers = Buffers(1)
    assert buffers.reserve() and buffers.reserve()
    first = Staged(buffers.take_buffer(), [])
    buffers.announce(first)
    assert buffers.can_read(first) and not buffers.keeps_announced
    buffers.acquire(first)
    assert not buffers.reserve() and buffers.can_read(first), "another may read what is read"
    buffers.release(first)
    assert buffers.reserve() and not buffers.can_read(first)
    buffers.announce(Staged(buffers.take_buffer(), []))
    assert buffers.can_read(first)


def test_another_order_or_number_of_parameters_is_refused():
    transport = ShmTransport(SPECS)
    with pytest.raises(RuntimeError, match="parameter 'b' arrived where 'a' was expected"):
        transport.stage(0, parameters(0.0)[::-1])
    with pytest.raises(ValueError, match="argument"):
        transport.stage(0, parameters(0.0)[:1])


class Cuda:
    """What CUDA's runtime is asked to lock; it refuses once it has been told to."""

    def __init__(self, monkeypatch):
        self.locked, self.refuses = [], False
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    def cudaHostRegister(self, address, num_bytes, flags):
        self.locked.append((address, num_bytes))
        return SimpleNamespace(value=801 if self.refuses else 0)


def test_beside_a_gpu_both_ends_lock_whole_buffers_and_only_the_first_version_in_each_has_a_checksum(
    monkeypatch,
):
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr("asyncrl.weights.shm.CHECKSUM_EVERY_VERSION_BELOW", 0)
    transport = ShmTransport(SPECS)
    theirs = [SharedBuffer(path, SPECS, on_gpu=True) for path in transport.init_info()["paths"]]
    buffers = [*transport._buffers, *theirs]
    assert cuda.locked == [(buffer.header.data_ptr(), 4096 + 128) for buffer in buffers]
    checksums = []
    for version in range(7, 12):
        staged = transport.stage(version, parameters(version))
        transport.announce(staged)
        theirs[staged.buffer].check(version, staged.messages[0]["checksum"])
        checksums.append(staged.messages[0]["checksum"])
    assert [checksum != NO_CHECKSUM for checksum in checksums] == [True, True, False, False, False]


def test_where_memory_cannot_be_locked_weights_go_the_slow_way(monkeypatch, capsys):
    Cuda(monkeypatch).refuses = True
    transport = ShmTransport(SPECS)
    assert "weights are copied slowly" in (said := capsys.readouterr().out) and "801" in said
    staged = transport.stage(3, parameters(1.0))
    reader(transport, staged).check(3, staged.messages[0]["checksum"])


def test_parameters_are_aligned_and_do_not_overlap():
    assert payload_bytes(SPECS) == 128
    views = dict(parameter_views(torch.zeros(128, dtype=torch.uint8), SPECS))
    assert views["b"].data_ptr() - views["a"].data_ptr() == 64
    views["a"].fill_(1.0)
    assert not views["b"].any()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3, 3, 3], [[0, 1, 2]]),
        ([9, 1, 1], [[0], [1, 2]]),
        ([1, 9], [[0, 1]]),
        ([6], [[0]]),
        ([3, 3, 1, 6], [[0, 1, 2], [3]]),
    ],
)
def test_chunks_are_neighbours_that_end_with_what_goes_beyond_the_limit_and_cover_all(
    sizes, expected
):
    assert [list(chunk) for chunk in chunks_of(sizes, 6)] == expected
