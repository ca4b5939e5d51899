"""Which process gets which device on this node. Pure but for `visible_gpus`; prints nothing, starts nothing.

no GPU        trainer ranks and rollout workers share the CPU cores; transport `shm`
one GPU       the rollout worker shares it with the trainer rank; transport `ipc`
several GPUs  one per trainer rank, the rest to rollout workers; transport `shm` until there is `nccl`
"""

import os
from dataclasses import dataclass
from typing import Literal

from config import Config

OWN_GPU_MEMORY_UTILIZATION = 0.9


@dataclass(frozen=True)
class WorkerPlacement:
    """Where one rollout worker runs."""

    worker: int
    gpu: int | None
    """Index into this node's visible GPUs; None on the CPU."""
    shared_with_rank: int | None
    """Local trainer rank on the same GPU, if any."""
    cpu_threads: int
    """Compute threads of the engine on the CPU."""
    gpu_memory_utilization: float
    """Share of the GPU's memory for the engine."""


@dataclass(frozen=True)
class Placement:
    """The devices of one node."""

    trainer_gpus: tuple[int | None, ...]
    """GPU of each local trainer rank; None on the CPU."""
    trainer_threads: int
    """Compute threads of each trainer rank."""
    workers: tuple[WorkerPlacement, ...]
    transport: Literal["shm", "ipc"]

    def table(self) -> str:
        """The placement as text, a line per process."""
        lines = [f"placement (weights by {self.transport}):"]
        for rank, gpu in enumerate(self.trainer_gpus):
            lines.append(f"  trainer rank {rank}     {_device(gpu, self.trainer_threads)}")
        for w in self.workers:
            shared = f", shared with trainer rank {w.shared_with_rank}" if w.shared_with_rank is not None else ""
            memory = f", {w.gpu_memory_utilization:.0%} of its memory" if w.gpu is not None else ""
            lines.append(f"  rollout worker {w.worker}   {_device(w.gpu, w.cpu_threads)}{shared}{memory}")
        return "\n".join(lines)


def _device(gpu: int | None, threads: int) -> str:
    return f"cpu, {threads} thread{'s' * (threads > 1)}" if gpu is None else f"gpu {gpu}"


def place(config: Config, num_gpus: int, num_cores: int, num_trainer_ranks: int) -> Placement:
    """Give every process of a node its device.

    Args: the GPUs and CPU cores that this node may use, and the trainer ranks that torchrun started on it.
    Raises ValueError, with the arithmetic, for what does not fit.
    """
    if num_gpus == 0:
        return _place_on_cpu(config, num_cores, num_trainer_ranks)
    if num_trainer_ranks > num_gpus:
        raise ValueError(
            f"{num_trainer_ranks} trainer ranks on {num_gpus} visible GPUs: each rank needs its own; "
            f"use --nproc-per-node {num_gpus} or fewer"
        )
    free = list(range(num_trainer_ranks, num_gpus))
    if not free:
        return _place_on_shared_gpus(config, num_trainer_ranks)
    num_workers = len(free) if config.num_rollout_workers is None else config.num_rollout_workers
    if num_workers > len(free):
        raise ValueError(
            f"{num_trainer_ranks} trainer ranks + {num_workers} rollout workers = {num_trainer_ranks + num_workers} "
            f"GPUs, {num_gpus} are visible; lower --num-rollout-workers to {len(free)} or --nproc-per-node"
        )
    workers = tuple(
        WorkerPlacement(worker, free[worker], None, 1, OWN_GPU_MEMORY_UTILIZATION) for worker in range(num_workers)
    )
    return Placement(tuple(range(num_trainer_ranks)), _threads(num_cores, num_trainer_ranks), workers, "shm")


def _place_on_cpu(config: Config, num_cores: int, num_trainer_ranks: int) -> Placement:
    num_workers = config.num_rollout_workers or 1
    threads = _threads(num_cores, num_trainer_ranks + num_workers)
    workers = tuple(WorkerPlacement(worker, None, None, threads, 0.0) for worker in range(num_workers))
    return Placement((None,) * num_trainer_ranks, threads, workers, "shm")


def _place_on_shared_gpus(config: Config, num_gpus: int) -> Placement:
    """No GPU is free of a trainer rank: the one worker shares a GPU with the one rank."""
    num_workers = config.num_rollout_workers or 1
    if num_gpus > 1:
        raise ValueError(
            f"{num_gpus} trainer ranks on {num_gpus} visible GPUs leave none for rollout workers: "
            f"use --nproc-per-node {num_gpus - 1} or fewer"
        )
    if num_workers > 1:
        raise ValueError(
            f"1 trainer rank + {num_workers} rollout workers = {1 + num_workers} processes on 1 visible GPU: "
            "a GPU is shared by one of each at most; use --num-rollout-workers 1"
        )
    worker = WorkerPlacement(0, 0, 0, 1, config.gpu_memory_utilization)
    return Placement((0,), 1, (worker,), "ipc")


def _threads(num_cores: int, num_processes: int) -> int:
    return max(1, num_cores // num_processes)


def visible_gpus() -> int:
    """NVIDIA GPUs that this process may use, without initialising CUDA in it."""
    import torch

    return torch.cuda.device_count()


def available_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))
