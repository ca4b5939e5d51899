"""Assembles a rank of a run and takes it down: process, cluster, device, model, records and rollout workers."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from setproctitle import setproctitle

from asyncrl import extras
from asyncrl.cluster.cluster import Cluster, check_shares, join
from asyncrl.cluster.cores import claim_cores
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.placement import Placement, available_cores, place
from asyncrl.cluster.processes import (
    Interrupted,
    end_by,
    end_if_stuck,
    exit_with_parent,
    ignore_signals,
    keep_freed_memory,
)
from asyncrl.cluster.stacks import dump_stacks, write_stacks_to
from asyncrl.cluster.streams import keep_printing
from asyncrl.cluster.watchdog import watch_for_stopped
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.workers import Workers
from asyncrl.job.disk import check_room, checkpoint_bytes
from asyncrl.job.host_memory import check_host_memory
from asyncrl.job.inputs import check_model, check_tokenizer, make_tickets, read_task, try_copies
from asyncrl.job.node import Follower, Leader, Rank
from asyncrl.job.resume import (
    check_is_unchanged,
    exit_if_finished,
    find_checkpoint,
    load_controller_state,
    resume_hint,
)
from asyncrl.plugins import last_given
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.advantage_choice import try_estimator
from asyncrl.trainer.loss_choice import choose_loss
from asyncrl.trainer.optimizer import choose_lr
from asyncrl.user_code import user_code_names
from asyncrl.weights.models import load_tokenizer, num_parameters, resolve_model
from asyncrl.weights.stop_tokens import describe_stop_tokens
from data.problem import Task


@contextmanager
def start_rank(config: Config, trains: bool = True) -> Iterator[Rank]:
    """Set up this rank, yield it, and take everything down, whatever happens.

    Raises ValueError for mistakes of the user, and RuntimeError if another node ends.
    """
    config.checked()
    # A mistake ends the run before anything is made.
    choose_loss(config)
    try_estimator(config)
    on_end = ExitStack()
    clock = TimeLedger()
    try:
        _prepare_process(config, on_end)
        cluster = join(config, "cuda" if visible_gpus() else "cpu")
        checkpoint = find_checkpoint(config, cluster)
        exit_if_finished(checkpoint, config, cluster)
        watch_class = extras.load("--nnodes").LeaderWatch if cluster.num_nodes > 1 else NodeWatch
        watch = watch_class(cluster, dump_stacks)
    except BaseException:  # also the exit of a finished run, with 0
        on_end.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    try:
        placement, device = _take_device(config, cluster)
        yield Rank(
            config, cluster, placement, device, clock, on_end, watch, checkpoint, trains=trains
        )
        watch.finish()
    except (Exception, SystemExit, Interrupted) as error:
        # The end of another node may be the cause, also of an exit by user code.
        ignore_signals()
        raise watch.explain(error) from error.__cause__
    finally:
        ignore_signals()
        if cluster.num_ranks > 1 and sys.exception() is not None:
            end_by(sys.exception(), on_end.close)
        on_end.close()
        dist.destroy_process_group()


@contextmanager
def start_node(bare_rank: Rank, worker_main: Callable) -> Iterator[Leader | Follower]:
    """Yield the rank as a leader or a follower, with its node's model; `bare_rank` takes everything down.

    A leader also has records and rollout workers.

    Workers run `worker_main(spec, connection)`, and start while the caller loads the policy. If a signal ends the run,
    its error tells how to continue.
    """
    cluster = bare_rank.cluster
    run_path = bare_rank.config.resume and Path(bare_rank.config.resume)
    try:
        if cluster.is_leader:
            # Mistakes in rows are reported before a model is fetched.
            task = read_task(bare_rank.config, cluster)
            model_path = resolve_model(bare_rank.config.model, bare_rank.config.task)
        cluster.wait_for_models()
        if cluster.is_leader:
            rank = lead(bare_rank, model_path, task, worker_main)
            run_path = run_path or rank.run.path
            stacks_path = rank.run.path / "stacks.txt"
            cluster.broadcast_on_node((rank.config, model_path, stacks_path))
        else:
            config, model_path, stacks_path = cluster.broadcast_on_node(None)
            write_stacks_to(stacks_path)
            rank = follow(bare_rank, config, model_path)
        rank.use_device()
        yield rank
        if cluster.is_first and bare_rank.trains:
            for plugin in rank.config.plugins:
                plugin.on_end(rank.run.path)
    except Interrupted as error:
        if cluster.is_first:
            error.args = (f"{error}; {resume_hint(run_path)}", *error.args[1:])
        raise


def follow(rank: Rank, config: Config, model_path: str) -> Follower:
    """Return a rank that trains with the options of its node's leader."""
    _, follower_class = _rank_classes(config)
    return follower_class(**rank.parts(config=config), model_path=model_path)


