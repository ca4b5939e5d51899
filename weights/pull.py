"""Weights that a distant machine pulls: versioned snapshots, whole, or as what has changed since one that it has.

A snapshot is the payload of transport.py: all parameters, one after the other, in the dtype that is sent. Its name is
its version and digest (blake3). A *delta* between two snapshots has the 16-bit words that differ: where they are,
as gaps, and their new values, each byte plane apart and compressed. It is exact: whoever applies it to the right base
has the very bytes of the new snapshot, and the digest says so. An update in bf16 changes one word in a hundred (1e-5)
or fewer, as most steps are smaller than half a unit of the last place.
"""

import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import zstandard
from blake3 import blake3

from weights.transport import ParameterSpec, Staged, copy_parameters, parameter_views, payload_offsets

BLOCK_WORDS = 1 << 24
"""Words whose changes are found, packed and applied at a time: 32 MiB."""
LEVEL = 1  # of zstd: planes of zeros and noise gain nothing from more
PIECE_BYTES = 4 << 20
"""Most bytes of weights in one message."""
KEPT = 3
"""Snapshots that stay to be the base of a delta, the newest included; more only while a machine reads them."""
_BLOCK = struct.Struct("<II")  # changed words, bytes that follow
_HEADER = struct.Struct("<qQ")  # version of the base, words of a snapshot


def digest_of(payload: np.ndarray) -> str:
    """The digest that names a snapshot's bytes."""
    return blake3(payload, max_threads=blake3.AUTO).hexdigest()


def encode_delta(base_version: int, base: np.ndarray, new: np.ndarray) -> bytes:
    """What turns `base` into `new`, both [bytes] uint8 of one even size."""
    old_words, new_words = base.view("<u2"), new.view("<u2")
    parts, pack = [_HEADER.pack(base_version, len(new_words))], zstandard.ZstdCompressor(level=LEVEL).compress
    for start in range(0, len(new_words), BLOCK_WORDS):
        words = new_words[start : start + BLOCK_WORDS]
        changed = np.flatnonzero(words != old_words[start : start + BLOCK_WORDS])
        gaps = np.diff(changed, prepend=0).astype("<u4")
        packed = pack(_planes(gaps) + _planes(words[changed]))
        parts += [_BLOCK.pack(len(changed), len(packed)), packed]
    return b"".join(parts)


def apply_delta(delta: bytes, base_version: int, payload: np.ndarray) -> None:
    """Turn the snapshot of `base_version` in `payload`, [bytes] uint8, into the next one, in place.

    Raises ValueError if the delta is for another base or size, or is broken; `payload` is of no use then.
    """
    words, unpack = payload.view("<u2"), zstandard.ZstdDecompressor().decompress
    try:
        found = _HEADER.unpack_from(delta)
        if found != (base_version, len(words)):
            raise ValueError(f"a delta for version {found[0]}, {found[1]} words; here is {base_version}, {len(words)}")
        position = _HEADER.size
        for start in range(0, len(words), BLOCK_WORDS):
            block = words[start : start + BLOCK_WORDS]
            num_changed, num_bytes = _BLOCK.unpack_from(delta, position)
            position += _BLOCK.size
            packed, position = delta[position : position + num_bytes], position + num_bytes
            planes = unpack(packed, max_output_size=6 * len(block))  # no more than a block can have
            if num_changed > len(block) or len(planes) != 6 * num_changed:
                raise ValueError(f"a block of {num_changed} changes has {len(planes)} bytes, not {6 * num_changed}")
            changed = np.cumsum(_from_planes(planes[: 4 * num_changed], "<u4"), dtype=np.int64)
            block[changed] = _from_planes(planes[4 * num_changed :], "<u2")
    except (struct.error, zstandard.ZstdError, IndexError) as error:
        raise ValueError(f"a broken delta: {error}") from None


