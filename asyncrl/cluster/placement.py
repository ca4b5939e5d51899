"""Which process gets which device on this node. Pure but for `available_cores`; prints nothing, starts nothing.

no GPU        trainer ranks and rollout workers share the CPU cores; transport `shm`
one GPU       the rollout worker shares it with the trainer rank; transport `ipc`
several GPUs  one per trainer rank, the rest to rollout workers, `rollout_tp` each; transport `nccl`

`--weight-sync` overrides the transport; `shm` goes everywhere. With `--num-rollout-workers 0` all that samples are
machines that join, which `pull` the weights. One of these has no trainer rank: all its GPUs are its workers', and
weights reach them by `shm`, as they come to its host memory.
"""

import os
from dataclasses import dataclass, replace
from typing import Literal

from asyncrl.config import Config

SHARE_BESIDE_TRAINER, SHARE_ALONE = 0.45, 0.9
"""Share of a GPU's memory for an engine beside a trainer rank, and for one that has the GPU for itself."""
CORES_PER_GPU_WORKER = 2
"""Cores that a rollout worker on GPUs keeps busy: its own process, and its engine's."""


@dataclass(frozen=True)
class WorkerPlacement:
    """Where one rollout worker runs."""

    worker: int
    gpu: int | None
    """Index into this node's visible GPUs, of the first one; None on the CPU."""
    shared_with_rank: int | None
    """Local trainer rank on the same GPU, if any."""
    cpu_threads: int
    """Compute threads of the engine on the CPU."""
    gpu_memory_utilization: float
    """Share of the GPU's memory for the engine; 0 on the CPU."""
    num_gpus: int = 1
    """GPUs of its engine, one after the other."""
    cores: tuple[int, ...] = ()
    """CPU cores that nobody else of the run uses once its engine is up; none if it shares all."""
    kv_cache_bytes: int | None = None
    """Bytes of each of them for keys and values; None: all that vLLM finds free within the engine's share."""


@dataclass(frozen=True)
class WorkerSpec:
    """All a worker process needs to start; it pickles."""

    config: Config
    placement: WorkerPlacement
    model_path: str
    transport: str
    log_path: str
    sockets_path: str | None = None
    """Folder for vLLM's sockets and all else that is temporary, removed with the run; vLLM's own choice if None."""


@dataclass(frozen=True)
class Placement:
    """The devices of one node."""

    trainer_gpus: tuple[int | None, ...]
    """GPU of each local trainer rank; None on the CPU."""
    trainer_threads: int
    """Compute threads of each trainer rank."""
    workers: tuple[WorkerPlacement, ...]
    transport: Literal["shm", "ipc", "nccl", "pull"]

    def table(self) -> str:
        """The placement as text, a line per process."""
        nobody = "no rollout worker here: machines that join sample"
        lines = [f"placement ({f'weights by {self.transport}' if self.workers else nobody}):"]
        for rank, gpu in enumerate(self.trainer_gpus):
            lines.append(f"  trainer rank {rank}     {_device(gpu, self.trainer_threads)}")
        for w in self.workers:
            shared = f", shared with trainer rank {w.shared_with_rank}" if w.shared_with_rank is not None else ""
            memory = f", {w.gpu_memory_utilization:.1%} of its memory" if w.gpu_memory_utilization else ""
            device = _device(w.gpu, w.cpu_threads, w.num_gpus) + ", on cores of its own" * bool(w.cores)
            lines.append(f"  rollout worker {w.worker}   {device}{shared}{memory}")
        return "\n".join(lines)


def _device(gpu: int | None, threads: int, num_gpus: int = 1) -> str:
    if gpu is None:
        return f"cpu, {threads} thread{'s' * (threads > 1)}"
    return f"gpu {gpu}" if num_gpus == 1 else f"gpus {gpu} to {gpu + num_gpus - 1}"


def place(config: Config, num_gpus: int, num_cores: int, num_trainer_ranks: int, has_nccl: bool = True) -> Placement:
    """Give every process of a node its device, and weights their way.

    Args: the GPUs and CPU cores that this node may use, the trainer ranks that torchrun started on it (0 on a machine
    that joined a run), and whether torch has NCCL. Raises ValueError, with the arithmetic, for what does not fit.
    """
    if config.num_rollout_workers == 0:
        return _place_trainer(num_gpus, num_cores, num_trainer_ranks)
    placement = _place_processes(config, num_gpus, num_cores, num_trainer_ranks)
    transport = _choose_transport(config.weight_sync, placement, has_nccl)
    if config.colocate == "sleep" and all(worker.shared_with_rank is None for worker in placement.workers):
        raise ValueError(
            "--colocate sleep is for one GPU that trainer and engine share, and none is; use --colocate share"
        )
    return replace(placement, transport=transport)


def _choose_transport(wanted: str, placement: Placement, has_nccl: bool) -> str:
    """`wanted`, or the fastest that goes where it is `auto`. Raises ValueError for one that cannot go."""
    if not placement.trainer_gpus or placement.trainer_gpus[0] is None:
        possible, why = ["shm"], "without a GPU weights go through host memory"
    elif placement.transport == "ipc":
        possible, why = ["ipc", "shm"], "trainer and worker share one GPU, which NCCL refuses"
    elif has_nccl:
        possible, why = ["nccl", "shm"], "trainer and workers have separate GPUs, between which there is no CUDA IPC"
    else:
        possible, why = ["shm"], "this torch has no NCCL"
    if wanted not in (*possible, "auto"):
        raise ValueError(f"--weight-sync {wanted} cannot work here: {why}; use {' or '.join(possible)}, or auto")
    return possible[0] if wanted == "auto" else wanted


