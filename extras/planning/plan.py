"""Output of a plan for scripts/plan.py: options and commands of every machine, numbers, and a picture for people."""

import dataclasses
import math
import shlex
from collections import Counter
from collections.abc import Iterator

from asyncrl.config import OPTIONS, Config, words_of
from asyncrl.job.disk import checkpoint_bytes
from extras.planning.planner import Plan

RENDEZVOUS, LISTEN, JOIN = "HOST0:29500", "0.0.0.0:29600", "HOST0:29600"
"""Addresses. HOST0 is to be replaced by the name of the first machine that trains."""
DISK_BYTES_PER_S = 1e9
"""Assumed speed of writing a checkpoint."""
SHUTDOWN_S, SHUTDOWN_STEP_S = 30, 600
"""Seconds that torchrun gives ranks to end by default, and the unit of a longer limit."""
RUN_NAME = "plan"
WIDTH = 60


def planned_config(plan: Plan) -> Config:
    """Return the options of the trainer. Raises ValueError for options that exclude each other."""
    split = plan.split
    engines_beside = [(engine.tp, count) for site, engine, count in plan.engines if site.trains]
    joins = len(engines_beside) < len(plan.engines)
    workers = sum(count for _, count in engines_beside) // split.training.machines
    return dataclasses.replace(
        split.training.config(split.job),
        rollout_tp=engines_beside[0][0] if engines_beside else plan.engines[0][1].tp,
        listen=LISTEN if joins else None,
        num_rollout_workers=None if split.colocate else workers,
        colocate=split.colocate or "share",
        run_name=split.job.config.run_name or RUN_NAME,
    ).checked()


def options_of(config: Config) -> list[str]:
    """Return the words of the command line that make a config."""
    lengths = ("max_prompt_tokens", "max_response_tokens")  # the model decides about their defaults
    values = {name: option.value_in(config) for name, option in OPTIONS.items()}
    changed = {
        name: value
        for name, value in values.items()
        if name in lengths or value != OPTIONS[name].default
    }
    return words_of(changed)


def save_s(config: Config, num_parameters: int) -> float:
    """Return the approximate seconds that writing a checkpoint takes."""
    return sum(checkpoint_bytes(config, num_parameters, "cuda")) / DISK_BYTES_PER_S


def torchrun(machines: int, gpus: int, save_s: float) -> list[str]:
    """Return the words that start trainer ranks on each of some machines.

    A run that is stopped gets at least twice the time of a checkpoint, `save_s`. Otherwise it gets torchrun's own time.
    """
    words = [".venv/bin/torchrun", "--nproc-per-node", str(gpus)]
    if 2 * save_s > SHUTDOWN_S:
        words += [
            "--shutdown-timeout",
            str(SHUTDOWN_STEP_S * math.ceil(2 * save_s / SHUTDOWN_STEP_S)),
        ]
    if machines > 1:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", RENDEZVOUS, "--rdzv-id", "plan"]
        words += ["--nnodes", str(machines), *rendezvous]
    return [*words, "train_async.py"]


def commands(plan: Plan) -> list[dict[str, str]]:
    """Return the command of every machine. Machines with the same command are one entry."""
    training = plan.split.training
    config = planned_config(plan)
    seconds = save_s(config, plan.split.job.shape.num_parameters)
    start = torchrun(training.machines, training.gpus, seconds)
    trains = shlex.join([*start, *options_of(config)])
    shared = _visible(1, training.pool.gpus) if plan.split.colocate else ""
    lines = [(training.pool, training.machines, shared + trains)]
    for site, engine, count in plan.engines:
        if site.trains:
            continue
        join = f".venv/bin/python rollout.py --join {JOIN} --key swarm.key"
        if engine.tp != config.rollout_tp:
            join += f" --rollout-tp {engine.tp}"
        each = site.gpus // engine.tp
        for hosts, engines in ((count // each, each), (1, count % each)):
            if hosts and engines:
                lines.append((site.pool, hosts, _visible(engines * engine.tp, site.gpus) + join))
    return [
        {"machines": f"{count} × {pool.name}", "command": command} for pool, count, command in lines
    ]


def _visible(used: int, gpus: int) -> str:
    """Return the start of a command that hides the unused GPUs of a host."""
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(used)))} " if used < gpus else ""


