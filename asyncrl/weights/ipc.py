"""Weights without a copy between processes, where trainer and engine share a GPU."""

import torch

from asyncrl.weights.buffers import Buffers, copy_parameters
from asyncrl.weights.shm import parameter_views
from asyncrl.weights.transport import (
    ParameterSpec,
    Staged,
    Weights,
    layout,
)

CHUNK_BYTES = 1 << 29
"""After so many bytes a chunk ends, with the parameter that has them."""


def chunks_of(sizes: list[int], num_bytes: int) -> list[range]:
    """Cut a list into runs of neighbours where vLLM's receiving end cuts: after the item with which a run has more
    than `num_bytes`."""
    chunks, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > num_bytes:
            chunks.append(range(start, i + 1))
            start, total = i + 1, 0
    return chunks + [range(start, len(sizes))] * (start < len(sizes))


class Packed:
    """All parameters one after the other in one [bytes] uint8 tensor, without a gap, as vLLM's engines expect them."""

    def __init__(self, specs: list[ParameterSpec], device: torch.device):
        """Allocate it. Raises RuntimeError if a parameter would begin where none of its dtype may."""
        sizes = [spec.num_bytes for spec in specs]
        self.payload = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.parameters = parameter_views(self.payload, specs, alignment=1)
        """Hugging Face name and view of each."""
        self.chunks = chunks_of(sizes, CHUNK_BYTES)
        self.chunk_payloads = self.payload.split(
            [sum(sizes[i] for i in chunk) for chunk in self.chunks]
        )

    def fill(self, parameters: Weights) -> None:
        """Copy all parameters, in the order of the specs; returns when they are there."""
        copy_parameters(parameters, self.parameters)
        if self.payload.is_cuda:
            # whoever reads them has another stream
            torch.cuda.current_stream(self.payload.device).synchronize()


class IpcTransport(Buffers):
    """Weights through the memory of the GPU that trainer and engine share, by vLLM's own CUDA IPC engine.

    One packed buffer stays allocated, and nothing goes through the host. It is sent in chunks, because vLLM's engine
    copies a whole chunk before it loads it. Each chunk is exported once and for all: every export wraps the buffer's
    memory once more, which would never be undone while the buffer lives. The readers that torch counts per export only
    say when memory may be freed, and this is not.
    """

    def __init__(self, specs: list[ParameterSpec], device: str = "cuda"):
        """Allocate the buffer, where the allocator may not use expandable segments: the engine could not open them."""
        super().__init__(1, specs)
        self._packed = Packed(specs, torch.device(device))
        self._messages = list(map(self._message, self._packed.chunks, self._packed.chunk_payloads))

    def init_info(self, worker: int = 0) -> dict:
        """vLLM's engine needs to know only that parameters come packed."""
        return {"packed": True}

    def stage(self, version: int, parameters: Weights) -> Staged:
        """Copy `parameters` (in the order of the specs) into the buffer, as `version`.

        Raises RuntimeError while it is read.
        """
        index = self.take_buffer()
        self._packed.fill(parameters)
        return Staged(index, self._messages)

    def _message(self, chunk: range, payload: torch.Tensor) -> dict:
        import base64
        import pickle

        from torch.multiprocessing.reductions import reduce_tensor

        _, handle = reduce_tensor(payload)
        handles = {str(torch.cuda.get_device_properties(payload.device).uuid): handle}
        specs = self.specs[chunk.start : chunk.stop]
        return {
            **layout(specs),
            "tensor_sizes": [spec.num_bytes for spec in specs],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
