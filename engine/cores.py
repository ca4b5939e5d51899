"""A CPU core of its own for an engine: whoever waits for samples waits for the engine, so nothing may take its turn.

Imported by those who place processes; it starts none.
"""

import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from cluster.placement import Placement

CLAIM = Path(tempfile.gettempdir()) / f"engine-cores-{os.getuid()}.lock"
"""Held by the run of this user whose engine has cores of its own; two such engines might get the same ones."""


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
    claim = on_end.enter_context(CLAIM.open("a"))
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return placement
    return replace(placement, workers=(replace(worker, cores=tuple(allowed[: worker.cpu_threads])),))


def leave_cores(placement: Placement, on_end: ExitStack) -> None:
    """Keep this process off the cores of engines, until `on_end`. To be called once they are up: starting takes all."""
    allowed, own = os.sched_getaffinity(0), set(itertools.chain(*(worker.cores for worker in placement.workers)))
    if own:
        bind(os.getpid(), allowed - own)
        on_end.callback(bind, os.getpid(), allowed)


def bind(pid: int, cores: Iterable[int]) -> None:
    """Let all threads of a process run on these cores alone, and those that they start."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)
