"""What to run on which of unequal GPUs: `python scripts/plan.py CLUSTER.toml --model NAME_OR_FOLDER`.

    python scripts/plan.py extras/planning/clusters/hex_24_h20_8_h800.toml \
        --model Qwen/Qwen3-8B-Base --groups-per-step 64 \
        --max-prompt-tokens 512 --max-response-tokens 8192 --lengths lognormal:2000,0.9

Options of train_async.py go into the plan and the commands. CLUSTER.toml lists [[machines]] with `gpu` (a name in
extras/planning/gpu_sheets.toml), the `gpus` of each, `count` of them and `price_per_hour` of a GPU; any number of the
sheet may be overridden. What a bench has measured for the job, `trained_tokens_per_s` and `sampled_tokens_per_s` of a
GPU, takes the place of the sheet's `mfu` and `hbm_efficiency`; --workload takes both of a run. [links] has `same_kind`
and `across_kinds` in GB/s, and `update_factor`. extras/planning/README.md explains the arithmetic.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

from asyncrl.job.command_line import read_options
from extras.planning import planner
from extras.planning.plan import RUN_NAME, numbers, picture, why_worse
from extras.planning.plan_inputs import lengths_of, read_cluster, read_lengths, with_rates
from extras.planning.planner import Job, Plan
from extras.planning.shape import read_shape
from scripts.runs import load


def read_arguments(args: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own options, and those of train_async.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("cluster", type=Path, help="cluster.toml: machines and links")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", metavar="runs/NAME", help="take lengths and rates from a run")
    source.add_argument(
        "--lengths",
        metavar="lognormal:MEDIAN,SIGMA",
        help="of responses, cut at the longest allowed",
    )
    parser.add_argument(
        "--prompt-tokens", type=float, help="mean length of prompts; default: the longest allowed"
    )
    parser.add_argument(
        "--tokens-per-s",
        type=float,
        help="the cheapest plan with this rate, instead of the fastest",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_known_args(args)


def main(args: list[str] | None = None) -> None:
    """Read the command line and print the plan."""
    given, options = read_arguments(args)
    try:
        config = read_options(options).checked()
        for name in ("prompt_tokens", "tokens_per_s"):
            if (value := getattr(given, name)) is not None and not 0 < value < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {value}")
        if config.model == "tiny":
            raise ValueError(
                "--model is missing: a name on the hub, or a folder with at least a config.json"
            )
        cluster, notes = read_cluster(given.cluster)
        if (given.prompt_tokens or 0) > config.max_prompt_tokens:
            raise ValueError(
                f"--prompt-tokens {given.prompt_tokens:g} is above --max-prompt-tokens"
            )
        lengths = read_lengths(given.lengths, config, given.prompt_tokens)
        if given.workload:
            run = load(given.workload)
            lengths, (cluster, note) = (
                lengths_of(run, config, given.prompt_tokens),
                with_rates(cluster, run),
            )
            notes.append(note)
        job, start = Job(config, read_shape(config.model), lengths), time.perf_counter()
        best, *others = planner.plan(job, cluster, given.tokens_per_s)
        found = numbers(best, time.perf_counter() - start)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
    if given.json:
        print(
            json.dumps(
                found | {"notes": notes, "next": [why_worse(other, best) for other in others]},
                indent=1,
            )
        )
    else:
        print_plan(best, others, found, notes)


def print_plan(best: Plan, others: list[Plan], found: dict, notes: list[str]) -> None:
    """Print the best plan, why each of the others is worse, and the commands that start it."""
    print(*(f"note: {note}" for note in notes), *picture(best, found), sep="\n")
    print(
        "next     " + "\n         ".join(why_worse(other, best) for other in others)
        if others
        else "no other plan"
    )
    for line in found["commands"]:
        key = f"; swarm.key is HOST0's runs/{RUN_NAME}/swarm.key (extras/swarm/README.md)" * (
            "--key" in line["command"]
        )
        print(f"\n# {line['machines']}{key}\n{line['command']}")
    print(f"\nplanned in {found['planning_s']:.2f} s")


if __name__ == "__main__":
    main()
