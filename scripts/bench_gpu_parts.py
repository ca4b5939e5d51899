"""What bench_gpu.py measures, one function per part; each runs in a process of its own and returns its numbers."""

import asyncio
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.placement import Placement
from cluster.shape import read_shape
from scripts.bench_gpu_setup import Setup, one_rank, peak_memory, place_here, timed
from scripts.bench_gpu_trainer import trainer

ROOT = Path(__file__).resolve().parent.parent
SYNC_ROUNDS = 5
ENGINE_SHARE = 0.25
"""Of the GPU, for an engine beside a trainer that makes no step."""
PROBES, PROBE_TOKENS = 4, 256
ROLLOUT_STEPS = 4
"""Of which the first warms up."""
JOB_GROUPS = 16
JOB_STEPS = 6
JOB_WARM_UP = 2


# Weight sync, and engine against trainer


class Pair:
    """A trainer's policy and an engine in this process's care, joined by the placement's transport."""

    def __init__(self, setup: Setup, **options):
        """Start the engine first: it measures how much of the GPU is free. `options` of Config."""
        from cluster.placement import WorkerSpec
        from engine.proxy import LLMProxy
        from engine.vllm_setup import worker_environment

        self.config = setup.config(**options)
        self.placement = placement = place_here(self.config, setup.device)
        os.environ.update(worker_environment(placement.workers[0]))
        self.loop = asyncio.new_event_loop()
        spec = WorkerSpec(self.config, placement.workers[0], self.config.model, placement.transport, "")
        self.proxy = self.run(LLMProxy.start(spec, stop_token_ids=[]))
        self.transport_name = placement.transport
        self._join(setup.device)

    def _join(self, device: str) -> None:
        import torch

        from trainer.policy import load_policy
        from weights.ipc import IpcTransport
        from weights.shm import ShmTransport
        from weights.transport import ParameterSpec

        self.policy = load_policy(self.config, self.config.model, torch.device(device))
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        named = self.policy.module.model.named_parameters()
        self.specs = [ParameterSpec(name, dtype, tuple(parameter.shape)) for name, parameter in named]
        self.transport = {"ipc": IpcTransport, "shm": ShmTransport}[self.transport_name](self.specs)
        self.run(self.proxy.connect(self.transport.init_info()))

    def run(self, coroutine):
        """The result of a coroutine, within five minutes."""
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 300))

    def perturb(self, share: float = 0.1) -> None:
        """Move every weight by up to half of this share of itself: an engine that missed an update shows it."""
        import torch

        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.mul_(1.0 + share * (torch.rand_like(parameter) - 0.5))

    def gap(self, seed: int = 0) -> np.ndarray:
        """|engine − trainer| of the log-probs of random tokens under the weights that each has now, nats."""
        from trainer.packing import TrainSequence

        rng = np.random.default_rng(seed)
        length = min(PROBE_TOKENS, self.config.max_sequence_tokens - 1)
        vocabulary = read_shape(self.config.model).vocab_size
        probes = [rng.integers(0, vocabulary, length) for _ in range(PROBES)]
        unused = np.zeros(length, np.float32)
        mask, versions = np.arange(length) > 0, np.zeros(length, np.int32)
        sequences = [[TrainSequence(probe, mask, unused, versions, 0.0, 0.0)] for probe in probes]
        trainer = [score.numpy() for score in self.policy.score(sequences, raw=True)]
        engine = [self.run(self.proxy.score(tuple(probe.tolist()))) for probe in probes]
        return np.abs(np.concatenate(trainer).astype(np.float64) - np.concatenate(engine))

    async def shutdown(self) -> None:
        """End the engine while its loop runs."""
        self.proxy.shutdown()
        await asyncio.sleep(0.1)


