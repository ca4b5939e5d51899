"""Ways for weights with both ends on the CPU: shared host memory has the part of CUDA IPC, gloo that of NCCL, and
threads that of CUDA's streams. All else is what runs on GPUs.

Patch first: the engine is forked, and has the shims too.
"""

import contextlib
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

import asyncrl.weights.packed
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.shm import ShmTransport

TIMEOUT_S = 30.0


def share(tensor):
    """In the place of reduce_tensor: what another process needs to map this memory."""
    file, size = tensor.untyped_storage()._share_fd_cpu_()
    place = (f"/proc/{os.getpid()}/fd/{file}", size, tensor.storage_offset(), len(tensor))
    return None, (*place, None, None, "the trainer's GPU", "never freed")


def map_shared(path, size, start, length, *rest):
    """In the place of rebuild_cuda_tensor."""
    assert rest == (None, None, None, "never freed"), "the device is the engine's own"
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)[start : start + length]


def patch_ipc(patch, chunk_bytes):
    """Have ipc go through shared host memory, in chunks of so many bytes."""
    patch.setattr(asyncrl.weights.packed, "CHUNK_BYTES", chunk_bytes)
    patch.setattr(reductions, "reduce_tensor", share)
    patch.setattr(reductions, "rebuild_cuda_tensor", map_shared)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))


class Stream:
    """Does what is put on it in order, beside all other streams."""

    def __init__(self, device=None):
        self._thread, self._last = ThreadPoolExecutor(1), None

    def put(self, work):
        self._last = self._thread.submit(work)

    def synchronize(self):
        if self._last is not None:
            self._last.result()


class Communicator:
    """In the place of vLLM's communicator; who receives does so at once, as if the stream were waited for."""

    disabled = False

    def __init__(self, group, device):
        self.rank = group.rank
        limit = timedelta(seconds=TIMEOUT_S)
        store = dist.PrefixStore("gloo", group.store)
        self._gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, limit)

    def broadcast(self, tensor, src, stream=None):
        if self.rank != src:
            self._broadcast(tensor, src)
            return
        stream.put(lambda: self._broadcast(tensor, src))

    def _broadcast(self, tensor, src):
        if self._gloo is None:
            raise RuntimeError("the group was given up")
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self):
        """Also what waits in it ends, here when the connection is closed."""
        self._gloo = None


def patch_nccl(patch, chunk_bytes):
    """Have nccl go through gloo, in chunks of so many bytes."""
    from vllm.distributed.device_communicators import pynccl

    patch.setattr(pynccl, "PyNcclCommunicator", Communicator)
    patch.setattr(asyncrl.weights.packed, "CHUNK_BYTES", chunk_bytes)
    patch.setattr("asyncrl.weights.nccl.CHUNK_BYTES", chunk_bytes)
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(torch.accelerator, "synchronize", lambda: None)


CHUNK_BYTES = 1 << 16
TRANSPORTS = {
    "shm": ("shm", ShmTransport, None),
    "ipc": ("ipc", functools.partial(IpcTransport, device="cpu"), patch_ipc),
    "nccl": (
        "nccl",
        lambda specs: NcclTransport(specs, torch.device("cpu"), 1, TIMEOUT_S),
        patch_nccl,
    ),
}
"""By name: what the engine reads by, the trainer's end, and what is to be patched before it is made."""
