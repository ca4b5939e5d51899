"""How leaders of nodes talk to each other: over gloo, apart from the trainer's process group, which not all are in."""

import datetime
import pickle
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


class Leaders:
    """One leader's connections to those of the other nodes; leaders are numbered as `members` lists their nodes.

    What goes to one node arrives in the order it was sent. Raises RuntimeError, everywhere, if another is gone or does
    not answer within the timeout.
    """

    def __init__(self, name: str, store: dist.Store, node: int, members: Iterable[int], timeout: datetime.timedelta):
        """Connect; collective over the leaders of `members`. `name` must be new to the store."""
        self.node, self.members = node, list(members)
        self._group = dist.ProcessGroupGloo(
            dist.PrefixStore(name, store), self.members.index(node), len(self.members), timeout
        )

    def gather(self, value: Any) -> list:
        """The values of all, in the order of nodes; collective. For small things only."""
        mine = _packed(value)
        sizes = self._gather_tensors(torch.tensor([len(mine)]))
        padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
        padded[: len(mine)] = mine
        everyone = self._gather_tensors(padded)
        return [_unpacked(packed[: int(size)]) for packed, size in zip(everyone, sizes, strict=True)]

    def _gather_tensors(self, mine: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(mine) for _ in self.members]
        self._group.allgather([gathered], [mine]).wait()
        return gathered

    def send(self, value: Any, node: int) -> list["Sending"]:
        """Begin to send a value to a node, which must `receive` it."""
        packed = _packed(value)
        return [self.send_tensor(torch.tensor([len(packed)]), node), self.send_tensor(packed, node)]

    def receive(self, node: int) -> Any:
        """Wait for the next value from a node."""
        size = self.receive_tensor(torch.zeros(1, dtype=torch.int64), node)
        return _unpacked(self.receive_tensor(torch.empty(int(size), dtype=torch.uint8), node))

    def send_tensor(self, tensor: torch.Tensor, node: int) -> "Sending":
        """Begin to send a contiguous CPU tensor, which must not change before its arrival."""
        return Sending(tensor, self._group.send([tensor], self.members.index(node), 0))

    def receive_tensor(self, tensor: torch.Tensor, node: int) -> torch.Tensor:
        """Wait for the next tensor from a node, and fill `tensor`, of its shape and dtype, with it."""
        self._group.recv([tensor], self.members.index(node), 0).wait()
        return tensor


class Sending:
    """A tensor on its way, kept alive until it has arrived."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work):
        self._tensor, self._work = tensor, work

    def wait(self) -> None:
        """Wait for its arrival."""
        self._work.wait()


def _packed(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpacked(packed: torch.Tensor) -> Any:
    return pickle.loads(packed.numpy().tobytes())
