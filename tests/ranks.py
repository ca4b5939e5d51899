"""Ranks of a test: processes of their own, which begin at once as all that takes long is imported before they fork."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "transformers.models.qwen3.modeling_qwen3",
]
"""Imported by the server that ranks are forked from, one for each worker of pytest; nothing that a fork would break."""


def forkserver() -> ForkServerContext:
    """How to start processes that have torch and transformers at once, which a new interpreter has after 5 s."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    return multiprocessing.get_context("forkserver")


class ForkedProcess(ForkServerContext.Process):
    """A process of the fork server that answers what subprocess.Popen does."""

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode


def torchrun_variables(nodes: list[int]) -> list[dict[str, str]]:
    """What torchrun tells each rank, by the node that it is to be on; the ranks meet at a free port of this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": str(len(nodes)), "LOCAL_WORLD_SIZE": str(nodes.count(0))}
    places = [
        {"RANK": str(rank), "GROUP_RANK": str(node), "LOCAL_RANK": str(nodes[:rank].count(node))}
        for rank, node in enumerate(nodes)
    ]
    return [shared | sizes | place for place in places]


def run_ranks(body: Callable, num_ranks: int, *args, limit_s: float = 120) -> list[int]:
    """Run `body(rank, *args)` in processes of their own and give their exit codes; an end by a signal is no error.

    A process that runs longer than `limit_s` is killed.
    """
    deadline = time.monotonic() + limit_s
    forkserver()
    context = mp.start_processes(
        body, args=args, nprocs=num_ranks, join=False, start_method="forkserver"
    )
    for process, error_file in zip(context.processes, context.error_files, strict=True):
        process.join(max(0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        if os.path.exists(error_file):
            print(pickle.loads(Path(error_file).read_bytes()))  # shown by pytest if the test fails
    return [process.exitcode for process in context.processes]


def run_group(body: Callable, num_ranks: int, *args) -> list[Any]:
    """Run `body(rank, *args)` in the processes of a gloo group, with a thread each. Return what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_join_group, num_ranks, num_ranks, folder, body, args) == [0] * num_ranks
        paths = [os.path.join(folder, f"rank_{rank}.pt") for rank in range(num_ranks)]
        return [torch.load(path, weights_only=False) for path in paths]


def _join_group(rank: int, num_ranks: int, folder: str, body: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    result = body(rank, *args)
    torch.save(result, os.path.join(folder, f"rank_{rank}.pt"))
    dist.destroy_process_group()
