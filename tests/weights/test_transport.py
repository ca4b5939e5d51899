"""Buffers of weights: who may write and read them when, what is in them, and what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch

from asyncrl.weights.shm import SharedBuffer, ShmTransport
from asyncrl.weights.transport import ParameterSpec

SPECS = [ParameterSpec("a", torch.float32, (3, 5)), ParameterSpec("b", torch.bfloat16, (7,))]

NUM_BYTES = 128
"""Of a payload: each parameter begins at a multiple of 64."""


def parameters(value):
    return [("a", torch.full((3, 5), value)), ("b", torch.full((7,), value))]


def reader(transport, staged):
    path = transport.init_info()["paths"][staged.buffer]
    return SharedBuffer(path, SPECS)


def test_what_is_staged_is_read_in_the_dtype_that_is_sent_unless_it_is_overwritten():
    transport = ShmTransport(SPECS)
    names, dtype_names = ["a", "b"], ["float32", "bfloat16"]
    expected = {"names": names, "dtype_names": dtype_names, "shapes": [[3, 5], [7]]}
    assert expected.items() <= transport.init_info().items()
    staged = transport.stage(4, parameters(2.5))
    (message,) = staged.messages
    assert (message["buffer"], message["version"]) == (staged.buffer, 4)
    buffer = reader(transport, staged)
    buffer.check(4)
    read = dict(buffer.parameters)
    assert read["a"].equal(torch.full((3, 5), 2.5))
    assert read["b"].equal(torch.full((7,), 2.5, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="holds version 4, expected 3"):
        buffer.check(3)


def test_a_buffer_is_written_only_whole():
    """When it may be written is what test_controller_walk.py shows."""
    transport = ShmTransport(SPECS)
    first = transport.stage(0, parameters(0.0))

    def interrupted():
        yield parameters(1.0)[0]
        with pytest.raises(RuntimeError, match="holds version -1, expected 0"):
            reader(transport, first).check(0)
        yield parameters(1.0)[1]

    assert transport.stage(1, interrupted()).buffer == first.buffer
    with pytest.raises(RuntimeError, match="parameter 'b' arrived where 'a' was expected"):
        transport.stage(2, parameters(0.0)[::-1])
    with pytest.raises(ValueError, match="argument"):
        transport.stage(2, parameters(0.0)[:1])


class Cuda:
    """What CUDA's runtime is asked to lock, and the code that it answers."""

    def __init__(self, code):
        self.locked, self.code = [], code

    def cudaHostRegister(self, address, num_bytes, flags):
        self.locked.append((address, num_bytes, flags))
        return SimpleNamespace(value=self.code)


@pytest.mark.parametrize("code", [None, 0, 801])
def test_beside_a_gpu_both_ends_lock_whole_buffers_or_copy_slowly(monkeypatch, capsys, code):
    cuda, on_gpu = Cuda(code), code is not None
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_gpu)
    transport = ShmTransport(SPECS)
    theirs = [SharedBuffer(path, SPECS, on_gpu) for path in transport.init_info()["paths"]]
    buffers = [*transport._buffers, *theirs] if on_gpu else []
    assert cuda.locked == [(buffer.header.data_ptr(), 4096 + NUM_BYTES, 0) for buffer in buffers]
    line = "warning: weights are copied slowly, because 4224 bytes cannot be locked: .*801"
    assert len(re.findall(line, capsys.readouterr().out)) == (4 if code else 0)
