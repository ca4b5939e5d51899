"""The trainer's end of weights that hosts pull: versioned snapshots, whole or as deltas (delta.py).

puller.py is the host's end. Memory holds at most num_kept + MAX_READ + 2 payloads, and the deltas between them. The two
are the announced payload and the one that is being made. The trainer waits only for the copy of its weights. A thread
computes the digest, and then hosts are told of the version.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from asyncrl.weights.shm import lock_pages
from asyncrl.weights.transport import (
    ParameterSpec,
    Staged,
    Transport,
    copy_parameters,
    layout,
    parameter_views,
    payload_bytes,
)
from extras.swarm.delta import Snapshot, compute_digest, encode_delta
from extras.swarm.snapshots import SnapshotWriter

PIECE_BYTES = 4 << 20
"""Most bytes of weights in one message."""
KEPT = 3
"""Newest snapshots that stay, to be bases of deltas, if hosts fetch each version."""
MAX_READ = 3
"""Older snapshots that stay while hosts read them, the oldest first. A host that reads another one begins anew."""


class PullTransport(Transport):
    """Keeps the newest snapshots, and makes the deltas that hosts ask for."""

    def __init__(
        self, specs: list[ParameterSpec], writer: SnapshotWriter | None = None, num_kept: int = KEPT
    ):
        """`writer` also puts all versions on a file system; `num_kept` snapshots stay here."""
        super().__init__(specs)
        self.num_bytes, self.writer = payload_bytes(specs), writer
        self.num_kept = num_kept
        self.on_kept: Callable[[], None] = lambda: None
        """Called by a thread when hosts can be told of another version."""
        self._kept: dict[int, Snapshot] = {}
        self._lock = threading.Lock()  # a thread keeps snapshots while the swarm reads
        self._free: list[torch.Tensor] = []  # payloads that are not used any more
        self._thread = ThreadPoolExecutor(1)
        self._keeping = Future()
        self._keeping.set_result(None)

    def init_info(self, worker: int = 0) -> dict:
        """Return the layout of parameters in a snapshot."""
        return layout(self.specs)

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `parameters`, in the order of the specs, into a snapshot, and wait until it is kept."""
        super().stage(version, self.copy(version, parameters))
        self._keeping.result()
        return self.staged(version)

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `parameters` on, each after it was copied; a thread then keeps the snapshot.

        Waits until the snapshot before is kept, and raises its error: at most one is being made.
        """
        self._keeping.result()
        payload = self._take_payload()
        views = parameter_views(torch.from_numpy(payload), self.specs)
        for named, view in zip(parameters, views, strict=True):
            copy_parameters([named], [view])
            yield named
        self._keeping = self._thread.submit(self._keep, version, payload)

    def _take_payload(self) -> np.ndarray:
        """Take memory for a snapshot. It is used again when the array is collected."""
        if self._free:
            memory = self._free.pop()
        else:
            # the digest covers the gaps between parameters
            memory = torch.zeros(self.num_bytes, dtype=torch.uint8)
            if torch.cuda.is_initialized():
                lock_pages(memory)
        payload = memory.numpy()
        weakref.finalize(payload, self._free.append, memory)
        return payload

    def _keep(self, version: int, payload: np.ndarray) -> None:
        """Name a snapshot by its digest, and keep it."""
        snapshot = Snapshot(version, compute_digest(payload), payload)
        with self._lock:
            known = self._kept.get(version)
            # a late version may come twice
            is_new = known is None or known.digest != snapshot.digest
            if is_new:
                self._kept[version] = snapshot
                self._forget_old()
        if is_new and self.writer is not None:
            self.writer.write(snapshot)
        self.on_kept()

    def _forget_old(self) -> None:
        """Forget old snapshots that no host reads."""
        old = [
            version
            for version in sorted(self._kept)[: -self.num_kept]
            if version != self.readable_buffer
        ]
        read = [version for version in old if self.readers[version]][:MAX_READ]
        for version in set(old) - set(read):
            del self._kept[version]

    def is_kept(self, version: int) -> bool:
        """Return whether hosts can be told of a version."""
        return version in self._kept

    def staged(self, version: int) -> Staged:
        """Return the announcement of a snapshot that is kept."""
        info = {
            "version": version,
            "digest": self._kept[version].digest,
            "num_bytes": self.num_bytes,
        }
        if self.writer is not None and not self.writer.is_failing:
            info["snapshots"] = self.writer.url
        return Staged(version, [info])

    def open(self, version: int, base: int | None) -> tuple[bool, np.ndarray | bytes]:
        """Return whether a delta brings a host from `base` to `version`, and the bytes of the delta or snapshot.

        `base` is None for a host without weights. A delta takes seconds of a core, so one thread beside the trainer's
        calls this. The bytes stay readable when the snapshot goes.
        Raises ValueError if the snapshot is gone: newer ones have been announced since.
        """
        with self._lock:
            new, old = self._kept.get(version), self._kept.get(base)
        if new is None:
            raise ValueError(f"no snapshot of version {version} is left")
        # a delta that a host has begun to read stays when its base goes
        if base not in new.deltas:
            if old is None or base == version:
                return False, new.payload
            new.deltas[base] = encode_delta(base, old.payload, new.payload)
        delta = new.deltas[base]
        return (False, new.payload) if delta is None else (True, delta)

    def check(self) -> None:
        """Raise the error of the last snapshot after it was copied."""
        if self._keeping.done():
            self._keeping.result()

    def close(self) -> None:
        """Give the snapshots up."""
        self._thread.shutdown()
        with self._lock:
            self._kept.clear()
        if self.writer is not None:
            self.writer.close()
