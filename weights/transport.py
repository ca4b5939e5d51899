"""Publish weights and their version to rollout workers, through vLLM's weight-transfer API; one class per transport.

A transport has the trainer's end here and a `WeightTransferEngine` on vLLM's side. To the rest of the program it is

    transport.init_info(worker)           handed to a worker's engine when it starts, or has been started again
    transport.free_buffer()               whether stage may be called now
    transport.stage(version, parameters)  copy the weights into a buffer that no one reads -> Staged
    transport.announce(staged)            these are the weights for any worker that starts or falls behind
    transport.acquire(staged)             one worker is about to read them; release(staged): it has, or has died
    transport.send(worker, staged)        a worker waits to receive them; nothing to do where it reads by itself
    transport.drop(worker)                it has died
    transport.check()                     raises what went wrong in the background
    transport.close()                     the run ends

`shm`: two buffers of host memory, made by memfd_create: the kernel frees them with the trainer's last process, so
nothing can be left behind. `ipc`: the same two buffers in the memory of the GPU that trainer and engine share, sent as
CUDA IPC handles to vLLM's own engine. `nccl`, for separate GPUs, is in weights/nccl.py.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

ALIGNMENT = 64
HEADER_BYTES = 4096  # one page: version and checksum, each int64
CHECKSUM_EVERY_VERSION_BELOW = 64 << 20  # bytes; larger models are checked every CHECKSUM_INTERVAL versions
CHECKSUM_INTERVAL = 10
NO_CHECKSUM = 0
IPC_CHUNK_BYTES = 1 << 29


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as it is sent: its Hugging Face name, dtype and full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def payload_offsets(specs: list[ParameterSpec]) -> tuple[list[int], int]:
    """Byte offset of each parameter in a payload, each a multiple of ALIGNMENT, and the payload's size."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def parameter_views(payload: torch.Tensor, specs: list[ParameterSpec]) -> list[torch.Tensor]:
    """Views of a [bytes] uint8 payload as the parameters of `specs`, in order."""
    offsets, _ = payload_offsets(specs)
    return [
        payload[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
        for start, spec in zip(offsets, specs, strict=True)
    ]


class SharedBuffer:
    """One version of the weights in shared host memory: a header page, then the parameters."""

    def __init__(self, memory: mmap.mmap, specs: list[ParameterSpec]):
        self.memory = memory
        self.specs = specs
        self.header = torch.frombuffer(memory, dtype=torch.int64, count=2)
        self.payload = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES)
        self.views = parameter_views(self.payload, specs)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor that aliases the buffer) of every parameter."""
        return zip((spec.name for spec in self.specs), self.views, strict=True)

    def checksum(self) -> int:
        """Sum of the payload as int64 words, wrapping; never NO_CHECKSUM."""
        return int(self.payload.view(torch.int64).sum()) or 1

    def seal(self, version: int) -> int:
        """Write the header of a complete payload. Returns its checksum, or NO_CHECKSUM where none is due."""
        due = len(self.payload) < CHECKSUM_EVERY_VERSION_BELOW or version % CHECKSUM_INTERVAL == 0
        checksum = self.checksum() if due else NO_CHECKSUM
        self.header[0], self.header[1] = version, checksum
        return checksum

    def check(self, version: int, checksum: int) -> None:
        """Raise RuntimeError unless the buffer holds `version` whole, by its header and by its bytes."""
        found = int(self.header[0])
        if found != version:
            raise RuntimeError(
                f"weight buffer holds version {found}, expected {version}: it was overwritten while in use"
            )
        if checksum != NO_CHECKSUM and (actual := self.checksum()) != checksum:
            raise RuntimeError(
                f"weights of version {version} arrived broken: checksum {actual}, the trainer sent {checksum}"
            )


def open_shared_buffer(path: str, specs: list[ParameterSpec]) -> SharedBuffer:
    """Map a buffer that another process made.

    Raises RuntimeError if its size is not what `specs` need.
    """
    expected = HEADER_BYTES + payload_offsets(specs)[1]
    file = os.open(path, os.O_RDWR)
    try:
        if (size := os.fstat(file).st_size) != expected:
            raise RuntimeError(f"weight buffer {path} has {size} bytes, {len(specs)} parameters need {expected}")
        return SharedBuffer(mmap.mmap(file, size), specs)
    finally:
        os.close(file)


@dataclass(frozen=True)
class Staged:
    """Weights that wait in a buffer."""

    buffer: int
    messages: list[dict]
    """Update infos for the engine on vLLM's side, one after the other."""


@dataclass(frozen=True)
class Announcement:
    """Weights that workers are to load."""

    version: int
    """Policy version of the weights."""
    trainer_version: int
    """Version that the trainer had reached when it published them; ahead of `version` by publish_delay."""
    staged: Staged
    probe: tuple[tuple[int, ...], ...]
    evaluate: bool


