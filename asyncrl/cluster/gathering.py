"""How ranks exchange small values: through the store in which process groups are formed."""

import time

import torch.distributed as dist

_PIECE_BYTES = 4 << 20
"""The store refuses a value of more than 8 MiB."""


class Gathering:
    """One of several members that exchange values."""

    def __init__(
        self,
        store: dist.Store,
        member: int,
        num_members: int,
        timeout_s: float,
        poll_s: float = 0.002,
    ):
        """`store` has nothing else in it; each member counts the rounds by itself, and looks every `poll_s` seconds."""
        self.timeout_s = timeout_s
        self._poll_s = poll_s
        self._store = store
        self._member, self._num_members = member, num_members
        self._round = 0
        self._own_keys: list[str] = []
        """Keys that this member wrote in the last round."""

    def gather(self, value: bytes) -> list[bytes]:
        """Return the values of all members, in their order; collective. For small things, of some MB at most.

        A signal interrupts the wait. Raises TimeoutError, with the members that are missing, or RuntimeError if the
        store is gone.
        """
        self._round += 1
        keys = [f"{self._round}/{member}" for member in range(self._num_members)]
        read_keys, self._own_keys = self._own_keys, self._write(keys[self._member], value)
        deadline = time.monotonic() + self.timeout_s
        while not self._store.check(keys):  # the store's own wait lets no signal through
            if time.monotonic() > deadline:
                missing = [i for i, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(", ".join(map(str, missing)))
            time.sleep(self._poll_s)
        values = [self._read(key) for key in keys]
        # All members have come to this round, so all have read the one before.
        for key in read_keys:
            self._store.delete_key(key)
        return values

    def _write(self, key: str, value: bytes) -> list[str]:
        """Write a value in pieces, and then their number. Returns all keys that were written."""
        starts = range(0, len(value), _PIECE_BYTES)
        piece_keys = [f"{key}/{index}" for index in range(len(starts))]
        for piece_key, start in zip(piece_keys, starts, strict=True):
            self._store.set(piece_key, value[start : start + _PIECE_BYTES])
        self._store.set(key, str(len(starts)))
        return [key, *piece_keys]

    def _read(self, key: str) -> bytes:
        """Return the value whose number of pieces is under a key."""
        num_pieces = int(self._store.get(key))
        return b"".join(self._store.get(f"{key}/{index}") for index in range(num_pieces))
