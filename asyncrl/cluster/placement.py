"""The device of each process of this node.

no GPU        trainer ranks and rollout workers share the CPU cores; transport `shm`
one GPU       the rollout worker shares it with the trainer rank; transport `ipc`
several GPUs  one per trainer rank, the rest to rollout workers, `rollout_tp` each; transport `nccl`

`--weight-sync` overrides the transport; `shm` works everywhere. With `--num-rollout-workers 0` only remote hosts
sample, and `pull` the weights. A remote host has no trainer rank: its workers have all GPUs, and read weights by `shm`.
"""

import os
from dataclasses import dataclass
from typing import Literal

from asyncrl.config import Config

SHARE_BESIDE_TRAINER, SHARE_ALONE = 0.45, 0.9
"""Share of a GPU's memory for an engine, with and without a trainer rank on the same GPU."""
CORES_PER_GPU_WORKER = 2
"""Cores that a rollout worker on GPUs uses: one for its process, one for its engine."""


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
    """CPU cores that only its engine uses once it is up; () if it shares all cores."""
    kv_cache_bytes: int | None = None
    """Bytes of each GPU for keys and values; None: all free memory in the engine's share."""


@dataclass(frozen=True)
class WorkerSpec:
    """Arguments of a worker process; it pickles."""

    config: Config
    placement: WorkerPlacement
    model_path: str
    transport: str
    log_path: str
    sockets_path: str = ""
    """Folder for vLLM's sockets and temporary files, removed with the run."""


@dataclass(frozen=True)
class Placement:
    """The devices of one node."""

    trainer_gpus: tuple[int | None, ...]
    """GPU of each local trainer rank; None on the CPU."""
    trainer_threads: int
    """Compute threads of each trainer rank."""
    workers: tuple[WorkerPlacement, ...]
    transport: Literal["shm", "ipc", "nccl", "pull"]

    @property
    def num_gpus(self) -> int:
        """Number of GPUs in use on this node; 0 without GPUs."""
        own = [worker for worker in self.workers if worker.shared_with_rank is None]
        num_of_workers = sum(worker.num_gpus for worker in own if worker.gpu is not None)
        return sum(gpu is not None for gpu in self.trainer_gpus) + num_of_workers

    def table(self) -> str:
        """Return the placement as text, a line per process."""
        remote = "no rollout worker here: remote hosts sample"
        lines = [f"placement ({f'weights by {self.transport}' if self.workers else remote}):"]
        for rank, gpu in enumerate(self.trainer_gpus):
            lines.append(f"  trainer rank {rank}     {_device(gpu, self.trainer_threads)}")
        for w in self.workers:
            is_shared = w.shared_with_rank is not None
            parts = (
                _device(w.gpu, w.cpu_threads, w.num_gpus),
                "on own cores" * bool(w.cores),
                f"shared with trainer rank {w.shared_with_rank}" * is_shared,
                f"{w.gpu_memory_utilization:.1%} of its memory" * bool(w.gpu_memory_utilization),
            )
            lines.append(f"  rollout worker {w.worker}   {', '.join(filter(None, parts))}")
        return "\n".join(lines)


def _device(gpu: int | None, threads: int, num_gpus: int = 1) -> str:
    if gpu is None:
        return f"cpu, {threads} thread{'s' * (threads > 1)}"
    return f"gpu {gpu}" if num_gpus == 1 else f"gpus {gpu} to {gpu + num_gpus - 1}"


def place(config: Config, num_gpus: int, num_cores: int, num_trainer_ranks: int) -> Placement:
    """Return the device of every process of a node, and the transport of weights.

    A remote host has 0 trainer ranks. Raises ValueError, with the arithmetic, if the processes do not fit.
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
            "--colocate sleep is for one GPU that trainer and engine share, and they share none; use --colocate share, "
            "or make one GPU visible: CUDA_VISIBLE_DEVICES=0"
        )
    transport = _choose_transport(config.weight_sync, workers[0], num_trainer_ranks)
    return Placement(trainer_gpus, threads, workers, transport)


def _place_on_gpus(
    config: Config, num_gpus: int, num_trainer_ranks: int
) -> tuple[WorkerPlacement, ...]:
    """Return the rollout workers of a node with GPUs, after the trainer's GPUs or on the trainer's only GPU."""
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
    if config.batch_invariant:
        raise ValueError(
            "--batch-invariant uses vLLM's kernels for GPUs, and no GPU is visible; remove it"
        )
    num_workers = 1 if config.num_rollout_workers is None else config.num_rollout_workers
    if config.rollout_tp > 1 and num_workers:
        raise ValueError(
            f"--rollout-tp {config.rollout_tp} splits an engine over GPUs, and no GPU is visible; use 1"
        )
    if num_workers > num_cores:
        raise ValueError(
            f"--num-rollout-workers {num_workers} on {num_cores} CPU cores: {num_workers} / {num_cores} = "
            f"{num_workers / num_cores:.2f} engines per core, and the trainer; use {num_cores} or fewer"
        )
    return num_workers


def _choose_transport(wanted: str, worker: WorkerPlacement, num_trainer_ranks: int) -> str:
    """Return the `wanted` transport, or for `auto` the fastest. Raises ValueError if it cannot work."""
    if worker.gpu is None or num_trainer_ranks == 0:
        possible, why = ["shm"], "without a GPU weights go through host memory"
    elif worker.shared_with_rank is not None:
        possible, why = ["ipc", "shm"], "trainer and worker share one GPU, which NCCL refuses"
    else:
        possible, why = (
            ["nccl", "shm"],
            "trainer and workers have separate GPUs, between which there is no CUDA IPC",
        )
    if wanted not in (*possible, "auto"):
        raise ValueError(
            f"--weight-sync {wanted} cannot work here: {why}; use {' or '.join(possible)}, or auto"
        )
    return possible[0] if wanted == "auto" else wanted


def _threads(num_cores: int, num_processes: int) -> int:
    """Return the compute threads of each process. An offloaded AdamW also uses them."""
    return max(1, num_cores // max(1, num_processes))


def available_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
