"""Weights that a distant host pulls: versioned snapshots, whole, or as what has changed since one that it has.

This is the trainer's end; puller.py is the host's, delta.py says what passes between them. Host memory here is at
most that of num_kept + MAX_READ + 2 payloads (one is announced, one is being made), and of the deltas between them.
The trainer waits for the copy of its weights alone: a thread computes the digest, and then hosts are told of a version.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from asyncrl.weights.shm import lock_pages, parameter_views, payload_bytes
from asyncrl.weights.transport import ParameterSpec, Staged, Transport, copy_parameters, layout
from extras.swarm.delta import Snapshot, digest_of, encode_delta
from extras.swarm.snapshots import SnapshotWriter

PIECE_BYTES = 4 << 20
"""Most bytes of weights in one message."""
KEPT = 3
"""Snapshots that stay to be the base of a delta, the newest included, where hosts fetch each version."""
MAX_READ = 3
"""Older snapshots that stay while hosts read them, the oldest first; who reads another begins anew."""


class PullTransport(Transport):
    """The trainer's end: keeps the newest snapshots, and makes of them what a host asks for."""

    def __init__(
        self, specs: list[ParameterSpec], writer: SnapshotWriter | None = None, num_kept: int = KEPT
    ):
        """`writer` puts all versions on a file system, too; `num_kept` stay here to be the base of a delta."""
        super().__init__(specs)
        self.num_bytes, self.writer = payload_bytes(specs), writer
        self.num_kept = num_kept
        self.on_kept: Callable[[], None] = lambda: None
        """Called by a thread when hosts can be told of another version."""
        self._kept: dict[int, Snapshot] = {}
        self._lock = threading.Lock()  # a thread keeps snapshots while the swarm reads
        self._free: list[torch.Tensor] = []  # payloads that nobody refers to any more
        self._thread = ThreadPoolExecutor(1)
        self._keeping = Future()
        self._keeping.set_result(None)

    def init_info(self, worker: int = 0) -> dict:
        """How parameters lie in a snapshot."""
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

        Waits until the one before is kept, so that no more of them are made at a time, and raises what that did.
        """
        self._keeping.result()
        payload = self._take_payload()
        views = parameter_views(torch.from_numpy(payload), self.specs)
        for named, view in zip(parameters, views, strict=True):
            copy_parameters([named], [view])
            yield named
        self._keeping = self._thread.submit(self._keep, version, payload)

    def _take_payload(self) -> np.ndarray:
        """Take memory for a snapshot, which is used again as soon as nobody refers to the array."""
        memory = self._free.pop() if self._free else self._new_payload()
        payload = memory.numpy()
        weakref.finalize(payload, self._free.append, memory)
        return payload

    def _new_payload(self) -> torch.Tensor:
        # what lies between parameters is in the digest
        memory = torch.zeros(self.num_bytes, dtype=torch.uint8)
        if torch.cuda.is_initialized():
            lock_pages(memory)
        return memory

    def _keep(self, version: int, payload: np.ndarray) -> None:
        """Name a snapshot by its digest, and keep it; old ones that nobody reads go."""
        snapshot = Snapshot(version, digest_of(payload), payload)
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
            version for version in sorted(self._kept)[: -self.num_kept] if version != self.announced
        ]
        read = [version for version in old if self.readers[version]][:MAX_READ]
        for version in set(old) - set(read):
            del self._kept[version]

    def is_kept(self, version: int) -> bool:
        """Return whether hosts can be told of a version."""
        return version in self._kept

    def staged(self, version: int) -> Staged:
        """A snapshot that is there, as it is announced."""
        info = {
            "version": version,
            "digest": self._kept[version].digest,
            "num_bytes": self.num_bytes,
        }
        if self.writer is not None and not self.writer.is_failing:
            info["snapshots"] = self.writer.url
        return Staged(version, [info])

    def open(self, version: int, base: int | None) -> tuple[bool, np.ndarray | bytes]:
        """What brings a host that has `base`, or None, to `version`, and whether it is a delta: if that is smaller.

        It may take seconds of a core, and is called by one thread beside the trainer's: many hosts ask for the same.
        What it returns stays readable when the snapshot goes.
        Raises ValueError if there is no such snapshot any more: a newer one has been announced since.
        """
        with self._lock:
            new, old = self._kept.get(version), self._kept.get(base)
        if new is None:
            raise ValueError(f"no snapshot of version {version} is left")
        if old is None or base == version:
            return False, new.payload
        way = base, old.digest
        if way not in new.deltas:
            new.deltas[way] = encode_delta(base, old.payload, new.payload)
        delta = new.deltas[way]
        return (False, new.payload) if delta is None else (True, delta)

    def check(self) -> None:
        """Raise what went wrong with the last snapshot after it was copied."""
        if self._keeping.done():
            self._keeping.result()

    def close(self) -> None:
        """Give the snapshots up."""
        self._thread.shutdown()
        with self._lock:
            self._kept.clear()
        if self.writer is not None:
            self.writer.close()