def sync(setup: Setup) -> dict:
    """Publish a version some times: how long the trainer waits, how long the engine, and whether they agree after."""
    with one_rank(setup.device):
        pair = Pair(setup, gpu_memory_utilization=ENGINE_SHARE)  # nothing is trained here that needs room
        try:
            rounds = [_publish(pair, version, setup.device) for version in range(SYNC_ROUNDS + 1)][1:]
            gap = pair.gap()
        finally:
            pair.run(pair.shutdown())
    num_bytes = sum(spec.num_bytes for spec in pair.specs)
    stage_s, load_s = (statistics.median(round[i] for round in rounds) for i in (0, 1))
    return {
        "transport": pair.transport_name,
        "gb": num_bytes / 1e9,
        "stage_s": stage_s,
        "load_s": load_s,
        "spread_s": max(map(sum, rounds)) - min(map(sum, rounds)),
        "gb_per_s": num_bytes / 1e9 / (stage_s + load_s),
        "rounds": len(rounds),
        "gap_mean": float(gap.mean()),
        "gap_max": float(gap.max()),
        "gap_tokens": len(gap),
        **peak_memory(setup.device),
    }


def _publish(pair: Pair, version: int, device: str) -> tuple[float, float]:
    pair.perturb()
    stage_s, staged = timed(lambda: pair.transport.stage(version, pair.policy.named_full_parameters()), device)
    pair.transport.announce(staged)
    load_s, _ = timed(lambda: pair.run(pair.proxy.update(version, staged.messages)), device)
    return stage_s, load_s


# Rollout


def rollout(setup: Setup) -> dict:
    """A real worker and controller, synchronous, without a trainer: generated tokens/s."""
    from controller.controller import Controller
    from controller.tickets import PromptSource, TicketSource
    from controller.workers import Workers
    from data.models import load_tokenizer
    from data.tasks import load_task
    from rollout import run_worker

    config = setup.config(async_ratio=0.0, eval_every=0)
    placement, task = place_here(config, setup.device), load_task(config.task, 0)
    encode = functools.partial(task.encode_prompt, tokenizer=load_tokenizer(config.model))
    tickets = TicketSource(config, PromptSource(task.train_problem, [], encode))
    logs = Path(tempfile.mkdtemp(prefix="bench-gpu-"))
    controller = Controller(
        config, Workers(config, placement, config.model, logs, run_worker), tickets, lambda *_, **__: None
    )
    try:
        controller.launch()
        controller.wait_until_ready()
        transport, weights = _transport_of(placement, config.model, setup.device)
        controller.connect(transport)
        steps = [_rollout_step(controller, weights, version) for version in range(ROLLOUT_STEPS)]
    finally:
        controller.stop()
    return _rates(steps[1:])


def _rollout_step(controller, weights: list, version: int) -> tuple[float, int]:
    """Publish and take a batch. Returns seconds, and tokens generated."""
    from weights.transport import Announcement

    start = time.perf_counter()
    staged = controller.stage(version, weights)
    controller.publish(Announcement(version, version, staged, (), False))
    groups = controller.take_batch()
    return time.perf_counter() - start, sum(t.num_generated for group in groups for t in group.trajectories)


def _transport_of(placement: Placement, model_path: str, device: str):
    """The transport, and the weights of a checkpoint to send by it."""
    import torch
    from safetensors.torch import load_file

    from weights.ipc import IpcTransport
    from weights.shm import ShmTransport
    from weights.transport import ParameterSpec

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = {}
    for file in sorted(Path(model_path).glob("*.safetensors")):
        loaded |= load_file(file, device=device)
    weights = [(name, tensor.to(dtype)) for name, tensor in loaded.items()]
    specs = [ParameterSpec(name, dtype, tuple(tensor.shape)) for name, tensor in weights]
    return {"ipc": IpcTransport, "shm": ShmTransport}[placement.transport](specs), weights


def _rates(steps: list[tuple[float, int]]) -> dict:
    rates = [tokens / seconds for seconds, tokens in steps]
    spread = max(rates) - min(rates)
    return {"tokens_per_s": statistics.median(rates), "spread": spread, "steps": len(steps), "tokens": steps[0][1]}


