"""The parts of gpu.py, one function each. Each runs in its own process and returns its numbers."""

import asyncio
import functools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import torch

from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.placement import Placement, WorkerSpec, available_cores, place
from asyncrl.config import Config, words_of
from asyncrl.engine.proxy import LLMProxy
from asyncrl.engine.vllm_setup import sampling_params, worker_environment
from asyncrl.trainer.policy import load_policy
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.shm import ShmTransport
from extras.planning.fit import plan_memory
from extras.planning.memory import Sharing
from extras.planning.shape import read_shape
from scripts.bench.trainer_alone import Setup, made_up, one_rank, peak_memory, timed
from scripts.lines import ROOT
from scripts.runs import load

TRANSPORTS = {"ipc": IpcTransport, "shm": ShmTransport}
"""Transports that need one GPU at most."""
SYNC_ROUNDS = 5
ENGINE_SHARE = 0.25
"""Share of the GPU for an engine beside a trainer that makes no step."""
JOB_GROUPS, JOB_STEPS, JOB_WARM_UP = 16, 6, 2
PROBES, PROBE_TOKENS = 4, 256


# A trainer and an engine


def place_here(config: Config, device: str) -> Placement:
    """Return one trainer rank and one worker, as a run would place them."""
    gpus = visible_gpus()[:1] if device == "cuda" else []
    placement = place(config, len(gpus), available_cores(), 1)
    if not gpus:
        return placement
    shape = read_shape(config.model)
    placement, arithmetic = plan_memory(config, placement, shape, gpus, Sharing())
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
        """Start the engine first, because it measures how much of the GPU is free. It is also forked, and a child
        cannot use a GPU if its parent has already formed a process group. `options` are those of Config."""
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
        """Return the result of a coroutine, within five minutes."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 300))

    def perturb(self, share: float = 0.1) -> None:
        """Move every weight by up to half of this share of itself: an engine that missed an update shows it."""
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.mul_(1.0 + share * (torch.rand_like(parameter) - 0.5))

    def gap(self, seed: int = 0) -> np.ndarray:
        """Return |engine − trainer| of the log-probs of random tokens under the weights that each has now, nats."""
        length = min(PROBE_TOKENS, self.config.max_sequence_tokens - 1)
        vocabulary = read_shape(self.config.model).vocab_size
        probes = np.random.default_rng(seed).integers(0, vocabulary, (PROBES, length))
        sequences = [[made_up(probe, 1, index)] for index, probe in enumerate(probes)]
        trainer = [score.numpy() for score in self.policy.logprobs_of(sequences, raw=True)]
        engine = [self.run(self.proxy.score(tuple(probe.tolist()))) for probe in probes]
        return np.abs(np.concatenate(trainer).astype(np.float64) - np.concatenate(engine))

    def close(self) -> None:
        """End the engine, and then the trainer's group."""
        self.proxy.shutdown()
        self.run(asyncio.sleep(0.1))  # the engine's sockets are closed in its loop
        self._group.close()


# Weight sync, and engine against trainer


def sync(setup: Setup) -> dict:
    """Publish a version some times: how long the trainer waits, how long the engine, and whether they agree after."""
    # no training here needs room
    with closing(Pair(setup, gpu_memory_utilization=ENGINE_SHARE)) as pair:
        rounds = [_publish(pair, version, setup.device) for version in range(SYNC_ROUNDS + 1)][1:]
        gap = pair.gap()
    gb = sum(spec.num_bytes for spec in pair.specs) / 1e9
    stage_s, load_s = (statistics.median(seconds) for seconds in zip(*rounds, strict=True))
    return {
        "transport": pair.transport_name, "gb": gb, "gb_per_s": gb / (stage_s + load_s),
        "stage_s": stage_s, "load_s": load_s, "spread_s": float(np.ptp(np.sum(rounds, axis=1))), "rounds": len(rounds),
        "gap_mean": float(gap.mean()), "gap_max": float(gap.max()), "gap_tokens": len(gap), **peak_memory(setup.device),
    }  # fmt: skip


def _publish(pair: Pair, version: int, device: str) -> tuple[float, float]:
    """Publish other weights. Returns seconds of the trainer, and of the engine."""
    pair.perturb()
    stage_s, staged = timed(
        lambda: pair.transport.stage(version, pair.policy.sent_parameters()), device
    )
    pair.transport.make_readable(staged)
    load_s, _ = timed(lambda: pair.run(pair.proxy.load_weights(version, staged.messages)), device)
    return stage_s, load_s


# Decoding alone

