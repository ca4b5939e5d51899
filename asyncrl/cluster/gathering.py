"""An exchange of small values between ranks, through the store of the process groups."""

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
        """`store` has no other keys. Each member counts the rounds, and polls every `poll_s` seconds."""
        self.timeout_s = timeout_s
        self._poll_s = poll_s
        self._store = store
        self._member, self._num_members = member, num_members
        self._round = 0
        self._own_keys: list[str] = []
        """Keys that this member wrote in the last round."""

    def gather(self, value: bytes) -> list[bytes]:
        """Return the values of all members, in their order; collective. For values up to some MB.

        A signal interrupts the wait. Raises TimeoutError with the missing members, RuntimeError if the store is gone.
        """
        self._round += 1
        keys = [f"{self._round}/{member}" for member in range(self._num_members)]
        read_keys, self._own_keys = self._own_keys, self._write(keys[self._member], value)
        deadline = time.monotonic() + self.timeout_s
        while not self._store.check(keys):  # no signal interrupts the store's own wait
            if time.monotonic() > deadline:
                missing = [i for i, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(", ".join(map(str, missing)))
            time.sleep(self._poll_s)
        values = [self._read(key) for key in keys]
        # all members have begun this round, so all have read the last one
        for key in read_keys:
            self._store.delete_key(key)
        return values

    def _write(self, key: str, value: bytes) -> list[str]:
        """Write a value in pieces, and then their number. Return all written keys."""
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
