"""What a run would do on GPUs that are not here: it is placed and its memory planned as a run's, its step predicted by
the planner's arithmetic (extras/planning/README.md). Nothing is started, and of the model its config.json is enough."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.placement import available_cores, place
from asyncrl.config import Config, nearest
from asyncrl.weights.models import MADE_HERE, resolve_model
from extras.planning import planner
from extras.planning.fit import first_that_fits, plan_memory
from extras.planning.memory import Sharing, ways_to_fit
from extras.planning.planner import Cluster, Job, Lengths, Plan, Pool
from extras.planning.shape import read_shape

BETWEEN_MACHINES, WORTH_A_CHANGE = 25.0, 1.1
"""GB/s one way that a link between machines is taken for, InfiniBand of 200 Gbit/s; and by which factor a split of the
GPUs must be predicted to be faster to be recommended."""


def dry_run(config: Config, gpus: str | None) -> Iterator[str]:
    """Lines that say what the run would do on `gpus`, as in 8xH100 or 2x8xH100, or on those of this machine, with
    torchrun's --nproc-per-node, or the best number, of trainer ranks on each machine.

    Raises ValueError, in one line, for GPUs that are not known, and for a model that does not fit.
    """
    pool = read_pool(gpus)
    shape = read_shape(
        resolve_model(config.model, config.task) if config.model in MADE_HERE else config.model
    )
    job = Job(
        config,
        shape,
        Lengths.lognormal(config.max_prompt_tokens, config.max_response_tokens / 4, 0.8, config),
    )
    cluster = Cluster((pool,), BETWEEN_MACHINES, BETWEEN_MACHINES)
    best = planner.plan(job, cluster)[0]
    per_machine = int(
        os.environ.get("LOCAL_WORLD_SIZE", best.split.training.gpus if pool.count == 1 else 0)
    )
    if not per_machine:
        raise ValueError(
            f"--gpus {gpus}: for several machines use torchrun --nproc-per-node N, or scripts/plan.py"
        )
    placed = place(config, pool.gpus, available_cores(), per_machine)
    ways, num_ranks = ways_to_fit(config), per_machine * pool.count
    check_shares(config, pool.count, num_ranks)
    fits = (
        placed,
        shape,
        [pool.device] * pool.gpus,
        Sharing(num_ranks, num_ranks // config.replicas),
    )
    config = ways[first_that_fits(ways, *fits)]
    placement, arithmetic = plan_memory(config, *fits)
    yield f"dry run on {pool.count} × {pool.gpus} {pool.name}: nothing is started"
    yield f"{placement.table()}\n{arithmetic}"
    saved = " ".join(["--save-memory", *config.save_memory, "--max-tokens-per-microbatch"])
    yield f"so: {saved} {config.max_tokens_per_microbatch}, weights by {placement.transport}"
    if not placement.workers:
        return
    now = planner.of_placement(replace(job, config=config), cluster, placement)
    yield from _describe_step(now, best, pool, job.lengths)


def _describe_step(now: Plan, best: Plan, pool: Pool, lengths: Lengths) -> Iterator[str]:
    """Lines that say how long a step takes as placed `now`, and how the `best` plan differs if it is much faster."""
    split = now.split
    alpha = split.alpha
    yield (
        f"step: about {now.step_s:.1f} s; training {split.training_s:.1f}, sampling {now.generation_s:.1f}, weights "
        f"{split.update_s:.1f} s, {'one after the other' if alpha == 0 else f'which overlap at α = {alpha:g}'}"
    )
    yield (
        f"predicted with mfu {pool.mfu:g}, {pool.hbm_efficiency:.0%} of memory's bandwidth, prompts of "
        f"{lengths.prompt:.0f} tokens and responses of {lengths.response:.0f} on average; nothing was measured"
    )
    if now.step_s > WORTH_A_CHANGE * best.step_s and pool.count == 1:
        to_sample = " + ".join(f"{count} engines of {e.tp} GPUs" for _, e, count in best.engines)
        yield f"faster: --nproc-per-node {best.split.training.gpus} and {to_sample}: about {best.step_s:.1f} s"


def read_pool(text: str | None) -> Pool:
    """The machines that a text such as 8xH100 or 2x8xH100 means, or this one. Raises ValueError if none are known."""
    sheets = planner.read_sheets()
    if text is None:
        kinds = [
            gpu
            for visible in visible_gpus()
            for gpu, sheet in sheets.items()
            if sheet["called"] == visible.name
        ]
        if not kinds:
            raise ValueError(
                "--dry-run: no GPU is here whose data sheet is known; give --gpus, as in 8xH100"
            )
        text = f"{len(kinds)}x{kinds[0]}"
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text)
    if not match or "0" in match.groups():
        raise ValueError(
            f"--gpus {text}: give NUMBERxKIND or MACHINESxNUMBERxKIND, as in 8xH100 or 2x8xH100"
        )
    machines, gpus, kind = match.groups()
    name = next((name for name in sheets if name == kind or name.startswith(f"{kind} ")), None)
    if name is None:
        raise ValueError(
            f"--gpus {text}: {kind!r} is none of {', '.join(sheets)}{nearest(kind, sheets)}"
        )
    return Pool(name, name, int(machines or 1), int(gpus), 0.0, **sheets[name])
