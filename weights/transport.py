"""Publish weights and their version to rollout workers, through vLLM's weight-transfer API; one class per transport.

A transport (shm.py, ipc.py, nccl.py) is the trainer's end; vLLM's is a `WeightTransferEngine`. Its calls are

    transport.init_info(worker)           handed to a worker's engine when it starts, or has been started again
    transport.free_buffer()               whether stage may be called now
    transport.stage(version, parameters)  copy the weights into a buffer that no one reads -> Staged
    transport.announce(staged)            these are the weights for any worker that starts or falls behind
    transport.messages(worker, staged)    update infos for that worker's engine
    transport.acquire(worker, staged)     a worker is about to read them; release(worker, staged): it has, or has died
    transport.send(worker, staged)        a worker waits to receive them; nothing to do where it reads by itself
    transport.drop(worker)                it has died
    transport.check()                     raises what went wrong in the background
    transport.close()                     the run ends
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

ALIGNMENT = 64


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
    """Byte offset of each parameter in a payload, each a multiple of ALIGNMENT, and the payload's size in bytes."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def parameter_views(payload: torch.Tensor, specs: list[ParameterSpec]) -> list[torch.Tensor]:
    """Views of a [bytes] uint8 payload as the parameters of `specs`, in order."""
    return [
        payload[start : start + spec.num_bytes].view(spec.dtype).view(spec.shape)
        for start, spec in zip(payload_offsets(specs)[0], specs, strict=True)
    ]


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
    """Token ids of the sequences that an engine is to score with these weights."""
    evaluate: bool
    """Whether an evaluation is made with them."""
    made_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""


class Transport:
    """What most transports do in these calls."""

    def messages(self, worker: int, staged: Staged) -> list[dict]:
        """Update infos for a worker's engine: the same for all."""
        return staged.messages

    def send(self, worker: int, staged: Staged) -> None:
        """Send staged weights to a worker that waits for them."""

    def drop(self, worker: int) -> None:
        """Give up whatever joins this process to a worker that has died."""

    def check(self) -> None:
        """Raise RuntimeError for a transfer that failed, TimeoutError for one that takes too long."""

    def close(self) -> None:
        """Give up all connections."""


class TwoBuffers(Transport):
    """Which of two buffers may be written: not the announced one, and not one that a worker is reading.

    With one worker that is at once true of one of them, so the trainer does not wait, unless the worker is still
    loading the version before the announced one; several workers may read two versions at the same time.
    """

    def __init__(self) -> None:
        self._readers = [0, 0]
        self._announced = -1

    def free_buffer(self) -> int | None:
        """Index of a buffer that may be written, or None."""
        return next((i for i, count in enumerate(self._readers) if count == 0 and i != self._announced), None)

    def announce(self, staged: Staged) -> None:
        """Keep these weights for workers that have yet to read them."""
        self._announced = staged.buffer

    def acquire(self, worker: int, staged: Staged) -> None:
        """Note that a worker is about to read."""
        self._readers[staged.buffer] += 1

    def release(self, worker: int, staged: Staged) -> None:
        """Note that a worker has read, or has died."""
        self._readers[staged.buffer] -= 1

    def take_buffer(self) -> int:
        """Index of a buffer that may be written; raises RuntimeError if there is none."""
        if (index := self.free_buffer()) is None:
            raise RuntimeError(f"no weight buffer is free: readers {self._readers}, announced {self._announced}")
        return index


def copy_parameters(
    parameters: Iterable[tuple[str, torch.Tensor]], specs: list[ParameterSpec], views: list[torch.Tensor]
) -> None:
    """Copy each parameter into its view, casting to the dtype that is sent.

    Raises RuntimeError if names or their order differ from `specs`, ValueError if their number does.
    """
    for (name, tensor), spec, view in zip(parameters, specs, views, strict=True):
        if name != spec.name:
            raise RuntimeError(f"parameter {name!r} arrived where {spec.name!r} was expected: keep their order")
        view.copy_(tensor)