def _planes(values: np.ndarray) -> bytes:
    """The bytes of all numbers, least significant first: planes of zeros compress to nothing."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _from_planes(planes: bytes, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(size, -1).T).view(dtype)[:, 0]


class PullTransport:
    """The trainer's end: keeps the newest snapshots, and makes of them what a machine asks for."""

    def __init__(self, specs: list[ParameterSpec]):
        self.specs, self.num_bytes = specs, payload_offsets(specs)[1]
        self._payloads: dict[int, np.ndarray] = {}
        self._digests: dict[int, str] = {}
        self._deltas: dict[tuple[int, int], bytes] = {}
        self._readers: dict[int, int] = {}
        self._lock = threading.Lock()  # the trainer stages while the swarm reads

    def init_info(self, worker: int = 0) -> dict:
        """How parameters lie in a snapshot."""
        return {
            "names": [spec.name for spec in self.specs],
            "dtype_names": [spec.dtype_name for spec in self.specs],
            "shapes": [list(spec.shape) for spec in self.specs],
        }

    def free_buffer(self) -> int | None:
        """Weights may be staged at any time: each version has memory of its own."""
        return 0

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `parameters`, in the order of the specs, into a snapshot; old ones that nobody reads go."""
        for _ in self.copy(version, parameters):
            pass
        return self.staged(version)

    def copy(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `parameters` on, each after it was copied; with the last one the snapshot is there."""
        payload = torch.zeros(self.num_bytes, dtype=torch.uint8)  # what lies between parameters is in the digest
        views = iter(parameter_views(payload, self.specs))
        for named, spec in zip(parameters, self.specs, strict=True):
            copy_parameters([named], [spec], [next(views)])
            yield named
        digest = digest_of(payload.numpy())
        with self._lock:
            self._payloads[version], self._digests[version] = payload.numpy(), digest
            self._forget()

    def staged(self, version: int) -> Staged:
        """A snapshot that is there, as it is announced."""
        return Staged(version, [{"version": version, "digest": self._digests[version], "num_bytes": self.num_bytes}])

    def _forget(self) -> None:
        for version in sorted(self._payloads)[:-KEPT]:
            if not self._readers.get(version):
                del self._payloads[version], self._digests[version]
        self._deltas = {of: delta for of, delta in self._deltas.items() if of[1] in self._payloads}

    def open(self, version: int, base: int | None) -> tuple[bool, np.ndarray | bytes]:
        """What brings a machine that has `base`, or None, to `version`, and whether it is a delta: if that is smaller.

        Raises ValueError if there is no such snapshot any more: a newer one has been announced since.
        """
        with self._lock:
            payload, old, delta = (
                self._payloads.get(version),
                self._payloads.get(base),
                self._deltas.get((base, version)),
            )
        if payload is None:
            raise ValueError(f"no snapshot of version {version} is left")
        if old is None or base == version:
            return False, payload
        if delta is None:
            delta = encode_delta(base, old, payload)
            with self._lock:
                self._deltas[base, version] = delta
        return (True, delta) if len(delta) < len(payload) else (False, payload)

    def announce(self, staged: Staged) -> None:
        """These are the weights for any machine that joins or falls behind: the newest always stay."""

    def messages(self, worker: int, staged: Staged) -> list[dict]:
        """What a worker's machine is to pull."""
        return staged.messages

    def acquire(self, worker: int, staged: Staged) -> None:
        """Keep a snapshot for one worker that is about to read it."""
        with self._lock:
            self._readers[staged.buffer] = self._readers.get(staged.buffer, 0) + 1

    def release(self, worker: int, staged: Staged) -> None:
        """Note that one worker has read a snapshot, or has gone."""
        with self._lock:
            self._readers[staged.buffer] -= 1

    def send(self, worker: int, staged: Staged) -> None:
        """Nothing: a machine reads by itself."""

    def drop(self, worker: int) -> None:
        """Nothing: its connection is the swarm's."""

    def check(self) -> None:
        """Nothing runs in the background."""

    def close(self) -> None:
        """Give the snapshots up."""
        self._payloads.clear()


@dataclass(frozen=True)
class StagedTwice(Staged):
    """Weights in a buffer of the local transport, and as the snapshot of their version."""

    version: int


class LocalAndPulled:
    """The transports of a node with workers of its own and of a swarm, as one: each worker reads by its own."""

    def __init__(self, local, pulled: PullTransport, num_own: int):
        """`local` brings weights to the first `num_own` workers, `pulled` to all others."""
        self.local, self.pulled, self.num_own = local, pulled, num_own

    def _is_own(self, worker: int) -> bool:
        return worker < self.num_own

    def _of(self, worker: int):
        return self.local if self._is_own(worker) else self.pulled

    def _part(self, worker: int, staged: StagedTwice) -> Staged:
        return staged if self._is_own(worker) else self.pulled.staged(staged.version)

    def init_info(self, worker: int) -> dict:
        """What a worker's engine, or machine, needs once."""
        return self._of(worker).init_info(worker)

    def free_buffer(self) -> int | None:
        """Whether there is room to stage."""
        return self.local.free_buffer()

    def stage(self, version: int, parameters: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy weights to where each of the two has them, in one pass."""
        local = self.local.stage(version, self.pulled.copy(version, parameters))
        return StagedTwice(local.buffer, local.messages, version)

    def messages(self, worker: int, staged: Staged) -> list[dict]:
        """Update infos for a worker."""
        return self._part(worker, staged).messages

    def announce(self, staged: Staged) -> None:
        """These are the weights for any worker that starts, joins or falls behind."""
        self.local.announce(staged)

    def acquire(self, worker: int, staged: Staged) -> None:
        """A worker is about to read."""
        self._of(worker).acquire(worker, self._part(worker, staged))

    def release(self, worker: int, staged: Staged) -> None:
        """A worker has read, or has died."""
        self._of(worker).release(worker, self._part(worker, staged))

    def send(self, worker: int, staged: Staged) -> None:
        """A worker waits to receive weights."""
        self._of(worker).send(worker, self._part(worker, staged))

    def drop(self, worker: int) -> None:
        """A worker has died."""
        self._of(worker).drop(worker)

    def check(self) -> None:
        """Raise what went wrong in the background."""
        self.local.check()

    def close(self) -> None:
        """The run ends."""
        self.local.close()
        self.pulled.close()
