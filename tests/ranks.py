"""Ranks of a test: processes of their own, which begin at once as all that takes long is imported before they fork."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

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


def run_ranks(body: Callable, num_ranks: int, *args) -> list[int]:
    """Run `body(rank, *args)` in processes of their own and give their exit codes; an end by a signal is no error."""
    forkserver()
    context = mp.start_processes(
        body, args=args, nprocs=num_ranks, join=False, start_method="forkserver"
    )
    for process, error_file in zip(context.processes, context.error_files, strict=True):
        process.join(120)
        if os.path.exists(error_file):
            print(pickle.loads(Path(error_file).read_bytes()))  # shown by pytest if the test fails
    return [process.exitcode for process in context.processes]
