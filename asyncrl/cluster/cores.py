"""CPU cores that only the engine of a run uses. The trainer waits for the engine, so the engine must not wait."""

import os
import socket
from contextlib import ExitStack
from dataclasses import replace

import torch

from asyncrl.cluster.placement import Placement
from asyncrl.cluster.processes import run_on

CLAIM = "\0engine-cores"
"""Name of an abstract socket. The run that holds it reserves cores for its engine. Other runs use all cores."""


def claim_cores(placement: Placement, on_end: ExitStack) -> Placement:
    """Reserve cores for the engine until `on_end`. Return the placement with them.

    It is unchanged on GPUs, and with several ranks or engines. It is unchanged, too, if there are too few cores or if
    another run holds the claim.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if placement.trainer_gpus != (None,) or len(placement.workers) != 1:
        return placement
    worker = placement.workers[0]
    if worker.cpu_threads >= len(allowed):
        return placement
    claim = on_end.enter_context(socket.socket(socket.AF_UNIX))
    try:
        claim.bind(CLAIM)
    except OSError:
        return placement
    return replace(
        placement, workers=(replace(worker, cores=tuple(allowed[: worker.cpu_threads])),)
    )


def leave_cores(placement: Placement, on_end: ExitStack) -> None:
    """Move this process off the engine's cores until `on_end`. Call it when the engine is up: its start uses all."""
    allowed = os.sched_getaffinity(0)
    reserved = {core for worker in placement.workers for core in worker.cores}
    if reserved:
        run_on(os.getpid(), allowed - reserved)
        on_end.callback(run_on, os.getpid(), allowed)


def use_free_cores(placement: Placement, *, engine_is_idle: bool) -> None:
    """Compute on the engine's cores, too, while it is idle. Only the thread that trains can call it.

    At the bound on staleness the engine is idle until the trainer publishes. So the two rarely compete for a core.
    """
    reserved = {core for worker in placement.workers for core in worker.cores}
    num_threads = placement.trainer_threads + len(reserved) * engine_is_idle
    if num_threads == torch.get_num_threads() or not reserved:
        return
    torch.set_num_threads(num_threads)
    cores = os.sched_getaffinity(0) | reserved
    run_on(os.getpid(), cores if engine_is_idle else cores - reserved)
