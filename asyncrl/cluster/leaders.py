"""How leaders of nodes talk to each other: over gloo, apart from the trainer's process group."""

import datetime
import pickle
import queue
import threading
from typing import Any

import torch
import torch.distributed as dist


class Leaders:
    """One leader's connections to those of other nodes.

    Whatever waits can be interrupted by a signal. Raises RuntimeError if another leader is gone, or after the timeout.
    """

    def __init__(self, store: dist.Store, node: int, num_nodes: int, timeout: datetime.timedelta):
        """Connect; collective over leaders."""
        self.num_nodes, self.timeout_s = num_nodes, timeout.total_seconds()
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore("leaders", store), node, num_nodes, timeout
        )

    def gather(self, value: Any) -> list:
        """The values of all, in the order of nodes; collective. For small things only."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self._gather_tensors(torch.tensor([len(mine)]))
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everyone = self._gather_tensors(padded)
        packed = zip(everyone, sizes, strict=True)
        return [pickle.loads(of_node[: int(size)].numpy().tobytes()) for of_node, size in packed]

    def _gather_tensors(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in range(self.num_nodes)]
        self._wait(self._group.allgather([gathered], [mine]))
        return gathered

    def _wait(self, work: dist.Work) -> None:
        """Wait in a thread of its own, as gloo's waits let no signal through."""
        ended: queue.SimpleQueue = queue.SimpleQueue()

        def wait() -> None:
            try:
                work.wait()
                ended.put(None)
            except RuntimeError as error:
                ended.put(error)

        threading.Thread(target=wait, name="wait-for-node", daemon=True).start()
        error = ended.get()
        if error is None:
            return
        if "timed out" not in str(error).lower():
            raise error
        raise RuntimeError(
            f"timed out: waited {self.timeout_s:g} s for all other nodes; if a step or a checkpoint only takes that "
            "long, raise --timeout-s, of which this is twice"
        ) from error
