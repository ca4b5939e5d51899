"""What to run on which of unequal GPUs: `python extras/planning/plan.py CLUSTER.toml --model NAME_OR_FOLDER`.

    python extras/planning/plan.py extras/planning/clusters/hex_24_h20_8_h800.toml \
        --model Qwen/Qwen3-8B-Base --groups-per-step 64 \
        --max-prompt-tokens 512 --max-response-tokens 8192 --lengths lognormal:2000,0.9

Options of train_async.py go into the plan and the commands. CLUSTER.toml lists [[machines]] with `gpu` (a name in
extras/planning/gpu_sheets.toml), the `gpus` of each, `count` of them and `price_per_hour` of a GPU; any number of the
sheet may be overridden. What a bench has measured for the job, `trained_tokens_per_s` and `sampled_tokens_per_s` of a
GPU, takes the place of the sheet's `mfu` and `hbm_efficiency`; --workload takes both of a run. [links] has `same_kind`
and `across_kinds` in GB/s, and `update_factor`. extras/planning/README.md explains the arithmetic.
"""

import argparse
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config, flag
from asyncrl.job.command_line import read_options
from extras.planning import planner
from extras.planning.plan_inputs import lengths_of, read_cluster, read_lengths, with_rates
from extras.planning.planner import Job, Plan, Pool
from extras.planning.shape import read_shape
from scripts.runs import load

RENDEZVOUS, LISTEN, JOIN = "HOST0:29500", "0.0.0.0:29600", "HOST0:29600"
"""HOST0: a name of the first machine that trains, to be filled in."""
RUN_NAME = "plan"
WIDTH = 60


def kinds(parts: list[tuple[Pool, int]]) -> dict[str, int]:
    """GPUs by kind."""
    return {gpu: sum(n for pool, n in parts if pool.gpu == gpu) for gpu in dict.fromkeys(p.gpu for p, _ in parts)}


def planned_config(plan: Plan) -> Config:
    """The options with which the trainer runs. Raises ValueError for what does not go together."""
    joins = any(not site.trains for site, _, _ in plan.engines)
    here = sum(count for site, _, count in plan.engines if site.trains) // plan.training.machines
    tp = next((engine.tp for site, engine, _ in plan.engines if site.trains), plan.engines[0][1].tp)
    chosen = {"rollout_tp": tp, "listen": LISTEN if joins else None, "num_rollout_workers": here}
    chosen |= {"colocate": plan.colocate, "num_rollout_workers": None} if plan.colocate else {"colocate": "share"}
    chosen["run_name"] = plan.job.config.run_name or RUN_NAME
    return dataclasses.replace(plan.training.config(plan.job), **chosen).checked()


def options_of(config: Config) -> list[str]:
    """The options that make a config, as the command line has them."""
    words = []
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if value != field.default or field.name in ("max_prompt_tokens", "max_response_tokens"):  # which the model has
            is_off = isinstance(value, bool) and not value
            words.append(f"--{'no-' * is_off}{flag(field.name)}")
            words += value if isinstance(value, tuple) else [] if isinstance(value, bool) else [str(value)]
    return words


def commands(plan: Plan) -> list[dict[str, str]]:
    """The command of every machine, those that have the same together."""
    t, config = plan.training, planned_config(plan)
    torchrun = ["torchrun", "--nproc-per-node", str(t.gpus)]
    if t.machines > 1:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", RENDEZVOUS, "--rdzv-id", "plan"]
        torchrun += ["--nnodes", str(t.machines), *rendezvous]
    visible = "CUDA_VISIBLE_DEVICES=0 " * (plan.colocate is not None and t.pool.gpus > 1)
    lines = [(t.pool, t.machines, visible + shlex.join([*torchrun, "train_async.py", *options_of(config)]))]
    for site, engine, count in plan.engines:
        if site.trains:
            continue
        each, own = site.gpus // engine.tp, f" --rollout-tp {engine.tp}" * (engine.tp != config.rollout_tp)
        for machines, gpus in ((count // each, each * engine.tp), (1, count % each * engine.tp)):
            visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(gpus)))} " * (gpus < site.gpus)
            if machines and gpus:
                lines.append((site.pool, machines, f"{visible}python rollout.py --join {JOIN} --key swarm.key{own}"))
    return [{"machines": f"{count} × {pool.name}", "command": command} for pool, count, command in lines]


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
    for name, update_s, seconds in (("train", 0.0, plan.training_s), ("sample", plan.update_s, plan.generation_s)):
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
    who = f"{t.machines} × {t.gpus} {t.pool.name} train{' and sample' * (plan.colocate is not None)}"
    times = f"{plan.step_s:.1f} s a step ({plan.step_s / best.step_s:.2f}×)"
    return f"{who}: {times}, {plan.cost_per_hour:.2f} an hour; {why}"


def main(args: list[str] | None = None) -> None:
    """Read the command line and print the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("cluster", type=Path, help="cluster.toml: machines and links")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", metavar="runs/NAME", help="take lengths and rates from a run")
    source.add_argument("--lengths", metavar="lognormal:MEDIAN,SIGMA", help="of responses, cut at the longest allowed")
    parser.add_argument("--prompt-tokens", type=float, help="mean length of prompts; default: the longest allowed")
    parser.add_argument("--tokens-per-s", type=float, help="the cheapest plan with this rate, instead of the fastest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given, options = parser.parse_known_args(args)
    try:
        config = read_options(options).checked()
        for name in ("prompt_tokens", "tokens_per_s"):
            if (value := getattr(given, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if config.model == "tiny":
            raise ValueError("--model is missing: a name on the hub, or a folder with at least a config.json")
        cluster, notes = read_cluster(given.cluster)
        if (given.prompt_tokens or 0) > config.max_prompt_tokens:
            raise ValueError(f"--prompt-tokens {given.prompt_tokens:g} is above --max-prompt-tokens")
        lengths = read_lengths(given.lengths, config, given.prompt_tokens)
        if given.workload:
            run = load(given.workload)
            lengths, (cluster, note) = lengths_of(run, config, given.prompt_tokens), with_rates(cluster, run)
            notes.append(note)
        job, start = Job(config, read_shape(config.model), lengths), time.perf_counter()
        best, *others = planner.plan(job, cluster, given.tokens_per_s)
        found = numbers(best, time.perf_counter() - start)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
    if given.json:
        print(json.dumps(found | {"notes": notes, "next": [why_worse(other, best) for other in others]}, indent=1))
        return
    print(*(f"note: {note}" for note in notes), *picture(best, found), sep="\n")
    print("next     " + "\n         ".join(why_worse(other, best) for other in others) if others else "no other plan")
    for line in found["commands"]:
        key = f"; swarm.key is HOST0's runs/{RUN_NAME}/swarm.key (extras/swarm/README.md)" * (
            "--key" in line["command"]
        )
        print(f"\n# {line['machines']}{key}\n{line['command']}")
    print(f"\nplanned in {found['planning_s']:.2f} s")


if __name__ == "__main__":
    main()
