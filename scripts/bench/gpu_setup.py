"""A trainer joined to an engine, on the first visible GPU or on the CPU, for the parts of gpu.py and for tests."""

import asyncio
import os
from contextlib import ExitStack

import numpy as np
import torch

from cluster.gpus import visible_gpus
from cluster.memory import Sharing
from cluster.placement import Placement, WorkerSpec, available_cores, place, plan_memory
from cluster.shape import read_shape
from config import Config
from engine.proxy import LLMProxy
from engine.vllm_setup import worker_environment
from scripts.bench.rig import TRANSPORTS
from scripts.bench.trainer_alone import Setup, made_up, one_rank
from trainer.policy import load_policy

PROBES, PROBE_TOKENS = 4, 256


def place_here(config: Config, device: str) -> Placement:
    """One trainer rank and one worker, as a run would place them."""
    gpus = visible_gpus()[:1] if device == "cuda" else []
    placement = place(config, len(gpus), available_cores(), 1)
    if not gpus:
        return placement
    placement, arithmetic = plan_memory(config, placement, read_shape(config.model), gpus, Sharing())
    print(arithmetic, flush=True)
    return placement


def enter_worker(config: Config, device: str) -> WorkerSpec:
    """Give this process the environment that a worker's vLLM would read. Returns what the worker would be given."""
    placement = place_here(config, device)
    os.environ.update(worker_environment(placement.workers[0]))
    return WorkerSpec(config, placement.workers[0], config.model, placement.transport, "")


class Pair:
    """A trainer's policy and an engine in this process's care, joined by the placement's transport; to be closed."""

    def __init__(self, setup: Setup, **options):
        """Start the engine first: it measures how much of the GPU is free, and is forked, and a child cannot use a GPU
        whose parent has so much as formed a process group. `options` of Config."""
        self.config = setup.config(**options)
        spec = enter_worker(self.config, setup.device)
        self.loop = asyncio.new_event_loop()
        self.proxy = self.run(LLMProxy.start(spec, stop_token_ids=[]))
        self._group = ExitStack()
        self._group.enter_context(one_rank(setup.device))
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

    def close(self) -> None:
        """End the engine, and then the trainer's group."""
        self.proxy.shutdown()
        self.run(asyncio.sleep(0.1))  # the engine's sockets are closed in its loop
        self._group.close()