def bare(setup: Setup) -> dict:
    """vLLM alone: LLM.generate of as many responses to the same prompts, without log-probs. Tokens/s."""
    from cluster.placement import WorkerSpec
    from data.models import load_tokenizer
    from engine.vllm_setup import engine_options, worker_environment

    config = setup.config(async_ratio=0.0)
    placement = place_here(config, setup.device)
    os.environ.update(worker_environment(placement.workers[0]))
    from vllm import LLM, SamplingParams

    from data.tasks import load_task

    options = engine_options(WorkerSpec(config, placement.workers[0], config.model, placement.transport, ""))
    ours = ("weight_transfer_config", "worker_extension_cls", "logprobs_mode", "disable_log_stats")
    llm = LLM(**{name: value for name, value in options.items() if name not in ours})
    task, tokenizer = load_task(config.task, 0), load_tokenizer(config.model)
    params = SamplingParams(temperature=1.0, max_tokens=config.max_response_tokens, detokenize=False)
    steps = []
    for step in range(ROLLOUT_STEPS):
        problems = [task.train_problem(step * config.groups_per_step + i) for i in range(config.groups_per_step)]
        encoded = [{"prompt_token_ids": task.encode_prompt(problem, tokenizer)} for problem in problems]
        prompts = [prompt for prompt in encoded for _ in range(config.group_size)]
        seconds, outputs = timed(lambda prompts=prompts: llm.generate(prompts, params, use_tqdm=False), "cpu")
        steps.append((seconds, sum(len(output.outputs[0].token_ids) for output in outputs)))
    return _rates(steps[1:])


# Whole jobs


def job(setup: Setup, async_ratio: float, colocate: str = "share") -> dict:
    """A run of train_async.py: seconds per step, after the first ones, and what else it logs."""
    config = setup.config(async_ratio=async_ratio, colocate=colocate)
    config = replace(config, groups_per_step=min(JOB_GROUPS, config.groups_per_step))
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-job-"))
    names = ("model", "groups_per_step", "group_size", "max_response_tokens", "max_running_requests", "on_update",
             "async_ratio", "colocate", "env_timeout_s", "warmup")  # fmt: skip
    options = {name: getattr(config, name) for name in names} | {"steps": JOB_STEPS, "eval_every": 0}
    options |= {"lr": 1e-3, "weight_decay": 50}  # no response earns anything; the decay moves the weights all the same
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py", *arguments]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if setup.device == "cpu" else {}
    subprocess.run(
        [*command, f"--runs-dir={folder}", "--run-name=run"], cwd=ROOT, check=True, env={**os.environ, **hidden}
    )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return job_numbers([json.loads(line) for line in lines])


def job_numbers(metrics: list[dict]) -> dict:
    """Medians over the steps after the warm-up, and the worst of what must stay small."""
    later = metrics[JOB_WARM_UP:]
    median = {name: statistics.median(line[f"time/{name}"] for line in later) for name in ("step_s", "publish_s")}
    worst = {
        found: max((line[name] for line in metrics if name in line), default=None)
        for found, name in (("gap_mean", "mismatch/abs_mean"), ("peak_gib", "memory/peak_gib"))
    }
    return {
        **median,
        **{name: value for name, value in worst.items() if value is not None},
        "spread_s": max(line["time/step_s"] for line in later) - min(line["time/step_s"] for line in later),
        "steps": len(later),
        "tokens_per_s": statistics.median(line["rollout/tokens_per_s"] for line in later),
    }


def tests(_: Setup) -> dict:
    """The tests that need a GPU. Raises CalledProcessError if one fails."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-m", "gpu"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    print(result.stdout, flush=True)
    result.check_returncode()
    return {"summary": result.stdout.strip().splitlines()[-1].strip("= ")}


FUNCTIONS = {
    "sync": sync,
    "trainer": trainer,
    "rollout": rollout,
    "bare": bare,
    "job-sync": functools.partial(job, async_ratio=0.0),
    "job-async": functools.partial(job, async_ratio=1.0),
    "job-sleep": functools.partial(job, async_ratio=0.0, colocate="sleep"),
    "tests": tests,
}
"""What a part is called -> what it does."""
