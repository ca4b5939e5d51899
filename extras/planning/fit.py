"""Fit a run into its GPUs' memory: choose the savings of `--save-memory auto`, and an engine's share of a GPU.

A run calls `fit_memory` before it loads anything. A dry run calls the same functions for GPUs that are not here.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.cluster.gpus import Gpu, visible_gpus
from asyncrl.cluster.placement import Placement
from asyncrl.config import Config
from asyncrl.plugins import Plugin
from extras.planning.memory import (
    CONTEXT_BYTES,
    Sharing,
    check_host,
    check_tp,
    check_trainer,
    free_host_bytes,
    plan_alone,
    plan_shared,
    ways_to_fit,
)
from extras.planning.shape import ModelShape, read_shape

if TYPE_CHECKING:
    from asyncrl.cluster.cluster import Cluster
    from asyncrl.job.node import Rank


def plan_memory(
    config: Config, placement: Placement, shape: ModelShape, gpus: list[Gpu], sharing: Sharing
) -> tuple[Placement, str]:
    """Check that the model fits this node's GPUs and host memory. Give an engine its part of a shared GPU.

    Returns the placement with that part, and the arithmetic as text.
    Raises ValueError, with the arithmetic, if the model cannot fit.
    """
    if config.weight_sync == "shm" and placement.workers:
        placement = replace(placement, transport="shm")
    texts, sharing = [], replace(sharing, stages=placement.transport in ("ipc", "nccl"))
    host_text = check_host(config, shape, sharing, placement)
    if placement.workers:
        check_tp(shape, config.rollout_tp)
        worker = placement.workers[0]
        if worker.shared_with_rank is not None:
            gpu = _fullest(gpus, [worker.gpu])
            share, kv_bytes, text = plan_shared(config, shape, gpu, sharing)
            worker = replace(worker, gpu_memory_utilization=share, kv_cache_bytes=kv_bytes)
            return replace(placement, workers=(worker,)), f"{text}\n{host_text}"
        engine = _fullest(gpus, [w.gpu + i for w in placement.workers for i in range(w.num_gpus)])
        kv_bytes, text = plan_alone(config, shape, engine)
        workers = tuple(replace(worker, kv_cache_bytes=kv_bytes) for worker in placement.workers)
        placement = replace(placement, workers=workers)
        texts.append(text)
    trainer = _fullest(gpus, placement.trainer_gpus)
    texts.insert(0, check_trainer(config, shape, trainer, sharing))
    return placement, "\n".join([*texts, host_text])


def first_that_fits(
    candidates: list[Config],
    placement: Placement,
    shape: ModelShape,
    gpus: list[Gpu],
    sharing: Sharing,
) -> int:
    """Return the index of the first options that fit, estimates included.

    If no options fit the host, it is the index of the first that fit the GPUs. If no options fit the GPUs, it is the
    last.
    """
    strict = replace(sharing, is_strict=True)
    for limits in (strict, replace(strict, host_bytes=math.inf)):
        for index, config in enumerate(candidates):
            with suppress(ValueError):
                plan_memory(config, placement, shape, gpus, limits)
                return index
    return len(candidates) - 1


def _fullest(gpus: list[Gpu], indices: Iterable[int]) -> Gpu:
    """Return the GPU with the most memory of other processes. Its name has its number."""
    index = max(indices, key=lambda i: gpus[i].used_bytes)
    return replace(gpus[index], name=f"gpu {index} ({gpus[index].name})")


class PlanningPlugin(Plugin):
    """Fits a run into the memory of its GPUs, and names the script that gives advice."""

    def fit_memory(
        self, config: Config, placement: Placement, model_path: str, cluster: "Cluster"
    ) -> tuple[Config, Placement]:
        """Return the options with savings, the same on all nodes, and the placement with the engine's share.

        Prints the arithmetic. Collective on leaders. Raises ValueError, with the arithmetic, if the run cannot fit.
        """
        sharing = Sharing(
            len(cluster.local_ranks) * cluster.num_nodes,
            cluster.num_ranks // config.replicas,
            host_bytes=free_host_bytes(),
        )
        node = (placement, read_shape(model_path), visible_gpus(), sharing)
        ways = ways_to_fit(config)
        config = ways[max(cluster.gather(first_that_fits(ways, *node)))]
        placement, arithmetic = plan_memory(config, *node)
        print(arithmetic, flush=True)
        return config, placement

    def limit_memory(self, rank: "Rank") -> None:
        """Limit the trainer to its part of a shared GPU, so that a restarted engine finds its own.

        There is no limit if the user's share for the engine leaves no part.
        """
        import torch  # here, because command lines import this file

        for worker in rank.placement.workers:
            if worker.shared_with_rank is not None and rank.config.colocate == "share":
                context = CONTEXT_BYTES / torch.cuda.get_device_properties(rank.device).total_memory
                fraction = 1 - worker.gpu_memory_utilization - context
                if fraction > 0:
                    torch.cuda.set_per_process_memory_fraction(fraction)

    def on_end(self, run_path: Path) -> None:
        """Print the command that shows the run, with advice."""
        script = os.path.relpath(Path(__file__).parents[2] / "scripts" / "report.py")
        print(f"look at the run: {shlex.join([sys.executable, script, str(run_path)])}")


PLUGIN = PlanningPlugin()
