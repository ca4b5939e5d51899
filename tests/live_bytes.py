"""How many bytes tensors hold at once, of real or fake ones: what a GPU's allocator would be asked for."""

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make inside of the block, each until nothing holds it any more."""

    def __init__(self, device: str | None = None):
        """`device`: only tensors of this type of device, as in `cuda`, are counted."""
        super().__init__()
        self.now = self.peak = 0
        self._device = device
        self._sizes: dict[int, tuple[weakref.ref, int]] = {}

    def add(self, tensors) -> None:
        """Count what was made before."""
        for tensor in tree_iter(tensors):
            self._add(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it is made of comes by itself
        result = function(*args, **(kwargs or {}))
        # A storage may also have been resized, as FSDP does with what it gathers.
        self.add((result, args, kwargs))
        return result

    def _add(self, tensor: object) -> None:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            return
        if self._device is not None and tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            self._set(key, known[0], size)
        else:
            self._set(key, weakref.ref(storage, lambda _: self._forget(key)), size)

    def _set(self, key: int, storage: weakref.ref, size: int) -> None:
        self.now += size - (self._sizes[key][1] if key in self._sizes else 0)
        self._sizes[key] = storage, size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, (None, 0))[1]
