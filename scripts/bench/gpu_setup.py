"""What the parts of gpu.py share: what to measure and where, a trainer joined to an engine, a clock that waits.

All on the first visible GPU, with random models in the shapes of Qwen3. On the CPU the same code runs with a tiny one.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cluster.gpus import visible_gpus
from cluster.placement import Placement, WorkerSpec, available_cores, place, plan_memory
from cluster.shape import read_shape
from config import Config
from engine.proxy import LLMProxy
from engine.vllm_setup import worker_environment
from scripts.bench.gpu import on_update
from scripts.bench.rig import TRANSPORTS, made_up
from scripts.qwen3_shapes import save_random_qwen3
from trainer.policy import load_policy

PROBES, PROBE_TOKENS = 4, 256


@dataclass(frozen=True)
class Setup:
    """Where and what to measure."""

    device: str
    size: str
    """A key of SHAPES."""
    models: Path
    """Folder in which each random model is made once."""

    @property
    def model_path(self) -> str:
        """The random model of this size, made if it is not there."""
        path = self.models / self.size
        if not path.exists():
            making = path.with_name(path.name + "-making")
            if self.device == "cuda":  # elsewhere, so that no context and no memory of it is here when an engine starts
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as elsewhere:
                    elsewhere.submit(save_random_qwen3, making, self.size, self.device).result()
            else:
                save_random_qwen3(making, self.size)
            making.rename(path)
        return str(path)

    def config(self, **options) -> Config:
        """Options of a run with this model: on a GPU 256 responses of 256 tokens a step, else a few short ones."""
        big = {"groups_per_step": 32, "group_size": 8, "max_response_tokens": 256, "max_running_requests": 256}
        few = {"groups_per_step": 2, "group_size": 2, "max_response_tokens": 16, "max_running_requests": 8}
        fixed = {"model": self.model_path, "on_update": on_update(), "env_timeout_s": 30.0, "warmup": 0, "lr": 1e-5}
        return Config(**{**(few if self.size == "tiny" else big), **fixed, **options}).checked()


def place_here(config: Config, device: str) -> Placement:
    """One trainer rank and one worker, as a run would place them."""
    gpus = visible_gpus()[:1] if device == "cuda" else []
    placement = place(config, len(gpus), available_cores(), 1)
    if not gpus:
        return placement
    placement, arithmetic = plan_memory(config, placement, read_shape(config.model), gpus, num_ranks=1, num_shards=1)
    print(arithmetic, flush=True)
    return placement


def enter_worker(config: Config, device: str) -> WorkerSpec:
    """Give this process the environment that a worker's vLLM would read. Returns what the worker would be given."""
    placement = place_here(config, device)
    os.environ.update(worker_environment(placement.workers[0]))
    return WorkerSpec(config, placement.workers[0], config.model, placement.transport, "")


class Pair:
    """A trainer's policy and an engine in this process's care, joined by the placement's transport."""

    def __init__(self, setup: Setup, **options):
        """Start the engine first: it measures how much of the GPU is free. `options` of Config."""
        self.config = setup.config(**options)
        spec = enter_worker(self.config, setup.device)
        self.loop = asyncio.new_event_loop()
        self.proxy = self.run(LLMProxy.start(spec, stop_token_ids=[]))
        self.policy = load_policy(self.config, self.config.model, torch.device(setup.device))
        self.specs, self.transport_name = self.policy.sent_specs(), spec.transport
        self.transport = TRANSPORTS[spec.transport](self.specs)
        self.run(self.proxy.connect(self.transport.init_info()))

    def run(self, coroutine):
        """The result of a coroutine, within five minutes."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 300))

    def perturb(self, share: float = 0.1) -> None:
        """Move every weight by up to half of this share of itself: an engine that missed an update shows it."""
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.mul_(1.0 + share * (torch.rand_like(parameter) - 0.5))

    def gap(self, seed: int = 0) -> np.ndarray:
        """|engine − trainer| of the log-probs of random tokens under the weights that each has now, nats."""
        rng = np.random.default_rng(seed)
        length = min(PROBE_TOKENS, self.config.max_sequence_tokens - 1)
        vocabulary = read_shape(self.config.model).vocab_size
        probes = [rng.integers(0, vocabulary, length) for _ in range(PROBES)]
        sequences = [[made_up(probe, 1, index)] for index, probe in enumerate(probes)]
        trainer = [score.numpy() for score in self.policy.score(sequences, raw=True)]
        engine = [self.run(self.proxy.score(tuple(probe.tolist()))) for probe in probes]
        return np.abs(np.concatenate(trainer).astype(np.float64) - np.concatenate(engine))

    async def shutdown(self) -> None:
        """End the engine while its loop runs."""
        self.proxy.shutdown()
        await asyncio.sleep(0.1)


def timed(action: Callable, device: str) -> tuple[float, object]:
    """Seconds that an action takes, GPU included, and its result."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    result = action()
    synchronize()
    return time.perf_counter() - start, result


def peak_memory(device: str) -> dict[str, float]:
    """Most that tensors of this process held, and what all processes hold now, GiB; nothing on the CPU."""
    if device != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"trainer_peak_gib": torch.cuda.max_memory_allocated() / 2**30, "gpu_used_gib": (total - free) / 2**30}
