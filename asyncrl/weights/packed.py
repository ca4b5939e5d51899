"""All parameters in one tensor, and its chunks. ipc.py and nccl.py send them."""

import torch

from asyncrl.weights.transport import ParameterSpec, Weights, copy_parameters, parameter_views

CHUNK_BYTES = 1 << 29
"""A chunk ends with the parameter that exceeds this number of bytes."""


def chunks_of(specs: list[ParameterSpec], num_bytes: int) -> list[list[ParameterSpec]]:
    """Split parameters into chunks, like vLLM's receiving end: a chunk ends when it has more than `num_bytes`."""
    chunks, total = [[]], 0
    for spec in specs:
        if total > num_bytes:
            chunks.append([])
            total = 0
        chunks[-1].append(spec)
        total += spec.num_bytes
    return chunks


class Packed:
    """All parameters in one [bytes] uint8 tensor, without gaps. This is the form that vLLM's engines expect."""

    def __init__(self, specs: list[ParameterSpec], device: torch.device):
        """Allocate the tensor. Raises RuntimeError if the start of a parameter is not aligned for its dtype."""
        num_bytes = sum(spec.num_bytes for spec in specs)
        self.payload = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.parameters = parameter_views(self.payload, specs, alignment=1)
        """Hugging Face name and view of each."""
        self.chunks = chunks_of(specs, CHUNK_BYTES)
        self.chunk_payloads = self.payload.split(
            [sum(spec.num_bytes for spec in chunk) for chunk in self.chunks]
        )

    def fill(self, parameters: Weights) -> None:
        """Copy all parameters, in the order of the specs. Return when the copies are complete."""
        copy_parameters(parameters, self.parameters)
        if self.payload.is_cuda:
            # the reader has another stream
            torch.cuda.current_stream(self.payload.device).synchronize()
