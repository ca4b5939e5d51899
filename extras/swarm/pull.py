"""Weights that a distant host pulls: versioned snapshots, whole, or as what has changed since one that it has.

This is the trainer's end; puller.py is the host's, delta.py says what passes between them. Host memory here is at
most that of num_kept + MAX_READ + 2 payloads (one is announced, one is being made), and of the deltas between them.
"""

import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from asyncrl.weights.buffers import copy_parameters
from asyncrl.weights.shm import parameter_views, payload_bytes
from asyncrl.weights.transport import ParameterSpec, Staged, Transport, layout
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
        self._kept: dict[int, Snapshot] = {}
        # (base, version): what open says
        self._ways: dict[tuple[int, int], tuple[bool, np.ndarray | bytes]] = {}
        self._lock = threading.Lock()  # the trainer stages while the swarm reads

    def init_info(self, worker: int = 0) -> dict:
        """How parameters lie in a snapshot."""
        return layout(self.specs)

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `parameters`, in the order of the specs, into a snapshot; old ones that nobody reads go."""
        super().stage(version, self.copy(version, parameters))
        return self.staged(version)

    def copy(
        self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `parameters` on, each after it was copied; with the last one the snapshot is there."""
        # what lies between parameters is in the digest
        payload = torch.zeros(self.num_bytes, dtype=torch.uint8)
        for named, view in zip(parameters, parameter_views(payload, self.specs), strict=True):
            copy_parameters([named], [view])
            yield named
        self._keep(Snapshot(version, digest_of(payload.numpy()), payload.numpy()))

    def _keep(self, snapshot: Snapshot) -> None:
        with self._lock:
            known = self._kept.get(snapshot.version)
            if known is not None and known.digest == snapshot.digest:
                return  # a late version may come twice
            self._kept[snapshot.version] = snapshot
            self._forget()
        if self.writer is not None:
            self.writer.write(snapshot)

    def _forget(self) -> None:
        old = [
            version
            for version in sorted(self._kept)[: -self.num_kept]
            if version != self._announced
        ]
        read = [version for version in old if self._readers[version]][:MAX_READ]
        for version in set(old) - set(read):
            del self._kept[version]
        self._ways = {of: way for of, way in self._ways.items() if of[1] in self._kept}

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
            new, old, way = (
                self._kept.get(version),
                self._kept.get(base),
                self._ways.get((base, version)),
            )
        if new is None:
            raise ValueError(f"no snapshot of version {version} is left")
        if way is not None:
            return way
        if old is None or base == version:
            return False, new.payload
        delta = encode_delta(base, old.payload, new.payload)
        way = (False, new.payload) if delta is None else (True, delta)
        with self._lock:
            if version in self._kept:  # it may have gone meanwhile
                self._ways[base, version] = way
        return way

    def close(self) -> None:
        """Give the snapshots up."""
        with self._lock:
            self._kept.clear()
        if self.writer is not None:
            self.writer.close()
