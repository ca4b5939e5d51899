"""Publish weights and their version to rollout workers, through vLLM's weight-transfer API; one class per transport.

A transport (shm.py, ipc.py, nccl.py) is the trainer's end; vLLM's is a `WeightTransferEngine`.
"""

import collections
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from asyncrl.messages import TokenSequences

Weights = Iterable[tuple[str, torch.Tensor]]
"""Hugging Face name and full value of each parameter, in the order of sending."""


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
    """Names, dtypes and shapes in plain data, as vLLM's engines are told of them."""
    return {
        "names": [spec.name for spec in specs],
        "dtype_names": [str(spec.dtype).removeprefix("torch.") for spec in specs],
        "shapes": [list(spec.shape) for spec in specs],
    }


def specs_of(
    names: list[str], dtype_names: list[str], shapes: list[list[int]]
) -> list[ParameterSpec]:
    """Return the parameters of a `layout`."""
    dtypes = [getattr(torch, dtype_name) for dtype_name in dtype_names]
    return list(map(ParameterSpec, names, dtypes, map(tuple, shapes)))


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
    step: int
    """Version that the trainer had reached when it published them; ahead of `version` by publish_delay."""
    staged: Staged
    probe: TokenSequences
    """Token ids of the sequences that an engine is to score with these weights."""
    evaluate: bool
    """Whether an evaluation is made with them."""
    made_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""


class Transport:
    """The calls of a transport. This one brings weights nowhere; each other one overrides what it does in another way.

    `announce`, `can_read`, `acquire` and `release` are called under the lock of the controller. So is `reserve`, except
    by `stage`, which makes sure of its buffer once more.
    """

    keeps_announced = True
    """Whether the announced weights stay until newer ones are announced, for a worker that starts meanwhile."""

    def __init__(self, specs: Sequence[ParameterSpec] = ()):
        self.specs = specs
        self.readers: collections.Counter[int] = collections.Counter()
        self.announced = -1

    def init_info(self, worker: int = 0) -> dict:
        """Return what a worker's engine needs when it starts, or has been started again."""
        return {}

    def reserve(self) -> bool:
        """Return whether `stage` may be called now."""
        return True

    def stage(self, version: int, parameters: Weights) -> Staged:
        """Copy weights into a buffer that nobody reads."""
        collections.deque(parameters, maxlen=0)  # gathering them is collective
        return Staged(version, [])

    def announce(self, staged: Staged) -> None:
        """Keep these weights for any worker that has yet to read them, starts or falls behind."""
        self.announced = staged.buffer

    def can_read(self, staged: Staged) -> bool:
        """Return whether a worker may begin to read what was announced: not while newer weights are written over it."""
        return staged.buffer == self.announced

    def acquire(self, staged: Staged) -> None:
        """Note that a worker is about to read."""
        self.readers[staged.buffer] += 1

    def release(self, staged: Staged) -> None:
        """Note that a worker has read, or has died."""
        self.readers[staged.buffer] -= 1

    def send(self, worker: int, staged: Staged) -> None:
        """Send staged weights to a worker that waits for them; nothing where it reads by itself."""

    def drop(self, worker: int) -> None:
        """Give up whatever joins this process to a worker that has died."""

    def check(self) -> None:
        """Raise RuntimeError for a transfer that failed, TimeoutError for one that takes too long."""

    def close(self) -> None:
        """Give up all connections."""
