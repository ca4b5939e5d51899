"""What would have the host wait for a GPU, seen on the CPU."""

from contextlib import ContextDecorator

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_dim", "bincount")
"""Operations that read a number, or whose result has a size that depends on values."""


class HostWaits(TorchDispatchMode, ContextDecorator):
    """Lists the operations inside of the block, or of the decorated function, for which the host would wait.

    To index by a mask asks for its size, and a list of numbers is copied to the GPU.
    """

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        is_list = name.startswith("aten.lift_fresh.") and args[0].ndim > 0
        has_mask = name.startswith("aten.index.") and any(
            torch.is_tensor(index) and index.dtype == torch.bool for index in tree_leaves(args[1])
        )
        if is_list or has_mask or any(wait in name for wait in WAITS):
            self.names.append(name)
        return function(*args, **(kwargs or {}))
