"""Weights without a copy between processes, where trainer and engine share a GPU."""

from collections.abc import Iterable

import torch

from weights.transport import Buffers, ParameterSpec, Staged, copy_parameters, layout

IPC_CHUNK_BYTES = 1 << 29


class IpcTransport(Buffers):
    """Weights through the memory of the GPU that trainer and engine share, by vLLM's own CUDA IPC engine.

    One packed buffer stays allocated, and nothing goes through the host. It is sent in chunks, because vLLM's engine
    copies a whole chunk before it loads it. Each chunk is exported once and for all: every export wraps the buffer's
    memory once more, which would never be undone while the buffer lives. The readers that torch counts per export only
    say when memory may be freed, and this is not.
    """

    def __init__(self, specs: list[ParameterSpec]):
        super().__init__(num_buffers=1)
        self.specs = specs
        self._sizes = [spec.num_bytes for spec in specs]
        self._buffer = torch.empty(sum(self._sizes), dtype=torch.uint8, device="cuda")
        self._messages = [self._message(chunk) for chunk in chunks_of(self._sizes, IPC_CHUNK_BYTES)]

    def init_info(self, worker: int = 0) -> dict:
        """vLLM's engine needs to know only that parameters come packed."""
        return {"packed": True}

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `parameters` (in the order of the specs) into the buffer, as `version`.

        Raises RuntimeError while it is read.
        """
        index = self.take_buffer()
        views = [
            (spec.name, part.view(spec.dtype).view(spec.shape))
            for part, spec in zip(self._buffer.split(self._sizes), self.specs, strict=True)
        ]
        copy_parameters(parameters, views)
        torch.cuda.synchronize()  # the engine's stream knows nothing of ours
        return Staged(index, self._messages)

    def _message(self, chunk: range) -> dict:
        import base64
        import pickle

        from torch.multiprocessing.reductions import reduce_tensor

        start = sum(self._sizes[: chunk.start])
        sizes = [self._sizes[i] for i in chunk]
        part = self._buffer[start : start + sum(sizes)]
        _, handle = reduce_tensor(part)
        handles = {str(torch.cuda.get_device_properties(part.device).uuid): handle}
        return {
            **layout([self.specs[i] for i in chunk]),
            "tensor_sizes": sizes,
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }


def chunks_of(sizes: list[int], max_bytes: int) -> list[range]:
    """Cut a list into runs of neighbours with at most `max_bytes` together; a larger item is a run of its own."""
    chunks, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > max_bytes:
            chunks.append(range(start, i))
            start, total = i, 0
        total += size
    return [*chunks, range(start, len(sizes))]
