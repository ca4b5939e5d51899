"""What gpu.py measures, one function per part; each runs in a process of its own and returns its numbers."""

import functools
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from cluster.shape import ModelShape, read_shape
from config import Config
from data.tasks import load_task
from engine.vllm_setup import engine_options
from rollout import run_worker
from scripts.bench.gpu_setup import Pair, Setup, enter_worker, peak_memory, timed
from scripts.bench.harness import ROOT
from scripts.bench.rig import Rig, made_up, one_rank, running
from scripts.lines import read
from trainer.batch import distribute
from trainer.packing import TrainSequence
from trainer.policy import load_policy
from weights.models import load_tokenizer

SYNC_ROUNDS = 5
ENGINE_SHARE = 0.25
"""Of the GPU, for an engine beside a trainer that makes no step."""
TRAIN_STEPS = ROLLOUT_STEPS = 4
"""Of which the first warms up."""
JOB_GROUPS, JOB_STEPS, JOB_WARM_UP = 16, 6, 2


# Weight sync, and engine against trainer


def sync(setup: Setup) -> dict:
    """Publish a version some times: how long the trainer waits, how long the engine, and whether they agree after."""
    with one_rank(setup.device):
        pair = Pair(setup, gpu_memory_utilization=ENGINE_SHARE)  # nothing is trained here that needs room
        try:
            rounds = [_publish(pair, version, setup.device) for version in range(SYNC_ROUNDS + 1)][1:]
            gap = pair.gap()
        finally:
            pair.run(pair.shutdown())
    gb = sum(spec.num_bytes for spec in pair.specs) / 1e9
    stage_s, load_s = (statistics.median(round[i] for round in rounds) for i in (0, 1))
    return {
        "transport": pair.transport_name, "gb": gb, "gb_per_s": gb / (stage_s + load_s),
        "stage_s": stage_s, "load_s": load_s, "spread_s": float(np.ptp(np.sum(rounds, axis=1))), "rounds": len(rounds),
        "gap_mean": float(gap.mean()), "gap_max": float(gap.max()), "gap_tokens": len(gap), **peak_memory(setup.device),
    }  # fmt: skip


def _publish(pair: Pair, version: int, device: str) -> tuple[float, float]:
    pair.perturb()
    stage_s, staged = timed(lambda: pair.transport.stage(version, pair.policy.sent_parameters()), device)
    pair.transport.announce(staged)
    load_s, _ = timed(lambda: pair.run(pair.proxy.update(version, staged.messages)), device)
    return stage_s, load_s


# The trainer


def trainer(setup: Setup) -> dict:
    """Training steps on synthetic sequences, without an engine: tokens/s, and the share of the matmul rate."""
    lengths = [32, 48, 64, 16] if setup.size == "tiny" else [512] * 64
    config, shape = setup.config(algo="tis", max_prompt_tokens=256), read_shape(setup.model_path)
    rate = matmul_rate(setup.device)
    sequences = synthetic(lengths, shape.vocab_size)
    with one_rank(setup.device):
        policy = load_policy(config, setup.model_path, torch.device(setup.device))
        share = distribute([sequences], 1, config.max_tokens_per_microbatch)[0]
        steps = [timed(lambda: policy.train_step(share, policy_version=0), setup.device)[0] for _ in range(TRAIN_STEPS)]
        attention = policy.module.attention
    flops = training_flops(shape, lengths, sum(sequence.num_trained for sequence in sequences))
    return {"attention": attention, **throughput(sum(lengths), flops, steps[1:], rate), **peak_memory(setup.device)}


def matmul_rate(device: str) -> float:
    """FLOP/s of a large square matmul in the dtype that the trainer computes in: what there is to be had."""
    n, dtype = 8192 if device == "cuda" else 512, getattr(torch, Config().dtype_on(device))
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    for _ in range(3):
        a @ b
    seconds, _ = timed(lambda: [a @ b for _ in range(30)], device)
    return 2 * n**3 * 30 / seconds


def training_flops(shape: ModelShape, lengths: list[int], num_trained: int) -> float:
    """FLOPs of a forward and backward pass over sequences of these lengths; `num_trained` tokens meet the head.

    Six per weight and token (two forward, four backward), the embedding left out as it is looked up; and in attention
    six times queries' width × length² per layer: half of a square, as it is causal, for scores and for values. What is
    computed twice counts once.
    """
    in_layers = shape.layer_parameters * shape.num_layers * sum(lengths)
    in_head = shape.vocab_size * shape.hidden_size * num_trained
    in_attention = shape.num_layers * shape.num_attention_heads * shape.head_dim * sum(t * t for t in lengths)
    return 6.0 * (in_layers + in_head + in_attention)


