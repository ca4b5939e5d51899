"""Which process gets which device on this node. Pure but for `available_cores`; prints nothing, starts nothing.

no GPU        trainer ranks and rollout workers share the CPU cores; transport `shm`
one GPU       the rollout worker shares it with the trainer rank; transport `ipc`
several GPUs  one per trainer rank, the rest to rollout workers, `rollout_tp` each; transport `nccl`

`--weight-sync` overrides the transport; `shm` goes everywhere. With `--num-rollout-workers 0` all that samples are
machines that join, which `pull` the weights. One of these has no trainer rank: all its GPUs are its workers', and
weights reach them by `shm`, as they come to its host memory.
"""

import os
from dataclasses import dataclass
from typing import Literal

from asyncrl.config import Config

SHARE_BESIDE_TRAINER, SHARE_ALONE = 0.45, 0.9
"""Share of a GPU's memory for an engine beside a trainer rank, and for one that has the GPU for itself."""
CORES_PER_GPU_WORKER = 2
"""Cores that a rollout worker on GPUs keeps busy: its own process, and its engine's."""


@dataclass(frozen=True)
class WorkerPlacement:
    """The place of one rollout worker."""

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
            shared = (
                f", shared with trainer rank {w.shared_with_rank}"
                if w.shared_with_rank is not None
                else ""
            )
            memory = (
                f", {w.gpu_memory_utilization:.1%} of its memory"
                if w.gpu_memory_utilization
                else ""
            )
            device = _device(w.gpu, w.cpu_threads, w.num_gpus) + ", on cores of its own" * bool(
                w.cores
            )
            lines.append(f"  rollout worker {w.worker}   {device}{shared}{memory}")
        return "\n".join(lines)


def _device(gpu: int | None, threads: int, num_gpus: int = 1) -> str:
    if gpu is None:
        return f"cpu, {threads} thread{'s' * (threads > 1)}"
    return f"gpu {gpu}" if num_gpus == 1 else f"gpus {gpu} to {gpu + num_gpus - 1}"


def place(
    config: Config, num_gpus: int, num_cores: int, num_trainer_ranks: int, has_nccl: bool = True
) -> Placement:
    """Return the device of every process of a node, and the transport of weights.

    Args: the GPUs and CPU cores that this node may use, the trainer ranks that torchrun started on it (0 on a host that
    joined a run), and whether torch has NCCL. Raises ValueError, with the arithmetic, for what does not fit.
    """
    if num_gpus:
        workers = _place_on_gpus(config, num_gpus, num_trainer_ranks)
        threads = _threads(num_cores - CORES_PER_GPU_WORKER * len(workers), num_trainer_ranks)
        trainer_gpus = tuple(range(num_trainer_ranks))
    else:
        num_workers = _count_on_cpu(config, num_cores)
        threads = _threads(num_cores, num_trainer_ranks + num_workers)
        workers = tuple(
            WorkerPlacement(worker, None, None, threads, 0.0) for worker in range(num_workers)
        )
        trainer_gpus = (None,) * num_trainer_ranks
    if not workers:
        return Placement(trainer_gpus, threads, (), "pull")
    if config.colocate == "sleep" and workers[0].shared_with_rank is None:
        raise ValueError(
            "--colocate sleep is for one GPU that trainer and engine share, and none is; use --colocate share"
        )
    transport = _choose_transport(config.weight_sync, workers[0], num_trainer_ranks, has_nccl)
    return Placement(trainer_gpus, threads, workers, transport)


def _place_on_gpus(
    config: Config, num_gpus: int, num_trainer_ranks: int
) -> tuple[WorkerPlacement, ...]:
    """Return the rollout workers of a node with GPUs: after the trainer's GPUs, or one worker on the trainer's only."""
    if config.dtype == "float32":
        raise ValueError(
            f"--dtype float32 is for the CPU, and {num_gpus} GPUs are visible; use auto, bfloat16 or float16"
        )
    tp, num_workers = config.rollout_tp, config.num_rollout_workers
    if num_workers is None:
        num_workers = max(1, (num_gpus - num_trainer_ranks) // tp)
    if (num_gpus, num_trainer_ranks, num_workers, tp) == (1, 1, 1, 1):
        return (WorkerPlacement(0, 0, 0, 1, config.gpu_memory_utilization or SHARE_BESIDE_TRAINER),)
    needed = num_trainer_ranks + num_workers * tp
    if needed > num_gpus:
        raise ValueError(
            f"{num_trainer_ranks} trainer ranks + {num_workers} rollout workers × {tp} GPUs = {needed} GPUs, "
            f"{num_gpus} visible; lower --nproc-per-node, --num-rollout-workers or --rollout-tp "
            "(one rank and one worker may share the only GPU)"
        )
    share = config.gpu_memory_utilization or SHARE_ALONE
    return tuple(
        WorkerPlacement(worker, num_trainer_ranks + worker * tp, None, 1, share, tp)
        for worker in range(num_workers)
    )


def _count_on_cpu(config: Config, num_cores: int) -> int:
    """Return the number of rollout workers of a node without GPUs."""
    if config.batch_invariant:
        raise ValueError(
            "--batch-invariant takes vLLM's kernels for GPUs, and none is visible; leave it out"
        )
    num_workers = 1 if config.num_rollout_workers is None else config.num_rollout_workers
    if config.rollout_tp > 1 and num_workers:
        raise ValueError(
            f"--rollout-tp {config.rollout_tp} splits an engine over GPUs, and none is visible; use 1"
        )
    if num_workers > num_cores:
        raise ValueError(
            f"--num-rollout-workers {num_workers} on {num_cores} CPU cores: {num_workers} / {num_cores} = "
            f"{num_workers / num_cores:.2f} engines per core, and the trainer; use {num_cores} or fewer"
        )
    return num_workers


def _choose_transport(
    wanted: str, worker: WorkerPlacement, num_trainer_ranks: int, has_nccl: bool
) -> str:
    """Return the transport that is `wanted`, or for `auto` the fastest one. Raises ValueError if it cannot work."""
    if worker.gpu is None or num_trainer_ranks == 0:
        possible, why = ["shm"], "without a GPU weights go through host memory"
    elif worker.shared_with_rank is not None:
        possible, why = ["ipc", "shm"], "trainer and worker share one GPU, which NCCL refuses"
    elif has_nccl:
        possible, why = (
            ["nccl", "shm"],
            "trainer and workers have separate GPUs, between which there is no CUDA IPC",
        )
    else:
        possible, why = ["shm"], "this torch has no NCCL"
    if wanted not in (*possible, "auto"):
        raise ValueError(
            f"--weight-sync {wanted} cannot work here: {why}; use {' or '.join(possible)}, or auto"
        )
    return possible[0] if wanted == "auto" else wanted


def _threads(num_cores: int, num_processes: int) -> int:
    """Return the compute threads of each process; where the optimizer is offloaded, AdamW runs on the trainer's."""
    return max(1, num_cores // max(1, num_processes))


def available_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))
