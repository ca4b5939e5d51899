"""What a plan says: the options and commands of every machine, numbers, and a picture for people.

scripts/plan.py prints it.
"""

import dataclasses
import shlex
from collections.abc import Iterator

from asyncrl.config import OPTIONS, Config, switch
from extras.planning.planner import Plan, Pool

RENDEZVOUS, LISTEN, JOIN = "HOST0:29500", "0.0.0.0:29600", "HOST0:29600"
"""HOST0: a name of the first machine that trains, to be filled in."""
RUN_NAME = "plan"
WIDTH = 60


def kinds(parts: list[tuple[Pool, int]]) -> dict[str, int]:
    """GPUs by kind."""
    return {
        gpu: sum(n for pool, n in parts if pool.gpu == gpu)
        for gpu in dict.fromkeys(p.gpu for p, _ in parts)
    }


def planned_config(plan: Plan) -> Config:
    """The options with which the trainer runs. Raises ValueError for what does not go together."""
    joins = any(not site.trains for site, _, _ in plan.engines)
    here = sum(count for site, _, count in plan.engines if site.trains) // plan.training.machines
    tp = next((engine.tp for site, engine, _ in plan.engines if site.trains), plan.engines[0][1].tp)
    chosen = {"rollout_tp": tp, "listen": LISTEN if joins else None, "num_rollout_workers": here}
    chosen |= (
        {"colocate": plan.colocate, "num_rollout_workers": None}
        if plan.colocate
        else {"colocate": "share"}
    )
    chosen["run_name"] = plan.job.config.run_name or RUN_NAME
    return dataclasses.replace(plan.training.config(plan.job), **chosen).checked()


def options_of(config: Config) -> list[str]:
    """The options that make a config, as the command line has them."""
    words = []
    for option in OPTIONS.values():
        value = option.value_in(config)
        # The model decides about these lengths.
        if value != option.default or option.name in (
            "max_prompt_tokens",
            "max_response_tokens",
        ):
            words.append(switch(option.name, value) if isinstance(value, bool) else option.flag)
            words += (
                value
                if isinstance(value, tuple)
                else []
                if isinstance(value, bool)
                else [str(value)]
            )
    return words


def commands(plan: Plan) -> list[dict[str, str]]:
    """The command of every machine, those that have the same together."""
    t, config = plan.training, planned_config(plan)
    torchrun = ["torchrun", "--nproc-per-node", str(t.gpus)]
    if t.machines > 1:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", RENDEZVOUS, "--rdzv-id", "plan"]
        torchrun += ["--nnodes", str(t.machines), *rendezvous]
    visible = "CUDA_VISIBLE_DEVICES=0 " * (plan.colocate is not None and t.pool.gpus > 1)
    lines = [
        (
            t.pool,
            t.machines,
            visible + shlex.join([*torchrun, "train_async.py", *options_of(config)]),
        )
    ]
    for site, engine, count in plan.engines:
        if site.trains:
            continue
        each, own = (
            site.gpus // engine.tp,
            f" --rollout-tp {engine.tp}" * (engine.tp != config.rollout_tp),
        )
        for machines, gpus in ((count // each, each * engine.tp), (1, count % each * engine.tp)):
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(gpus)))} " * (
                gpus < site.gpus
            )
            if machines and gpus:
                lines.append(
                    (
                        site.pool,
                        machines,
                        f"{visible}python rollout.py --join {JOIN} --key swarm.key{own}",
                    )
                )
    return [
        {"machines": f"{count} × {pool.name}", "command": command} for pool, count, command in lines
    ]


def numbers(plan: Plan, planning_s: float) -> dict:
    """The plan for machines."""
    tokens_per_s, per_s = plan.job.tokens / plan.step_s, plan.cost_per_hour / 3600
    ways = sorted({"nccl" if site.trains else "pull" for site, _, _ in plan.engines})
    return {
        "train": kinds([(plan.training.pool, plan.training.ranks)]), "rollout": kinds(plan.sampling_gpus),
        "step_s": plan.step_s, "most_step_s": plan.most_step_s, "generation_s": plan.generation_s,
        "training_s": plan.training_s, "update_s": plan.update_s, "tokens_per_s": tokens_per_s,
        "transport": "ipc" if plan.colocate else " and ".join(ways), "max_staleness": plan.job.config.max_staleness,
        "cost_per_hour": plan.cost_per_hour, "cost_per_step": per_s * plan.step_s,
        "cost_per_million_tokens": per_s / tokens_per_s * 1e6, "planning_s": planning_s, "commands": commands(plan),
    }  # fmt: skip


def picture(plan: Plan, found: dict) -> Iterator[str]:
    """The plan for people."""
    t, step_s = plan.training, plan.step_s
    saved = f", --save-memory {' '.join(t.save_memory)}" if t.save_memory else ""
    yield f"train    {t.machines} × {t.gpus} {t.pool.name}: {t.ranks // t.shards} × {t.shards} shards{saved}"
    for _, e, count in plan.engines:
        share = e.rate * count / plan.rate
        yield (
            f"sample   {count} × {e.tp} {e.pool.name}: {e.requests:.0f} requests at a time, {e.rate:.0f} tokens/s each"
            f"; {share:.0%} of the work, {share * plan.job.responses:.0f} responses a step"
        )
    for name, update_s, seconds in (
        ("train", 0.0, plan.training_s),
        ("sample", plan.update_s, plan.generation_s),
    ):
        bar = "░" * round(WIDTH * update_s / step_s) + "█" * round(WIDTH * seconds / step_s)
        waits = f"waits {max(0.0, 1 - (update_s + seconds) / step_s):.0%}"
        yield f"  {name:7}|{bar:{WIDTH}}| {seconds:.1f} s, {waits}"
    yield f"  ░ weights by {found['transport']}: {plan.update_s:.1f} s"
    yield f"step     {step_s:.1f} s about, {plan.most_step_s:.1f} at most; {found['tokens_per_s']:.0f} tokens/s"
    yield f"stale    {plan.job.config.async_ratio:g} steps if all places are taken, {found['max_staleness']} at most"
    costs = [found[f"cost_per_{what}"] for what in ("hour", "step", "million_tokens")]
    yield "cost     {:.2f} an hour, {:.3g} a step, {:.3g} per million trained tokens".format(*costs)


def why_worse(plan: Plan, best: Plan) -> str:
    """Why another plan comes after the best."""
    t, why = plan.training, f"training takes {plan.training_s:.1f} s"
    if plan.training_s < plan.generation_s + plan.update_s:
        why = f"sampling takes {plan.generation_s:.1f} s and weights {plan.update_s:.1f} s"
    who = (
        f"{t.machines} × {t.gpus} {t.pool.name} train{' and sample' * (plan.colocate is not None)}"
    )
    times = f"{plan.step_s:.1f} s a step ({plan.step_s / best.step_s:.2f}×)"
    return f"{who}: {times}, {plan.cost_per_hour:.2f} an hour; {why}"
