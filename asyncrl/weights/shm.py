"""Weights through two buffers of host memory, for CPU workers, and where it is asked for, for any worker.

They are made by memfd_create: the kernel frees them with the trainer's last process, so nothing can be left behind.
Where they are copied from or to a GPU their pages are locked: else each copy goes through a small buffer of CUDA's.
"""

import contextlib
import os

import torch

from asyncrl.weights.buffers import Buffers, copy_parameters
from asyncrl.weights.transport import (
    ParameterSpec,
    Staged,
    Weights,
    layout,
)

ALIGNMENT = 64  # bytes, of each parameter
HEADER_BYTES = 4096  # one page, which begins with the version, int64
CHECKSUM_EVERY_VERSION_BELOW = 64 << 20
"""Size in bytes from which each buffer is checked once. Checksums would make updates of large models longer by far."""
NO_CHECKSUM = 0


def slot_bytes(specs: list[ParameterSpec], alignment: int = ALIGNMENT) -> list[int]:
    """Return the bytes from each parameter's start in a payload to the next one's, multiples of `alignment`."""
    return [-(-spec.num_bytes // alignment) * alignment for spec in specs]


def payload_bytes(specs: list[ParameterSpec]) -> int:
    """Return the size of a payload, which has all parameters one after the other."""
    return sum(slot_bytes(specs))


def parameter_views(
    payload: torch.Tensor, specs: list[ParameterSpec], alignment: int = ALIGNMENT
) -> list[tuple[str, torch.Tensor]]:
    """Return views of a [bytes] uint8 payload as the parameters of `specs`, in order, each with its name."""
    slots = payload.split(slot_bytes(specs, alignment))
    return [
        (spec.name, slot[: spec.num_bytes].view(spec.dtype).view(spec.shape))
        for spec, slot in zip(specs, slots, strict=True)
    ]


def lock_pages(memory: torch.Tensor) -> None:
    """Lock the pages of host memory for CUDA; where that cannot be done, say so, and copies are slow."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if code.value != 0:
        print(
            f"warning: weights are copied slowly, as {memory.nbytes} bytes cannot be locked: {code}",
            flush=True,
        )
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # which raises the error again, and takes it away


class SharedBuffer:
    """One version of the weights in shared host memory: a header page, then the parameters."""

    def __init__(self, path: str, specs: list[ParameterSpec], on_gpu: bool = False):
        """Map the file, from whichever process, which copies it from or to a GPU if `on_gpu`."""
        size = HEADER_BYTES + payload_bytes(specs)
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self.header, self.payload = memory[:HEADER_BYTES].view(torch.int64), memory[HEADER_BYTES:]
        self.parameters = parameter_views(self.payload, specs)
        """(Hugging Face name, tensor that aliases the buffer) of every parameter."""
        self._is_checked = False
        if on_gpu:
            lock_pages(memory)

    def checksum(self) -> int:
        """Sum of the payload as int64 words, wrapping; never NO_CHECKSUM."""
        return int(self.payload.view(torch.int64).sum()) or 1

    def seal(self, version: int) -> int:
        """Say that the payload is complete. Returns its checksum, or NO_CHECKSUM where none is due."""
        due = not self._is_checked or len(self.payload) < CHECKSUM_EVERY_VERSION_BELOW
        self._is_checked = True
        self.header[0] = version
        return self.checksum() if due else NO_CHECKSUM

    def check(self, version: int, checksum: int) -> None:
        """Raise RuntimeError unless the buffer holds `version` whole, by its header and by its bytes."""
        held_version = int(self.header[0])
        if held_version != version:
            raise RuntimeError(
                f"weight buffer holds version {held_version}, expected {version}: it was overwritten while in use"
            )
        if checksum == NO_CHECKSUM:
            return
        actual = self.checksum()
        if actual != checksum:
            raise RuntimeError(
                f"weights of version {version} arrived broken: checksum {actual}, the trainer sent {checksum}"
            )


class ShmTransport(Buffers):
    """The trainer's end, which makes both buffers; asyncrl/weights/extension.py has the engine's."""

    def __init__(self, specs: list[ParameterSpec]):
        super().__init__(2, specs)
        size = HEADER_BYTES + payload_bytes(specs)
        self._paths, self._buffers = [], []
        for index in range(2):
            file = os.memfd_create(f"weights-{index}")
            os.ftruncate(file, size)
            self._paths.append(f"/proc/{os.getpid()}/fd/{file}")
            self._buffers.append(
                SharedBuffer(self._paths[-1], specs, on_gpu=torch.cuda.is_initialized())
            )

    def init_info(self, worker: int = 0) -> dict:
        """What an engine needs once: the buffers' paths and how parameters lie in them."""
        return {"paths": self._paths, **layout(self.specs)}

    def stage(self, version: int, parameters: Weights) -> Staged:
        """Copy `parameters` (in the order of the specs) into a free buffer, as `version`; RuntimeError if none is."""
        index = self.take_buffer()
        buffer = self._buffers[index]
        # a reader that is not meant to be here must not take half a payload for a version
        buffer.header[0] = -1
        copy_parameters(parameters, buffer.parameters)
        message = {"buffer": index, "version": version, "checksum": buffer.seal(version)}
        return Staged(index, [message])
