"""Publish weights and their version to rollout workers, by vLLM's weight-transfer API.

A transport (shm.py, ipc.py, nccl.py) is the trainer's end. The engine's end is one of vLLM's `WeightTransferEngine`.
"""

import collections
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.messages import TokenSequences

Weights = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face name and full value of each parameter, in the order of sending.

A policy's are lazy: all ranks gather a value together when each of them takes it from its iterator.
"""
ALIGNMENT = 64
"""Bytes. Each parameter of a payload begins at a multiple."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter as it is sent: its Hugging Face name, dtype and full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def layout(specs: list[ParameterSpec]) -> dict[str, list]:
    """Return names, dtypes and shapes in plain data, in the form of vLLM's engines."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def specs_of(
    names: list[str], dtype_names: list[str], shapes: list[list[int]]
) -> list[ParameterSpec]:
    """Return the parameters of a `layout`, its inverse."""
    dtypes = [getattr(torch, dtype_name) for dtype_name in dtype_names]
    return list(map(ParameterSpec, names, dtypes, map(tuple, shapes)))


def slot_bytes(specs: list[ParameterSpec], alignment: int = ALIGNMENT) -> list[int]:
    """Return the bytes of each parameter in a payload, rounded up to multiples of `alignment`."""
    return [-(-spec.num_bytes // alignment) * alignment for spec in specs]


def payload_bytes(specs: list[ParameterSpec]) -> int:
    """Return the size of a payload. It has all parameters one after the other."""
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


@dataclass(frozen=True)
class Staged:
    """Weights that wait in a buffer."""

    buffer: int
    messages: list[dict]
    """vLLM's update infos, in order."""


@dataclass(frozen=True)
class Announcement:
    """Weights that workers must load."""

    version: int
    """Policy version of the weights."""
    trainer_version: int
    """Trainer's version when it published them; up to publish_delay ahead of `version`."""
    staged: Staged
    probe: TokenSequences
    """Token ids of sequences that an engine scores with these weights."""
    evaluate: bool
    """True if an evaluation follows."""
    made_at: float = field(default_factory=time.monotonic)
    """Time of the announcement, monotonic seconds."""


class Transport:
    """The calls of a transport. This class sends no weights; subclasses override some of its methods.

    The controller's lock is held in all calls but `stage` and `close`, so they must return at once.
    """

    keeps_readable = True
    """True if a worker that starts can read the announced weights until newer ones are announced."""

    def __init__(self, specs: Sequence[ParameterSpec] = ()):
        self.specs = specs
        self.readers: collections.Counter[int] = collections.Counter()
        self.readable_buffer = -1
        """Buffer of the announced weights that a worker can begin to read; −1 without one."""

    def init_info(self, worker: int = 0) -> dict:
        """Return vLLM's init info for a worker's engine."""
        return {}

    def try_reserve_buffer(self) -> bool:
        """Make a buffer that no worker reads unreadable. Return whether there is such a buffer.

        No worker can then begin to read it, so `stage` finds the same buffer.
        """
        return True

    def stage(self, version: int, parameters: Weights) -> Staged:
        """Copy weights into the buffer that `try_reserve_buffer` keeps free. Raises RuntimeError without a free one."""
        gather_only(parameters)
        # A version counts as its own buffer, because no buffer is written.
        return Staged(buffer=version, messages=[])

    def make_readable(self, staged: Staged) -> None:
        """Make these weights the announced ones: workers can begin to read them."""
        self.readable_buffer = staged.buffer

    def can_read(self, staged: Staged) -> bool:
        """Return whether a worker can begin to read: not if newer weights are being written into the buffer."""
        return staged.buffer == self.readable_buffer

    def acquire(self, staged: Staged) -> None:
        """Register a worker that begins to read."""
        self.readers[staged.buffer] += 1

    def release(self, staged: Staged) -> None:
        """Remove a worker that has read, or has died."""
        self.readers[staged.buffer] -= 1

    def send(self, worker: int, staged: Staged) -> None:
        """Send staged weights to a worker that waits for them. With most transports the worker reads them instead."""

    def disconnect(self, worker: int) -> None:
        """Close the connection to a worker that has died."""

    def check(self) -> None:
        """Raise RuntimeError if a transfer has failed."""

    def close(self) -> None:
        """Close all connections."""


class BufferedTransport(Transport):
    """A transport with one or two buffers. It never writes a buffer that a worker is reading.

    With two buffers it does not write the announced one either. So the trainer waits only for a worker that still loads
    the version before the announced one. A single buffer is written when all workers have loaded it. A worker that
    starts meanwhile waits for the next announcement.
    """

    def __init__(self, specs: Sequence[ParameterSpec], num_buffers: int):
        super().__init__(specs)
        self.num_buffers = num_buffers
        self.keeps_readable = num_buffers > 1

    def write(self, buffer: int, version: int, parameters: Weights) -> list[dict]:
        """Copy `parameters`, in the order of the specs, into a buffer. Return the messages of `Staged`."""
        raise NotImplementedError

    def try_reserve_buffer(self) -> bool:
        buffer = self._free_buffer()
        if buffer == self.readable_buffer:
            self.readable_buffer = -1
        return buffer is not None

    def _free_buffer(self) -> int | None:
        kept = self.readable_buffer if self.keeps_readable else None
        for buffer in range(self.num_buffers):
            if not self.readers[buffer] and buffer != kept:
                return buffer
        return None

    def stage(self, version: int, parameters: Weights) -> Staged:
        buffer = self._free_buffer()
        if buffer is None:
            raise RuntimeError(
                f"no weight buffer is free: readers {dict(self.readers)}, readable {self.readable_buffer}"
            )
        return Staged(buffer, self.write(buffer, version, parameters))


def gather_only(parameters: Weights) -> None:
    """Take each parameter without keeping it. Other ranks copy them, and gathering is collective."""
    collections.deque(parameters, maxlen=0)


def copy_parameters(parameters: Weights, views: Weights) -> None:
    """Copy each parameter into its view. The dtype of the view is sent.

    Raises RuntimeError if names or their order differ, ValueError if their number differs.
    """
    for (name, tensor), (expected, view) in zip(parameters, views, strict=True):
        if name != expected:
            raise RuntimeError(
                f"parameter {name!r} arrived where {expected!r} was expected: keep their order"
            )
        view.copy_(tensor)
