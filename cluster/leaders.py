"""How leaders of nodes talk to each other: over gloo, apart from the trainer's process group, which not all are in."""

import datetime
import faulthandler
import functools
import pickle
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist


class Leaders:
    """One leader's connections to those of other nodes. What goes to one node arrives in the order it was sent.

    Whatever waits can be interrupted by a signal. Raises RuntimeError if another leader is gone, or after the timeout,
    with all stacks dumped.
    """

    def __init__(self, name: str, store: dist.Store, node: int, nodes: Iterable[int], timeout: datetime.timedelta):
        """Connect; collective over the leaders of `nodes`. `name` must be new to the store."""
        self.nodes, self.timeout_s = list(nodes), timeout.total_seconds()
        self.dump_stacks: Callable[[], None] = functools.partial(faulthandler.dump_traceback, all_threads=True)
        """Called when a wait takes too long."""
        store = dist.PrefixStore(name, store)
        self._group = dist.ProcessGroupGloo(store, self.nodes.index(node), len(self.nodes), timeout)

    def gather(self, value: Any) -> list:
        """The values of all, in the order of nodes; collective. For small things only."""
        mine = _packed(value)
        sizes = self._gather_tensors(torch.tensor([len(mine)]))
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everyone = self._gather_tensors(padded)
        return [_unpacked(packed[: int(size)]) for packed, size in zip(everyone, sizes, strict=True)]

    def _gather_tensors(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in self.nodes]
        self._wait(self._group.allgather([gathered], [mine]), "all other nodes")
        return gathered

    def send(self, value: Any, node: int) -> list["Sending"]:
        """Begin to send a value to a node, which must `receive` it."""
        packed = _packed(value)
        return [self.send_tensor(torch.tensor([len(packed)]), node), self.send_tensor(packed, node)]

    def send_tensor(self, tensor: torch.Tensor, node: int) -> "Sending":
        """Begin to send a contiguous CPU tensor, which must not change before its arrival."""
        work = self._group.send([tensor], self.nodes.index(node), 0)
        return Sending(tensor, lambda: self._wait(work, f"node {node} to receive"))

    def receive(self, node: int) -> Any:
        """Wait for the next value from a node."""
        size = self.receive_tensor(torch.zeros(1, dtype=torch.int64), node)
        return _unpacked(self.receive_tensor(torch.empty(int(size), dtype=torch.uint8), node))

    def receive_tensor(self, tensor: torch.Tensor, node: int) -> torch.Tensor:
        """Wait for the next tensor from a node, and fill `tensor`, of its shape and dtype, with it."""
        self._wait(self._group.recv([tensor], self.nodes.index(node), 0), f"node {node} to send")
        return tensor

    def _wait(self, work: dist.Work, what: str) -> None:
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
        self.dump_stacks()
        raise RuntimeError(
            f"waited {self.timeout_s:g} s for {what}; if a step or a checkpoint only takes that long, raise "
            "--timeout-s, of which this is twice"
        ) from error


class Sending:
    """A tensor on its way, kept alive until it has arrived."""

    def __init__(self, tensor: torch.Tensor, wait: Callable[[], None]):
        self._tensor = tensor
        self.wait = wait
        """Wait for its arrival."""


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
