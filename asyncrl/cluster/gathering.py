"""How ranks exchange small values: through the store in which process groups are formed."""

import pickle
import time
from typing import Any

import torch.distributed as dist

_POLL_S = 0.002


class Gathering:
    """One of several members that exchange values."""

    def __init__(self, store: dist.Store, member: int, num_members: int, timeout_s: float):
        """`store` has nothing else in it; each member counts the rounds by itself."""
        self.timeout_s = timeout_s
        self._store = store
        self._member, self._num_members = member, num_members
        self._round = 0

    def gather(self, value: Any) -> list:
        """Return the values of all members, in their order; collective. For small things only.

        A signal interrupts the wait. Raises TimeoutError, with the members that are missing, or RuntimeError if the
        store is gone.
        """
        self._round += 1
        keys = [f"{self._round}/{member}" for member in range(self._num_members)]
        self._store.set(keys[self._member], pickle.dumps(value))
        deadline = time.monotonic() + self.timeout_s
        while not self._store.check(keys):  # the store's own wait lets no signal through
            if time.monotonic() > deadline:
                missing = [i for i, key in enumerate(keys) if not self._store.check([key])]
                raise TimeoutError(", ".join(map(str, missing)))
            time.sleep(_POLL_S)
        values = [pickle.loads(self._store.get(key)) for key in keys]
        # All members have come to this round, so all have read the one before.
        self._store.delete_key(f"{self._round - 1}/{self._member}")
        return values