DECODE_ROUNDS, DECODE_REQUESTS, DECODE_PROMPT = 3, 128, 16
DECODES = {
    "run": (DECODE_REQUESTS, {}),
    "no_logprobs": (DECODE_REQUESTS, {"logprobs": None}),
    "no_seeds": (DECODE_REQUESTS, {"seed": None}),
    "quarter": (DECODE_REQUESTS // 4, {}),
    "single": (1, {}),
}
"""By name: requests at a time, and what differs from a run's parameters of a request."""


def decode(setup: Setup) -> dict:
    """Decode without a trainer, in several ways one after the other: milliseconds a step, of time and of CPU time.

    CPU time is that of the engine's process and of its parent. If the engine's is near the time of a step, Python is
    the limit, and not the GPU. Weights are random, and no response ends early.
    """
    config = setup.config(gpu_memory_utilization=ENGINE_SHARE)
    spec = enter_worker(config, setup.device)
    loop = asyncio.new_event_loop()
    proxy = loop.run_until_complete(LLMProxy.start(spec, stop_token_ids=[]))
    core = psutil.Process(proxy.engine.engine_core.resources.engine_manager.processes[0].pid)
    steps_ms, core_ms, worker_ms = defaultdict(list), defaultdict(list), defaultdict(list)
    num_steps = config.max_response_tokens
    for number in range(DECODE_ROUNDS + 1):
        for name, (num_requests, changes) in DECODES.items():
            before = time.perf_counter(), cpu_s(core), time.process_time()
            loop.run_until_complete(_decode_wave(proxy, num_requests, changes, seed=number))
            after = time.perf_counter(), cpu_s(core), time.process_time()
            if number:  # the first round warms up
                spent = np.subtract(after, before) * 1000 / num_steps
                for times, value in zip((steps_ms, core_ms, worker_ms), spent, strict=True):
                    times[name].append(float(value))
    engine_config = proxy.engine.vllm_config
    proxy.shutdown()
    loop.run_until_complete(asyncio.sleep(0.1))
    medians = {
        f"{name}_{kind}": statistics.median(times[name])
        for kind, times in (("ms", steps_ms), ("core_ms", core_ms), ("worker_ms", worker_ms))
        for name in DECODES
    }
    return medians | {
        "spread_ms": float(np.ptp(steps_ms["run"])),
        "core_busy": medians["run_core_ms"] / medians["run_ms"],
        "rounds": DECODE_ROUNDS,
        "requests": DECODE_REQUESTS,
        "runner": "V2" if engine_config.use_v2_model_runner else "V1",
        "graphs": engine_config.compilation_config.cudagraph_mode.name,
        "is_async": "on" if engine_config.scheduler_config.async_scheduling else "off",
    }


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process, all threads, seconds."""
    times = process.cpu_times()
    return times.user + times.system


async def _decode_wave(proxy: LLMProxy, num_requests: int, changes: dict, seed: int) -> None:
    """Sample responses of the longest length, all at once."""
    vocabulary, requests = read_shape(proxy.config.model).vocab_size, []
    prompts = np.random.default_rng(seed).integers(0, vocabulary, (num_requests, DECODE_PROMPT))
    for index, prompt in enumerate(prompts):
        params = sampling_params(proxy.config, [], index, proxy.config.max_response_tokens, 1)
        params.ignore_eos = True
        for name, value in changes.items():
            setattr(params, name, value)
        requests.append(
            proxy.run_request(f"decode-{time.monotonic_ns()}-{index}", prompt.tolist(), params)
        )
    finals = await asyncio.gather(*requests)
    assert {len(final.outputs[0].token_ids) for final in finals} == {
        proxy.config.max_response_tokens
    }


# Whole jobs


def job(setup: Setup, async_ratio: float, colocate: str = "share") -> dict:
    """Run train_async.py: seconds per step, after the first ones, and what else it logs."""
    config = setup.config(async_ratio=async_ratio, colocate=colocate)
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-job-"))
    names = ("model", "group_size", "max_response_tokens", "max_running_requests", "on_update",
             "async_ratio", "colocate", "env_timeout_s")  # fmt: skip
    options = {name: getattr(config, name) for name in names} | {
        "groups_per_step": min(JOB_GROUPS, config.groups_per_step),
        "steps": JOB_STEPS, "eval_every": 0, "save_every": None, "runs_dir": folder, "run_name": "run", "lr": 1e-3,
        "optim.warmup_steps": 0,
        # No response earns anything; the decay moves the weights all the same.
        "optim.args": ["weight_decay=50"],
    }  # fmt: skip
    # Half of several GPUs train.
    num_ranks = max(1, len(visible_gpus()) // 2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += [f"--nproc-per-node={num_ranks}"]
    subprocess.run([*torchrun, "train_async.py", *words_of(options)], cwd=ROOT, check=True)
    numbers = job_numbers(load(folder / "run").metrics)
    shutil.rmtree(folder)  # the logs of a run that fails stay
    return numbers


def job_numbers(metrics: pd.DataFrame) -> dict:
    """Return means over the steps after the warm-up, and the worst of what must stay small.

    Means, as with α = 1 a step that waits for samples is followed by one that has them.
    """
    late = metrics[JOB_WARM_UP:]
    step_s = late["time/step_s"]
    worst = {"gap_mean": "mismatch/abs_mean", "peak_gib": "memory/peak_gib"}
    return {
        "step_s": float(step_s.mean()), "wait_s": float(late["time/wait_s"].mean()),
        "publish_s": float(late["time/publish_s"].mean()),
        "tokens_per_s": float(late["tokens/trained"].sum() / step_s.sum()),
        **{number: float(metrics[name].max()) for number, name in worst.items() if name in metrics},
        "spread_s": float(np.ptp(step_s)), "steps": len(late),
    }  # fmt: skip


FUNCTIONS = {
    "sync": sync,
    "decode": decode,
    "job-sync": functools.partial(job, async_ratio=0.0),
    "job-async": functools.partial(job, async_ratio=1.0),
    "job-nccl": functools.partial(job, async_ratio=1.0),
    "job-sleep": functools.partial(job, async_ratio=0.0, colocate="sleep"),
}
"""Name of a part -> its function."""
