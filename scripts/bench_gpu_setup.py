"""What the parts of bench_gpu.py share: where and what to measure, a clock that waits for the GPU, its memory.

All on the first visible GPU, with random models in the shapes of Qwen3. On the CPU the same code runs with a tiny one.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.placement import Placement, available_cores, place, plan_memory
from cluster.shape import read_shape
from config import Config
from scripts.qwen3_shapes import save_random_qwen3


@dataclass(frozen=True)
class Setup:
    """Where and what to measure."""

    device: str
    size: str
    """A key of SHAPES."""
    models: Path
    """Folder in which each random model is made once."""
    on_update: str
    """What this vLLM can do: keep, or resume before it reported token versions."""

    @property
    def model_path(self) -> str:
        """The random model of this size, made if it is not there."""
        path = self.models / self.size
        if not path.exists():
            making = path.with_name(path.name + "-making")
            if self.device == "cuda":  # elsewhere, so that no context and no memory of it is here when an engine starts
                _in_another_process(save_random_qwen3, making, self.size, self.device)
            else:
                save_random_qwen3(making, self.size)
            making.rename(path)
        return str(path)

    def config(self, **options) -> Config:
        """Options of a run with this model: on a GPU 256 responses of 256 tokens a step, else a few short ones."""
        big = {"groups_per_step": 32, "group_size": 8, "max_response_tokens": 256, "max_running_requests": 256}
        few = {"groups_per_step": 2, "group_size": 2, "max_response_tokens": 16, "max_running_requests": 8}
        sizes = few if self.size == "tiny" else big
        fixed = {
            "model": self.model_path,
            "on_update": self.on_update,
            "env_timeout_s": 30.0,
        }
        return Config(**{**sizes, **fixed, "warmup": 0, "lr": 1e-5, **options}).checked()


def _in_another_process(function: Callable, *args) -> None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{function.__name__}{args} exited with {process.exitcode}")


def place_here(config: Config, device: str) -> Placement:
    """One trainer rank and one worker, as a run would place them."""
    from cluster.gpus import visible_gpus

    gpus = visible_gpus()[:1] if device == "cuda" else []
    placement = place(config, len(gpus), available_cores(), 1)
    if not gpus:
        return placement
    placement, arithmetic = plan_memory(config, placement, read_shape(config.model), gpus, num_ranks=1, num_shards=1)
    print(arithmetic, flush=True)
    return placement


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """A process group of this process alone, which FSDP needs."""
    import torch.distributed as dist

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def synchronize(device: str) -> None:
    """Wait until the GPU has done what it was asked to."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def timed(action: Callable, device: str) -> tuple[float, object]:
    """Seconds that an action takes, GPU included, and its result."""
    synchronize(device)
    start = time.perf_counter()
    result = action()
    synchronize(device)
    return time.perf_counter() - start, result


def peak_memory(device: str) -> dict[str, float]:
    """Most that tensors of this process held, and what all processes hold now, GiB; nothing on the CPU."""
    import torch

    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"trainer_peak_gib": torch.cuda.max_memory_allocated() / 2**30, "gpu_used_gib": (total - free) / 2**30}