def lead(rank: Rank, model_path: str, task: Task, worker_main: Callable) -> Leader:
    """Return a leader whose rollout workers are starting; collective on leaders.

    The order matters: a mistake in options and data is reported before a worker starts. All mistakes but a missing file
    of copied user code are reported before anything is written.
    """
    cluster = rank.cluster
    config, lines = _fit_model(rank, model_path)
    _check_host(rank, config, num_parameters(model_path))
    config, placement = _fit_memory(rank, config, model_path)
    placement = claim_cores(placement, rank.on_end)
    _show(cluster, placement, model_path)
    check_model(config, model_path, rank.device.type)
    check_tokenizer(config, model_path)
    tickets = make_tickets(config, cluster, model_path, task)
    controller_state = None
    if rank.checkpoint:
        check_is_unchanged(rank.checkpoint, model_path, config, tickets.prompts.digest)
        controller_state = load_controller_state(rank.checkpoint, cluster)
    run = open_records(rank, config)
    config = run.config
    for line in lines:
        if cluster.is_first and line.startswith("warning: "):
            run.record_event("warning", text=line.removeprefix("warning: "))
    if not rank.checkpoint:
        try_copies(config)
    write_stacks_to(run.path / "stacks.txt")
    workers_class = last_given((plugin.workers for plugin in config.plugins), Workers)
    workers = workers_class(config, placement, model_path, run.path, worker_main)
    controller_class = last_given((plugin.controller for plugin in config.plugins), Controller)
    controller = controller_class(
        config, workers, tickets, run.record_event, rank.clock, cluster.num_nodes, controller_state
    )
    leader_class, _ = _rank_classes(config)
    leader = leader_class(
        **rank.parts(config=config, placement=placement),
        model_path=model_path,
        run=run,
        tokenizer=load_tokenizer(model_path),
        controller=controller,
        controller_state=controller_state,
    )
    leader.launch()
    return leader


def _rank_classes(config: Config) -> tuple[type[Leader], type[Follower]]:
    return last_given((plugin.ranks for plugin in config.plugins), (Leader, Follower))


def _prepare_process(config: Config, on_end: ExitStack) -> None:
    """Make this process print its stacks when asked, and end with the process that started it."""
    keep_printing()  # also in a user's script
    write_stacks_to()
    # It forks, so there must be no thread yet.
    on_end.callback(watch_for_stopped(config.timeout_s / 2))
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        exit_with_parent()  # torchrun killed outright must not leave its ranks behind
        end_if_stuck()
    keep_freed_memory()


def _take_device(config: Config, cluster: Cluster) -> tuple[Placement, torch.device]:
    """Return the placement of the node's processes, and the device of this rank."""
    rank = cluster.local_ranks[cluster.local_rank]
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    setproctitle(f"trainer {rank}: {command}")  # found by what ps has always shown
    placement = place(
        config,
        len(visible_gpus()),
        available_cores(),
        len(cluster.local_ranks),
    )
    torch.set_num_threads(placement.trainer_threads)
    check_shares(config, cluster.num_nodes, cluster.num_ranks)
    gpu = placement.trainer_gpus[cluster.local_rank]
    return placement, torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def _fit_model(rank: Rank, model_path: str) -> tuple[Config, list[str]]:
    """Return the options with a dtype and learning rate that fit the model, and lines on freshness and rate.

    Collective on leaders.
    """
    size = num_parameters(model_path)
    config = rank.config
    if rank.device.type == "cpu":
        config = _with_dtype(rank, model_path, size)
    config, lr_line = choose_lr(config, size)
    lines = [config.freshness(), lr_line]
    if rank.cluster.is_first and rank.trains:
        print(*lines, sep="\n", flush=True)
    return config, lines