class TwoBuffers:
    """Which of two buffers may be written: not the announced one, and not one that a worker is reading.

    With one worker that is at once true of one of them, so the trainer does not wait, unless the worker is still
    loading the version before the announced one; several workers may read two versions at the same time.
    """

    def __init__(self) -> None:
        self._readers = [0, 0]
        self._announced = -1

    def free_buffer(self) -> int | None:
        """Index of a buffer that may be written, or None."""
        free = [i for i, count in enumerate(self._readers) if count == 0 and i != self._announced]
        return free[0] if free else None

    def announce(self, staged: Staged) -> None:
        """Keep these weights for workers that have yet to read them."""
        self._announced = staged.buffer

    def acquire(self, staged: Staged) -> None:
        """Note that one worker is about to read."""
        self._readers[staged.buffer] += 1

    def release(self, staged: Staged) -> None:
        """Note that one worker has read, or has died."""
        self._readers[staged.buffer] -= 1

    def send(self, worker: int, staged: Staged) -> None:
        """Send staged weights to a worker that waits for them."""

    def drop(self, worker: int) -> None:
        """Give up whatever joins this process to a worker that has died."""

    def check(self) -> None:
        """Raise RuntimeError for a transfer that failed, TimeoutError for one that takes too long."""

    def close(self) -> None:
        """Give up all connections."""

    def take_buffer(self) -> int:
        """Index of a buffer that may be written.

        Raises RuntimeError if there is none.
        """
        index = self.free_buffer()
        if index is None:
            raise RuntimeError(f"no weight buffer is free: readers {self._readers}, announced {self._announced}")
        return index


class ShmTransport(TwoBuffers):
    """Weights through host memory: for CPU workers, and where it is asked for, for any worker."""

    def __init__(self, specs: list[ParameterSpec]):
        super().__init__()
        self.specs = specs
        size = HEADER_BYTES + payload_offsets(specs)[1]
        self._files, self._buffers = [], []
        for index in range(2):
            file = os.memfd_create(f"weights-{index}")
            os.ftruncate(file, size)
            self._files.append(file)
            self._buffers.append(SharedBuffer(mmap.mmap(file, size), specs))

    def init_info(self, worker: int = 0) -> dict:
        """What an engine needs once: the buffers' paths and how parameters lie in them."""
        return {
            "paths": [f"/proc/{os.getpid()}/fd/{file}" for file in self._files],
            "names": [spec.name for spec in self.specs],
            "dtype_names": [spec.dtype_name for spec in self.specs],
            "shapes": [list(spec.shape) for spec in self.specs],
        }

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `parameters` (in the order of the specs) into a free buffer, as `version`.

        Raises RuntimeError if there is none.
        """
        index = self.take_buffer()
        buffer = self._buffers[index]
        buffer.header[0] = -1  # a reader that is not meant to be here must not take half a payload for a version
        copy_parameters(parameters, self.specs, buffer.views)
        return Staged(index, [{"buffer": index, "version": version, "checksum": buffer.seal(version)}])


class IpcTransport(TwoBuffers):
    """Weights through the memory of the GPU that trainer and engine share, by vLLM's own CUDA IPC engine.

    Two packed buffers stay allocated, and nothing goes through the host. They are sent in chunks, because vLLM's engine
    copies a whole chunk before it loads it. Each chunk is exported once and for all: every export wraps the buffer's
    memory once more, which would never be undone while the buffer lives. The readers that torch counts per export only
    say when memory may be freed, and this is not.
    """

    def __init__(self, specs: list[ParameterSpec]):
        super().__init__()
        self.specs = specs
        self._sizes = [spec.num_bytes for spec in specs]
        self._chunks = chunks_of(self._sizes, IPC_CHUNK_BYTES)
        self._buffers = [torch.empty(sum(self._sizes), dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._messages = [[self._message(index, chunk) for chunk in self._chunks] for index in range(2)]

    def init_info(self, worker: int = 0) -> dict:
        """vLLM's engine needs to know only that parameters come packed."""
        return {"packed": True}

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `parameters` (in the order of the specs) into a free buffer, as `version`.

        Raises RuntimeError if there is none.
        """
        index = self.take_buffer()
        views = [
            part.view(spec.dtype).view(spec.shape)
            for part, spec in zip(self._buffers[index].split(self._sizes), self.specs, strict=True)
        ]
        copy_parameters(parameters, self.specs, views)
        torch.cuda.synchronize()  # the engine's stream knows nothing of ours
        return Staged(index, self._messages[index])

    def _message(self, index: int, chunk: range) -> dict:
        import base64
        import pickle

        from torch.multiprocessing.reductions import reduce_tensor

        start = sum(self._sizes[: chunk.start])
        sizes = [self._sizes[i] for i in chunk]
        part = self._buffers[index][start : start + sum(sizes)]
        _, handle = reduce_tensor(part)
        handles = {str(torch.cuda.get_device_properties(part.device).uuid): handle}
        specs = [self.specs[i] for i in chunk]
        return {
            "names": [spec.name for spec in specs],
            "dtype_names": [spec.dtype_name for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
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


def copy_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]], specs: list[ParameterSpec], views: list[torch.Tensor]
) -> None:
    """Copy each parameter into its view, casting to the dtype that is sent.

    Raises RuntimeError if names or their order differ from `specs`, ValueError if their number does.
    """
    for (name, tensor), spec, view in zip(parameters, specs, views, strict=True):
        if name != spec.name:
            raise RuntimeError(
                f"parameter {name!r} arrived where {spec.name!r} was expected: the order must not change"
            )
        view.copy_(tensor)
