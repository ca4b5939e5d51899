"""Dry run: placement, memory and predicted step of a run on GPUs that need not be here.

Placement and memory are planned as in a run, and the step is predicted by the planner (extras/planning/README.md).
Nothing is started, and the model's config.json is enough.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import replace

from huggingface_hub import constants

from asyncrl.cluster.cluster import check_shares
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.placement import Placement, available_cores, place
from asyncrl.config import Config, nearest
from asyncrl.job.disk import (
    checkpoint_bytes,
    format_bytes,
    free_bytes,
    max_bytes_on_disk,
    num_checkpoints,
)
from asyncrl.trainer.optimizer import choose_lr
from asyncrl.weights.models import (
    MADE_HERE,
    cached_folder,
    has_tokenizer,
    load_tokenizer,
    resolve_model,
)
from asyncrl.weights.stop_tokens import describe_stop_tokens
from extras.planning import planner
from extras.planning.fit import first_that_fits, plan_memory
from extras.planning.memory import Sharing, ways_to_fit
from extras.planning.plan import DISK_BYTES_PER_S, SHUTDOWN_S, options_of, save_s, torchrun
from extras.planning.planner import Cluster, Job, Lengths, Plan, Pool
from extras.planning.shape import ModelShape, read_shape

BETWEEN_MACHINES, WORTH_A_CHANGE = 25.0, 1.1
"""Assumed GB/s one way between machines (InfiniBand of 200 Gbit/s), and the least gain of a recommended split."""

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model on the hub that describe its tokens."""


def dry_run(given: Config, gpus: str | None) -> Iterator[str]:
    """Yield lines on a run on `gpus`, for example 8xH100 or 2x8xH100, by default on the GPUs of this machine.

    Each machine has as many trainer ranks as torchrun's --nproc-per-node, or the best number. Raises ValueError, in one
    line, for unknown GPUs, and for a model that does not fit.
    """
    pool = read_pool(gpus)
    is_made_here = given.model in MADE_HERE
    shape = read_shape(resolve_model(given.model, given.task) if is_made_here else given.model)
    lengths = Lengths.lognormal(given.max_prompt_tokens, given.max_response_tokens / 4, 0.8, given)
    job = Job(given, shape, lengths)
    cluster = Cluster((pool,), BETWEEN_MACHINES, BETWEEN_MACHINES)
    best = planner.plan(job, cluster)[0]
    per_machine = int(
        os.environ.get("LOCAL_WORLD_SIZE", best.split.training.gpus if pool.count == 1 else 0)
    )
    if not per_machine:
        raise ValueError(
            f"--gpus {gpus}: for several machines use torchrun --nproc-per-node N, or scripts/plan.py"
        )
    config, placement, arithmetic = _fit(given, pool, shape, per_machine)
    yield f"dry run on {pool.count} × {pool.gpus} {pool.name}: nothing is started"
    yield f"{placement.table()}\n{arithmetic}"
    tokens = config.max_tokens_per_microbatch
    saved = f"nothing to save: fits with micro-batches of {tokens} tokens"
    if config.save_memory:
        saved = (
            f"so: --save-memory {' '.join(config.save_memory)} --max-tokens-per-microbatch {tokens}"
        )
    yield f"{saved}, weights by {placement.transport}"
    yield choose_lr(config, shape.num_parameters)[1]
    yield _describe_ends(given)
    yield config.freshness()
    yield from _describe_disk(config, shape.num_parameters)
    if placement.workers:
        now = planner.of_placement(replace(job, config=config), cluster, placement)
        yield from _describe_step(now, best, pool, job)
    start = torchrun(pool.count, per_machine, save_s(config, shape.num_parameters))
    words = shlex.join([*start, *options_of(given)])
    yield f"to start it, without --dry-run: {words}"