def throughput(num_tokens: int, flops: float, steps_s: list[float], matmul_flops_per_s: float) -> dict[str, float]:
    """Tokens/s of the median step, its FLOP/s, and that over the matmul rate (MFU)."""
    seconds = statistics.median(steps_s)
    return {
        "step_s": seconds, "spread_s": float(np.ptp(steps_s)), "steps": len(steps_s),
        "tokens_per_s": num_tokens / seconds, "tflops": flops / seconds / 1e12,
        "matmul_tflops": matmul_flops_per_s / 1e12, "mfu": flops / seconds / matmul_flops_per_s,
    }  # fmt: skip


def synthetic(lengths: list[int], vocabulary: int) -> list[TrainSequence]:
    """Random sequences with a prompt of a quarter of their length, and log-probs that are about a random model's."""
    rng, logprob = np.random.default_rng(0), -math.log(vocabulary)
    return [made_up(rng.integers(0, vocabulary, n), n // 4, i, logprob) for i, n in enumerate(lengths)]


# Rollout


def rollout(setup: Setup) -> dict:
    """A real worker and controller, synchronous, without a trainer: generated tokens/s."""
    config = setup.config(async_ratio=0.0)
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-")) / "rollout"
    with running(Rig(config, run_worker, folder, setup.device)) as rig:
        timed_steps = [timed(rig.step, "cpu") for _ in range(ROLLOUT_STEPS)]
    return _rates([(seconds, sum(group.num_generated for group in groups)) for seconds, groups in timed_steps])


def _rates(steps: list[tuple[float, int]]) -> dict:
    """Tokens/s of steps of (seconds, tokens), the first of which warms up."""
    rates = [tokens / seconds for seconds, tokens in steps[1:]]
    found = {"tokens_per_s": statistics.median(rates), "spread": float(np.ptp(rates))}
    return {**found, "steps": len(rates), "tokens": steps[1][1]}


def bare(setup: Setup) -> dict:
    """vLLM alone: LLM.generate of as many responses to the same prompts, without log-probs. Tokens/s."""
    config = setup.config(async_ratio=0.0)
    options = engine_options(enter_worker(config, setup.device))
    from vllm import LLM, SamplingParams  # it reads the environment

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
    return _rates(steps)


# Whole jobs


def job(setup: Setup, async_ratio: float, colocate: str = "share") -> dict:
    """A run of train_async.py: seconds per step, after the first ones, and what else it logs."""
    config = setup.config(async_ratio=async_ratio, colocate=colocate)
    config = replace(config, groups_per_step=min(JOB_GROUPS, config.groups_per_step))
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-job-"))
    names = ("model", "groups_per_step", "group_size", "max_response_tokens", "max_running_requests", "on_update",
             "async_ratio", "colocate", "env_timeout_s", "warmup")  # fmt: skip
    options = {name: getattr(config, name) for name in names}
    options |= {"steps": JOB_STEPS, "eval_every": 0, "runs_dir": folder, "run_name": "run"}
    options |= {"lr": 1e-3, "weight_decay": 50}  # no response earns anything; the decay moves the weights all the same
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "train_async.py", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)
    return job_numbers(read(folder / "run" / "metrics.jsonl"))


def job_numbers(metrics: list[dict]) -> dict:
    """Medians over the steps after the warm-up, and the worst of what must stay small."""
    logged = {"step_s": "time/step_s", "publish_s": "time/publish_s", "tokens_per_s": "rollout/tokens_per_s"}
    later = {found: [line[name] for line in metrics[JOB_WARM_UP:]] for found, name in logged.items()}
    found = {name: statistics.median(values) for name, values in later.items()}
    for worst, name in (("gap_mean", "mismatch/abs_mean"), ("peak_gib", "memory/peak_gib")):
        if values := [line[name] for line in metrics if name in line]:
            found[worst] = max(values)
    return found | {"spread_s": float(np.ptp(later["step_s"])), "steps": len(later["step_s"])}


def tests(_: Setup) -> dict:
    """The tests that need a GPU. Raises CalledProcessError if one fails."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "-m", "gpu"]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(result.stdout, flush=True)
    result.check_returncode()
    return {"summary": result.stdout.strip().splitlines()[-1].strip("= ")}


FUNCTIONS = {function.__name__: function for function in (sync, trainer, rollout, bare, tests)} | {
    "job-sync": functools.partial(job, async_ratio=0.0),
    "job-async": functools.partial(job, async_ratio=1.0),
    "job-sleep": functools.partial(job, async_ratio=0.0, colocate="sleep"),
}
"""What a part is called -> what it does."""
