"""CPU cores that only the engine of a run uses. The trainer waits for the engine, so the engine must not wait."""

import os
import socket
from contextlib import ExitStack
from dataclasses import replace

from asyncrl.cluster.placement import Placement
from asyncrl.cluster.processes import run_on

CLAIM = "\0engine-cores"
"""Name of an abstract socket. The run that holds it reserves cores for its engine. Other runs use all cores."""


def claim_cores(placement: Placement, on_end: ExitStack) -> Placement:
    """Reserve cores for the engine until `on_end`. Return the placement with them.

    It is unchanged on GPUs, with several ranks or engines, or too few cores, or if another run holds the claim.
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
