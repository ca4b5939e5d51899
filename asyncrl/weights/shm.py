"""Weights through two buffers of host memory, for CPU workers, and by option for any worker.

The buffers are made by memfd_create, so the kernel frees them with the trainer's last process. With a GPU their pages
are locked. Otherwise each copy would go through a small buffer of CUDA.
"""

import contextlib
import os

import torch

from asyncrl.weights.transport import (
    BufferedTransport,
    ParameterSpec,
    Weights,
    copy_parameters,
    layout,
    parameter_views,
    payload_bytes,
)

HEADER_BYTES = 4096  # one page; it begins with the version, int64


def lock_pages(memory: torch.Tensor) -> None:
    """Lock the pages of host memory for CUDA. Print a warning if that fails, because copies are slow then."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if code.value != 0:
        print(
            f"warning: weights are copied slowly, because {memory.nbytes} bytes cannot be locked: {code}",
            flush=True,
        )
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # raises the error again, and so clears it


class SharedBuffer:
    """One version of the weights in shared host memory: a header page, then the parameters."""

    def __init__(self, path: str, specs: list[ParameterSpec], on_gpu: bool = False):
        """Map the file in any process. The first one extends it. `on_gpu`: this process copies from or to a GPU."""
        size = HEADER_BYTES + payload_bytes(specs)
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.header, self.payload = memory[:HEADER_BYTES].view(torch.int64), memory[HEADER_BYTES:]
        self.parameters = parameter_views(self.payload, specs)
        """(Hugging Face name, tensor that aliases the buffer) of every parameter."""
        if on_gpu:
            lock_pages(memory)

    def check(self, version: int) -> None:
        """Raise RuntimeError unless the buffer holds `version` whole, by its header."""
        held_version = int(self.header[0])
        if held_version != version:
            raise RuntimeError(
                f"weight buffer holds version {held_version}, expected {version}: it was overwritten while in use"
            )


class ShmTransport(BufferedTransport):
    """The trainer's end. It makes both buffers. shm_engine.py has the engine's end."""

    def __init__(self, specs: list[ParameterSpec]):
        super().__init__(specs, num_buffers=2)
        self._paths = []
        self._buffers = []
        for index in range(self.num_buffers):
            file = os.memfd_create(f"weights-{index}")
            self._paths.append(f"/proc/{os.getpid()}/fd/{file}")
            self._buffers.append(
                SharedBuffer(self._paths[-1], specs, on_gpu=torch.cuda.is_initialized())
            )

    def init_info(self, worker: int = 0) -> dict:
        """Return vLLM's init info: the buffers' paths and their layout."""
        return {"paths": self._paths, **layout(self.specs)}

    def write(self, buffer: int, version: int, parameters: Weights) -> list[dict]:
        memory = self._buffers[buffer]
        memory.header[0] = -1  # no version while the payload is incomplete
        copy_parameters(parameters, memory.parameters)
        memory.header[0] = version
        return [{"buffer": buffer, "version": version}]
