"""Weights without a copy between processes, if trainer and engine share a GPU."""

import torch

from asyncrl.weights.packed import Packed
from asyncrl.weights.transport import BufferedTransport, ParameterSpec, Weights, layout


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

    def _message(self, specs: list[ParameterSpec], payload: torch.Tensor) -> dict:
        import base64
        import pickle

        from torch.multiprocessing.reductions import reduce_tensor

        _, handle = reduce_tensor(payload)
        handles = {str(torch.cuda.get_device_properties(payload.device).uuid): handle}
        return {
            **layout(specs),
            "tensor_sizes": [spec.num_bytes for spec in specs],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
