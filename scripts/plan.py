"""Plan a run on unequal GPUs: `python scripts/plan.py CLUSTER.toml --model NAME_OR_FOLDER`.

    python scripts/plan.py extras/planning/clusters/hex_24_h20_8_h800.toml \
        --model Qwen/Qwen3-8B-Base --groups-per-step 64 \
        --max-prompt-tokens 512 --max-response-tokens 8192 --lengths lognormal:2000,0.9

Options of train_async.py go into the plan and the commands. CLUSTER.toml lists [[machines]]: `gpu`, the `gpus` of each,
their `count`, and `price_per_hour` of a GPU. `gpu` is a name in extras/planning/gpu_sheets.toml. Any number of the
sheet can be overridden. Measured `trained_tokens_per_s` and `sampled_tokens_per_s` of a GPU replace the sheet's `mfu`
and `hbm_efficiency`. The option --workload takes both from a run. The table [links] has `same_kind` and `across_kinds`
in GB/s, and `update_factor`. The arithmetic is in extras/planning/README.md.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from asyncrl.cluster.streams import keep_printing
from asyncrl.config import flag_of, with_home_folder
from asyncrl.job.command_line import read_options
from extras.planning import planner
from extras.planning.plan import RUN_NAME, numbers, picture, why_worse
from extras.planning.plan_inputs import lengths_of, read_cluster, read_lengths, with_rates
from extras.planning.planner import Job, Plan
from extras.planning.shape import read_shape
from scripts.runs import load


@dataclass(frozen=True)
class Arguments:
    """The command line without the options of train_async.py."""

    cluster: tyro.conf.Positional[Path]
    """cluster.toml: machines and links."""
    workload: str | None = None
    """Take lengths and rates from a run."""
    lengths: str | None = None
    """lognormal:MEDIAN,SIGMA, the law of responses, cut at the longest allowed."""
    prompt_tokens: float | None = None
    """Mean length of prompts; unset, the longest allowed."""
    tokens_per_s: float | None = None
    """Find the cheapest plan with this rate, instead of the fastest."""
    json: bool = False
    """Print one JSON object."""


def main(args: list[str] | None = None) -> None:
    """Read the command line and print the plan."""
    keep_printing(BrokenPipeError)
    words = with_home_folder(sys.argv[1:] if args is None else args)
    given, options = tyro.cli(Arguments, description=__doc__, args=words, return_unknown_args=True)
    try:
        start = time.perf_counter()
        best, others, notes = plan(given, options)
        summary = numbers(best, time.perf_counter() - start)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {str(error).splitlines()[0]}")
    if given.json:
        summary |= {"notes": notes, "next": [why_worse(other, best) for other in others]}
        print(json.dumps(summary, indent=1))
    else:
        print_plan(best, others, summary, notes)


def plan(given: Arguments, options: list[str]) -> tuple[Plan, list[Plan], list[str]]:
    """Return the best plan, the other plans, and notes on the cluster. Raises ValueError if there is no plan."""
    config = read_options(options).checked()
    for name in ("prompt_tokens", "tokens_per_s"):
        if (value := getattr(given, name)) is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag_of(name)} must be above 0, got {value}")
    if given.workload and given.lengths:
        raise ValueError("--workload and --lengths both set the lengths of responses. Remove one.")
    if config.model == "tiny":
        raise ValueError(
            "--model is missing: a name on the hub, or a folder with at least a config.json"
        )
    cluster, notes = read_cluster(given.cluster)
    if (given.prompt_tokens or 0) > config.max_prompt_tokens:
        raise ValueError(f"--prompt-tokens {given.prompt_tokens:g} is above --max-prompt-tokens")
    lengths = read_lengths(given.lengths, config, given.prompt_tokens)
    if given.workload:
        run = load(given.workload)
        lengths = lengths_of(run, config, given.prompt_tokens)
        cluster, note = with_rates(cluster, run)
        notes.append(note)
    job = Job(config, read_shape(config.model), lengths)
    best, *others = planner.plan(job, cluster, given.tokens_per_s)
    return best, others, notes


def print_plan(best: Plan, others: list[Plan], summary: dict, notes: list[str]) -> None:
    """Print the best plan, why each other plan is worse, and the commands that start the best."""
    print(*(f"note: {note}" for note in notes), *picture(best, summary), sep="\n")
    reasons = "\n         ".join(why_worse(other, best) for other in others)
    print(f"next     {reasons}" if others else "no other plan")
    for line in summary["commands"]:
        print(f"\n# {line['machines']}")
        if "--key" in line["command"]:
            print(f"# swarm.key is HOST0's runs/{RUN_NAME}/swarm.key (extras/swarm/README.md)")
        print(line["command"])
    print(f"\nplanned in {summary['planning_s']:.2f} s")


if __name__ == "__main__":
    main()