def _place_processes(config: Config, num_gpus: int, num_cores: int, num_trainer_ranks: int) -> Placement:
    if num_gpus == 0:
        return _place_on_cpu(config, num_cores, num_trainer_ranks)
    if config.dtype == "float32":
        raise ValueError(f"--dtype float32 is for the CPU, and {num_gpus} GPUs are visible; use auto or bfloat16")
    _check_ranks(num_gpus, num_trainer_ranks)
    free = list(range(num_trainer_ranks, num_gpus))
    if not free:
        return _place_on_shared_gpus(config, num_trainer_ranks, num_cores)
    tp, fitting = config.rollout_tp, len(free) // config.rollout_tp
    num_workers = max(1, fitting) if config.num_rollout_workers is None else config.num_rollout_workers
    if num_workers > fitting and not num_trainer_ranks:
        raise ValueError(
            f"--rollout-tp {tp} needs {tp} GPUs, {num_gpus} are visible; use --rollout-tp {num_gpus} or less here"
        )
    if num_workers > fitting:
        wanted = f"{num_workers} rollout workers" + (f" × {tp} GPUs" if tp > 1 else "")
        raise ValueError(
            f"{num_trainer_ranks} trainer ranks + {wanted} = {num_trainer_ranks + num_workers * tp} GPUs, {num_gpus} "
            f"are visible; lower --num-rollout-workers to {fitting} or --nproc-per-node" + " or --rollout-tp" * (tp > 1)
        )
    share = config.gpu_memory_utilization or SHARE_ALONE
    workers = tuple(WorkerPlacement(i, free[i * tp], None, 1, share, tp) for i in range(num_workers))
    threads = _threads(num_cores - CORES_PER_GPU_WORKER * num_workers, num_trainer_ranks)
    return Placement(tuple(range(num_trainer_ranks)), threads, workers, "nccl")


def _place_trainer(num_gpus: int, num_cores: int, num_trainer_ranks: int) -> Placement:
    """Of a node without rollout workers."""
    if num_gpus:
        _check_ranks(num_gpus, num_trainer_ranks)
    gpus = tuple(range(num_trainer_ranks)) if num_gpus else (None,) * num_trainer_ranks
    return Placement(gpus, _threads(num_cores, num_trainer_ranks), (), "pull")


def _check_ranks(num_gpus: int, num_trainer_ranks: int) -> None:
    if num_trainer_ranks > num_gpus:
        raise ValueError(
            f"{num_trainer_ranks} trainer ranks on {num_gpus} visible GPUs: each rank needs its own; "
            f"use --nproc-per-node {num_gpus} or fewer"
        )


def _place_on_cpu(config: Config, num_cores: int, num_trainer_ranks: int) -> Placement:
    if config.rollout_tp > 1:
        raise ValueError(f"--rollout-tp {config.rollout_tp} splits an engine over GPUs, and none is visible; use 1")
    num_workers = config.num_rollout_workers or 1
    if num_workers > num_cores:
        raise ValueError(
            f"--num-rollout-workers {num_workers} on {num_cores} CPU cores: {num_workers} / {num_cores} = "
            f"{num_workers / num_cores:.2f} engines per core, and the trainer; use {num_cores} or fewer"
        )
    threads = _threads(num_cores, num_trainer_ranks + num_workers)
    workers = tuple(WorkerPlacement(worker, None, None, threads, 0.0) for worker in range(num_workers))
    return Placement((None,) * num_trainer_ranks, threads, workers, "shm")


def _place_on_shared_gpus(config: Config, num_gpus: int, num_cores: int) -> Placement:
    """No GPU is free of a trainer rank: the one worker shares a GPU with the one rank."""
    num_workers = config.num_rollout_workers or 1
    if num_gpus > 1:
        raise ValueError(
            f"{num_gpus} trainer ranks on {num_gpus} visible GPUs leave none for rollout workers: "
            f"use --nproc-per-node {num_gpus - 1} or fewer"
        )
    if config.rollout_tp > 1:
        raise ValueError(
            f"1 trainer rank + 1 rollout worker × {config.rollout_tp} GPUs = {1 + config.rollout_tp} GPUs, 1 is "
            "visible; use --rollout-tp 1"
        )
    if num_workers > 1:
        raise ValueError(
            f"1 trainer rank + {num_workers} rollout workers = {1 + num_workers} processes on 1 visible GPU: "
            "a GPU is shared by one of each at most; use --num-rollout-workers 1"
        )
    worker = WorkerPlacement(0, 0, 0, 1, config.gpu_memory_utilization or SHARE_BESIDE_TRAINER)
    # Where the optimizer is offloaded, AdamW runs on these threads.
    return Placement((0,), _threads(num_cores - CORES_PER_GPU_WORKER, 1), (worker,), "ipc")


def _threads(num_cores: int, num_processes: int) -> int:
    return max(1, num_cores // max(1, num_processes))


def available_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))
