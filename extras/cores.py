"""A CPU core of its own for an engine: whoever waits for samples waits for the engine, so nothing may take its turn."""

import itertools
import os
import socket
from contextlib import ExitStack
from dataclasses import replace

from asyncrl.cluster.placement import Placement
from asyncrl.cluster.processes import run_on

CLAIM = "\0engine-cores"
"""Name of a socket, no file, that the run has whose engine has cores of its own; two engines might get the same."""


def claim_cores(placement: Placement, on_end: ExitStack) -> Placement:
    """The placement, its engine with cores that are kept for it until `on_end`.

    It is left as it is on GPUs, with several ranks or engines, where cores do not suffice, and where another run has
    made its claim: then all processes share all cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if placement.trainer_gpus != (None,) or len(placement.workers) != 1:
        return placement
    (worker,) = placement.workers
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
    """Keep this process off the cores of engines, until `on_end`. To be called once they are up: starting takes all."""
    allowed, own = (
        os.sched_getaffinity(0),
        set(itertools.chain(*(worker.cores for worker in placement.workers))),
    )
    if own:
        run_on(os.getpid(), allowed - own)
        on_end.callback(run_on, os.getpid(), allowed)
