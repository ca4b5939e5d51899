"""Weights without a copy between processes, if trainer and engine share a GPU."""

import torch

from asyncrl.weights.shm import parameter_views
from asyncrl.weights.transport import (
    BufferedTransport,
    ParameterSpec,
    Weights,
    copy_parameters,
    layout,
)

CHUNK_BYTES = 1 << 29
"""A chunk ends with the parameter that exceeds this number of bytes."""


def chunks_of(sizes: list[int], num_bytes: int) -> list[range]:
    """Split a list of sizes into ranges, like vLLM's receiving end: a range ends when it has more than `num_bytes`."""
    chunks, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        total += size
        if total > num_bytes:
            chunks.append(range(start, i + 1))
            start, total = i + 1, 0
    return chunks + [range(start, len(sizes))] * (start < len(sizes))


class Packed:
    """All parameters in one [bytes] uint8 tensor, without gaps. This is the form that vLLM's engines expect."""

    def __init__(self, specs: list[ParameterSpec], device: torch.device):
        """Allocate the tensor. Raises RuntimeError if the start of a parameter is not aligned for its dtype."""
        sizes = [spec.num_bytes for spec in specs]
        self.payload = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self.parameters = parameter_views(self.payload, specs, alignment=1)
        """Hugging Face name and view of each."""
        self.chunks = chunks_of(sizes, CHUNK_BYTES)
        self.chunk_payloads = self.payload.split(
            [sum(sizes[i] for i in chunk) for chunk in self.chunks]
        )

    def fill(self, parameters: Weights) -> None:
        """Copy all parameters, in the order of the specs. Return when the copies are complete."""
        copy_parameters(parameters, self.parameters)
        if self.payload.is_cuda:
            # the reader has another stream
            torch.cuda.current_stream(self.payload.device).synchronize()


class IpcTransport(BufferedTransport):
    """Weights through the memory of the GPU that trainer and engine share, by vLLM's own CUDA IPC engine.

    One packed buffer stays allocated. It is sent in chunks, because vLLM's engine copies a whole chunk before it loads
    it. Each chunk is exported only once: torch keeps a wrapper per export for as long as the buffer lives. Torch counts
    readers per export to free memory in time, and this memory is never freed.
    """

    def __init__(self, specs: list[ParameterSpec], device: str = "cuda"):
        """Allocate the buffer. The allocator must not use expandable segments: the engine could not open them."""
        super().__init__(specs, num_buffers=1)
        self._packed = Packed(specs, torch.device(device))
        self._messages = list(map(self._message, self._packed.chunks, self._packed.chunk_payloads))

    def init_info(self, worker: int = 0) -> dict:
        """Return vLLM's init info: parameters come packed."""
        return {"packed": True}

    def write(self, buffer: int, version: int, parameters: Weights) -> list[dict]:
        self._packed.fill(parameters)
        return self._messages

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