def _check_host(rank: Rank, config: Config, num_parameters: int) -> None:
    """Raise ValueError if this host lacks memory or disk for the run."""
    if rank.trains and rank.device.type == "cpu":
        check_host_memory(config, num_parameters)
    _check_disk(rank, config, num_parameters)


def _check_disk(rank: Rank, config: Config, num_parameters: int) -> None:
    """Print on rank 0 the bytes of checkpoints and of the disk.

    Raises ValueError if there is no room. Several nodes only print a warning: if they do not share the folder,
    checkpoints have only the weights.
    """
    if rank.cluster.is_first and config.save_every is not None:
        sizes = checkpoint_bytes(config, num_parameters, rank.device.type)
        try:
            line = check_room(config, sizes, rank.first_version)
        except ValueError as error:
            if rank.cluster.num_nodes == 1:
                raise
            line = f"warning: {error}"
        print(line, flush=True)


def _with_dtype(rank: Rank, model_path: str, num_parameters: int) -> Config:
    """Return the options with the dtype that rank 0 chooses for all CPUs; collective over leaders."""
    from asyncrl.trainer.dtype import choose_dtype
    from asyncrl.trainer.families import read_config

    dtype = rank.config.dtype
    if rank.cluster.is_first:
        dtype, line = choose_dtype(dtype, read_config(model_path), num_parameters)
        print(line, flush=True)
    return replace(rank.config, dtype=rank.cluster.gather(dtype)[0])


def _fit_memory(rank: Rank, config: Config, model_path: str) -> tuple[Config, Placement]:
    """Return options and placement that fit the memory of the node's GPUs; collective on leaders."""
    if rank.device.type == "cpu":
        return config, rank.placement
    given = (config, rank.placement, model_path, rank.cluster)
    fitted = last_given((plugin.fit_memory(*given) for plugin in config.plugins), None)
    if fitted is None:
        print(
            "memory: not planned, as extras/planning is missing; --save-memory auto saves nothing",
            flush=True,
        )
    return fitted or (config, rank.placement)


def _show(cluster: Cluster, placement: Placement, model_path: str) -> None:
    """Print the placement on each leader, and the stop tokens on rank 0."""
    where = f"{cluster.name(cluster.node)}: " if cluster.num_nodes > 1 else ""
    print(where + placement.table(), flush=True)
    stop_tokens = describe_stop_tokens(model_path, load_tokenizer(model_path))
    if cluster.is_first:
        print(stop_tokens, flush=True)


def open_records(rank: Rank, config: Config) -> RunDirectory:
    """Make or continue the run directory on rank 0, and a folder in it on the leaders of other nodes.

    Collective on leaders.
    """
    cluster = rank.cluster
    open_directory = functools.partial(
        RunDirectory,
        config,
        cluster.num_ranks,
        gpus=[gpu.name for gpu in visible_gpus()],
        resume_point=rank.checkpoint
        and rank.checkpoint.resume_point(cluster.node, cluster.num_nodes),
    )
    run = None
    if cluster.is_first:
        run = open_directory()
        if rank.trains:
            print(f"run directory: {run.path}", flush=True)
        texts = user_code_names(run.config)
        if texts:
            print(f"user code: {', '.join(texts)}", flush=True)
    name, run_id = cluster.gather(run and (run.path.name, run.run_id))[0]
    run = run or open_directory(node_folder=f"{name}/node_{cluster.node}", run_id=run_id)
    rank.on_end.callback(lambda: run.close(sys.exception()))
    return run
