"""How leaders of nodes talk to each other: through the store in which process groups are formed."""

import datetime
import pickle
import time
from typing import Any

import torch.distributed as dist

_POLL_S = 0.001


class Leaders:
    """One leader's way to those of other nodes."""

    def __init__(self, store: dist.Store, node: int, num_nodes: int, timeout: datetime.timedelta):
        self._store = dist.PrefixStore("leaders", store)
        self._node, self._num_nodes = node, num_nodes
        self._timeout_s = timeout.total_seconds()
        self._round = 0

    def gather(self, value: Any) -> list:
        """Return the values of all leaders, in the order of nodes; collective. For small things only.

        A signal interrupts the wait. Raises RuntimeError after the timeout, or if the store is gone.
        """
        self._round += 1
        keys = [f"{self._round}/{node}" for node in range(self._num_nodes)]
        self._store.set(keys[self._node], pickle.dumps(value))
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys):  # the store's own wait lets no signal through
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"timed out: waited {self._timeout_s:g} s for all other nodes; if a step or a checkpoint only "
                    "takes that long, raise --timeout-s, of which this is twice"
                )
            time.sleep(_POLL_S)
        values = [pickle.loads(self._store.get(key)) for key in keys]
        # All leaders have come to this round, so all have read the one before.
        self._store.delete_key(f"{self._round - 1}/{self._node}")
        return values