def numbers(plan: Plan, planning_s: float) -> dict:
    """Return the plan as numbers and commands."""
    split = plan.split
    tokens_per_s, per_s = split.job.tokens / plan.step_s, plan.cost_per_hour / 3600
    transports = sorted({"nccl" if site.trains else "pull" for site, _, _ in plan.engines})
    rollout: Counter[str] = Counter()
    for pool, num_gpus in plan.sampling_gpus:
        rollout[pool.gpu] += num_gpus
    return {
        "train": {split.training.pool.gpu: split.training.ranks}, "rollout": rollout,
        "step_s": plan.step_s, "most_step_s": plan.most_step_s, "generation_s": plan.generation_s,
        "training_s": split.training_s, "update_s": plan.update_s, "tokens_per_s": tokens_per_s,
        "transport": "ipc" if split.colocate else " and ".join(transports),
        "max_staleness": split.job.config.max_staleness,
        "cost_per_hour": plan.cost_per_hour, "cost_per_step": per_s * plan.step_s,
        "cost_per_million_tokens": per_s / tokens_per_s * 1e6, "planning_s": planning_s, "commands": commands(plan),
    }  # fmt: skip


def picture(plan: Plan, summary: dict) -> Iterator[str]:
    """Yield the lines of the plan for people."""
    split, step_s = plan.split, plan.step_s
    t = split.training
    saved = f", --save-memory {' '.join(t.save_memory)}" if t.save_memory else ""
    yield f"train    {t.machines} × {t.gpus} {t.pool.name}: {t.ranks // t.shards} × {t.shards} shards{saved}"
    for _, e, count in plan.engines:
        share = e.rate * count / plan.rate
        yield (
            f"sample   {count} × {e.tp} {e.pool.name}: {e.requests:.0f} requests at a time, {e.rate:.0f} tokens/s each"
            f"; {share:.0%} of the work, {share * split.job.responses:.0f} responses a step"
        )
    for name, update_s, seconds in (
        ("train", 0.0, split.training_s),
        ("sample", plan.update_s, plan.generation_s),
    ):
        bar = "░" * round(WIDTH * update_s / step_s) + "█" * round(WIDTH * seconds / step_s)
        waits = f"waits {max(0.0, 1 - (update_s + seconds) / step_s):.0%}"
        yield f"  {name:7}|{bar:{WIDTH}}| {seconds:.1f} s, {waits}"
    yield f"  ░ weights by {summary['transport']}: {plan.update_s:.1f} s"
    yield f"step     {step_s:.1f} s about, {plan.most_step_s:.1f} at most; {summary['tokens_per_s']:.0f} tokens/s"
    yield f"stale    {split.job.config.async_ratio:g} steps if all places are taken, {summary['max_staleness']} at most"
    costs = [summary[f"cost_per_{what}"] for what in ("hour", "step", "million_tokens")]
    yield "cost     {:.2f} an hour, {:.3g} a step, {:.3g} per million trained tokens".format(*costs)


def why_worse(plan: Plan, best: Plan) -> str:
    """Return why another plan comes after the best one."""
    split = plan.split
    t, why = split.training, f"training takes {split.training_s:.1f} s"
    if split.training_s < plan.generation_s + plan.update_s:
        why = f"sampling takes {plan.generation_s:.1f} s and weights {plan.update_s:.1f} s"
    who = f"{t.machines} × {t.gpus} {t.pool.name} train"
    if split.colocate:
        who += " and sample"
    times = f"{plan.step_s:.1f} s a step ({plan.step_s / best.step_s:.2f}×)"
    return f"{who}: {times}, {plan.cost_per_hour:.2f} an hour; {why}"
