"""Weights that a distant machine pulls: versioned snapshots, whole, or as what has changed since one that it has.

A snapshot is the payload of transport.py: all parameters, one after the other, in the dtype that is sent. It is named by
its version and its digest (blake3). A *delta* between two snapshots has the 16-bit words that differ: where they are,
as gaps, and their new values, each byte plane apart and compressed. It is exact: whoever applies it to the right base
has the very bytes of the new snapshot, and the digest says so. An update in bf16 changes one word in a hundred (1e-5)
or fewer, as most steps are smaller than half a unit of the last place.
"""

import struct
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import zstandard
from blake3 import blake3

from weights.transport import ParameterSpec, Staged, copy_parameters, parameter_views, payload_offsets

BLOCK_WORDS = 1 << 24
"""Words whose changes are found, packed and applied at a time: 32 MiB."""
LEVEL = 1  # of zstd: planes of zeros and noise gain nothing from more
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
        payload = torch.zeros(self.num_bytes, dtype=torch.uint8)  # what lies between parameters is in the digest
        copy_parameters(parameters, self.specs, parameter_views(payload, self.specs))
        self._payloads[version] = payload.numpy()
        self._digests[version] = digest_of(payload.numpy())
        self._forget()
        return Staged(version, [{"version": version, "digest": self._digests[version], "num_bytes": self.num_bytes}])

    def _forget(self) -> None:
        for version in sorted(self._payloads)[:-KEPT]:
            if not self._readers.get(version):
                del self._payloads[version], self._digests[version]
        self._deltas = {of: delta for of, delta in self._deltas.items() if of[1] in self._payloads}

    def open(self, version: int, base: int | None) -> np.ndarray | bytes:
        """What brings a machine that has `base`, or None, to `version`: a delta if that is there and smaller.

        Raises ValueError if there is no such snapshot any more: a newer one has been announced since.
        """
        if version not in self._payloads:
            raise ValueError(f"no snapshot of version {version}; there are {sorted(self._payloads)}")
        payload = self._payloads[version]
        if base not in self._payloads or base == version:
            return payload
        if (base, version) not in self._deltas:
            self._deltas[base, version] = encode_delta(base, self._payloads[base], payload)
        delta = self._deltas[base, version]
        return delta if len(delta) < len(payload) else payload

    def announce(self, staged: Staged) -> None:
        """These are the weights for any machine that joins or falls behind: the newest always stay."""

    def acquire(self, staged: Staged) -> None:
        """Keep a snapshot for one worker that is about to read it."""
        self._readers[staged.buffer] = self._readers.get(staged.buffer, 0) + 1

    def release(self, staged: Staged) -> None:
        """Note that one worker has read a snapshot, or has gone."""
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


def chunks(stream: np.ndarray | bytes, offset: int, size: int) -> Iterator[bytes]:
    """The rest of a stream from `offset` on, in pieces of at most `size` bytes."""
    view = memoryview(stream)
    yield from (bytes(view[start : start + size]) for start in range(offset, len(view), size))