def _fit(
    given: Config, pool: Pool, shape: ModelShape, per_machine: int
) -> tuple[Config, Placement, str]:
    """Return the options and the placement of a machine of a pool that fit its memory, and the arithmetic."""
    placed = place(given, pool.gpus, available_cores(), per_machine)
    ways, num_ranks = ways_to_fit(given), per_machine * pool.count
    check_shares(given, pool.count, num_ranks)
    sharing = Sharing(num_ranks, num_ranks // given.replicas)
    fits = (placed, shape, [pool.device] * pool.gpus, sharing)
    config = ways[first_that_fits(ways, *fits)]
    return config, *plan_memory(config, *fits)


def _describe_ends(config: Config) -> str:
    """Return a line on the tokens that end a response, by small files of the model. The hub's cache is not changed.

    Raises ValueError if no token does.
    """
    from huggingface_hub import snapshot_download

    unknown = "where a response ends is not known, as no tokenizer of --model is here"
    with tempfile.TemporaryDirectory() as cache:
        folder = config.model
        if folder in MADE_HERE:
            folder = resolve_model(folder, config.task)
        elif not os.path.isdir(folder):
            options = {"cache_dir": cache, "allow_patterns": SMALL_FILES, "etag_timeout": 10}
            try:
                folder = snapshot_download(folder, **options)
            except OSError as error:  # all errors of the hub are of this class
                reason = str(error).strip().split("\n")[0]
                return f"{unknown}: {reason}"
        if not has_tokenizer(folder):
            return unknown
        return describe_stop_tokens(folder, load_tokenizer(folder))


def _describe_disk(config: Config, num_parameters: int) -> Iterator[str]:
    """Yield lines on the bytes of the run's checkpoints, and of a model that must be downloaded."""
    sizes = checkpoint_bytes(config, num_parameters, "cuda")
    num_saved = num_checkpoints(config)
    yield (
        f"disk: checkpoints of {format_bytes(sum(sizes))}, {num_saved} in all; at most "
        f"{format_bytes(max_bytes_on_disk(config, num_saved, sizes))} at a time; "
        f"{format_bytes(free_bytes(config.runs_dir))} are free in {config.runs_dir} on this machine"
    )
    seconds = save_s(config, num_parameters)
    if 2 * seconds > SHUTDOWN_S:
        yield (
            f"save: about {seconds:.0f} s at {format_bytes(DISK_BYTES_PER_S)}/s, which is assumed; torchrun kills a "
            f"stopped run after {SHUTDOWN_S} s unless it has a longer --shutdown-timeout"
        )
    if config.model in MADE_HERE or os.path.isdir(config.model):
        return
    try:
        cached_folder(config.model)
    except ValueError:
        yield (
            f"download: about {format_bytes(2 * num_parameters)} of --model to {constants.HF_HUB_CACHE}; "
            f"{format_bytes(free_bytes(constants.HF_HUB_CACHE))} are free there on this machine"
        )


def _describe_step(now: Plan, best: Plan, pool: Pool, job: Job) -> Iterator[str]:
    """Yield lines on the time of steps as placed `now`, and on the `best` plan if it is much faster."""
    split = now.split
    alpha = split.alpha
    lengths = job.lengths
    yield (
        f"step: about {now.step_s:.1f} s; training {split.training_s:.1f}, sampling {now.generation_s:.1f}, weights "
        f"{now.update_s:.2g} s, {'one after the other' if alpha == 0 else f'which overlap at α = {alpha:g}'}"
    )
    num_steps = job.config.steps
    yield f"{num_steps} steps: about {num_steps * now.step_s / 3600:.2g} hours, without evaluations and checkpoints"
    yield (
        f"predicted with mfu {planner.reached_mfu(split.job, split.training):.2g}, {pool.hbm_efficiency:.0%} of "
        f"memory's bandwidth, prompts of {lengths.prompt:.0f} tokens and responses of {lengths.response:.0f} on "
        "average; nothing was measured"
    )
    if now.step_s > WORTH_A_CHANGE * best.step_s and pool.count == 1:
        to_sample = " + ".join(f"{count} engines of {e.tp} GPUs" for _, e, count in best.engines)
        yield f"faster: --nproc-per-node {best.split.training.gpus} and {to_sample}: about {best.step_s:.1f} s"


def read_pool(text: str | None) -> Pool:
    """Return the machines of a text such as 8xH100 or 2x8xH100, or this one. Raises ValueError for unknown GPUs."""
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
