"""How many bytes tensors hold at once, of real or fake ones: what a GPU's allocator would be asked for."""

import weakref

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations make inside of the block, each until nothing holds it any more."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._sizes = WeakIdKeyDictionary()

    def __enter__(self):
        plain = self._plain_resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # as FSDP frees what it has gathered, which is no operation
            plain(storage, size)
            self._add(storage)

        torch.UntypedStorage.resize_ = resize_
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self._plain_resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # what it is made of comes by itself
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            self._sizes[storage] = [0]
            weakref.finalize(storage, self._forget, self._sizes[storage])
        size = self._sizes[storage]
        self.now += storage.nbytes() - size[0]
        size[0] = storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _forget(self, size: list[int]) -> None:
        self.now -= size[0]
