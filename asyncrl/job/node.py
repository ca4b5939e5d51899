"""What surrounds the training loop on a node: process groups, device, run directory, rollout workers.

Each of several nodes has all of this for itself: its share of the prompts, and workers that only it talks to.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from setproctitle import setproctitle

from asyncrl import extras
from asyncrl.cluster.cluster import Cluster, check_shares, join
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.placement import Placement, available_cores, place
from asyncrl.cluster.processes import (
    Interrupted,
    exit_with_parent,
    ignore_signals,
    keep_freed_memory,
)
from asyncrl.cluster.stacks import dump_stacks, write_stacks_to
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.cut import ControllerState
from asyncrl.controller.tickets import PromptSource, TicketSource
from asyncrl.controller.workers import Workers
from asyncrl.job.probe import Probe
from asyncrl.job.resume import controller_of, find_checkpoint, how_to_go_on
from asyncrl.records import Group
from asyncrl.runlog.batches import batch_path, weights_sha256, write_batch
from asyncrl.runlog.fingerprint import check_same, fingerprint
from asyncrl.runlog.manifest import Checkpoint
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.tasks import check_rows, encode, load_task
from asyncrl.trainer.loss import choose_loss
from asyncrl.user_code import call_within, is_own, texts_of
from asyncrl.weights.ipc import check_allocator
from asyncrl.weights.models import load_tokenizer, resolve_model
from data.problem import Problem, Task

if TYPE_CHECKING:
    from asyncrl.job.publisher import Publisher


class NobodySamples(Exception):
    """The run is asked to stop, and a node that waits for a batch has no worker that could finish it."""


@dataclass(frozen=True)
class Start:
    """What a rank's node is made from."""

    config: Config
    cluster: Cluster
    placement: Placement
    device: torch.device
    clock: TrainerClock
    """What this rank does; every verb of the loop enters its own state."""
    worker_main: Callable | None = None
    """What a rollout worker's process runs: `worker_main(spec, connection)`."""
    on_end: ExitStack = field(default_factory=ExitStack)
    """Takes down what was started, last first."""
    watch: NodeWatch | None = None
    resumed: Checkpoint | None = None
    """What the run goes on from; None for a new one."""

    def make_node(self, model_path: str, **of_leader) -> "Node":
        """The node; `of_leader` are the fields that only a leader has."""
        probe = Probe(
            self.config, self.resumed.probe_of(self.cluster.node) if self.resumed else None
        )
        kind = Node if self.config.listen is None else extras.load("--listen").SwarmNode
        return kind(**vars(self), model_path=model_path, probe=probe, **of_leader)


@dataclass(frozen=True, kw_only=True)
class Node(Start):
    """This rank's surroundings. Local rank 0 leads: it alone has records and the controller."""

    model_path: str
    probe: Probe
    run: RunDirectory | None = None
    tokenizer: object = None
    controller: Controller | None = None
    restored: ControllerState | None = None
    """What the controller goes on from."""

    def take_batch(self, step: int, publisher: "Publisher") -> list[Group] | None:
        """Wait for what this node trains on in a step, and compare the engines by then; with --record keep it.

        Returns the groups on a leader, None on other ranks.
        """
        self.clock.enter("wait")
        groups = self.controller.take_batch() if self.cluster.is_leader else None
        publisher.check_engines(step)
        self.record_batch(step, groups)
        return groups

    def record_batch(self, step: int, groups: list[Group] | None) -> None:
        """Write what is trained on to the run directory, with --record and on a leader."""
        if self.config.record and groups is not None:
            self.clock.enter("save")
            write_batch(batch_path(self.run.path, step), step, groups)

    @property
    def first_version(self) -> int:
        """Policy version that this start of the run begins with: 0, or that of the checkpoint that it goes on from."""
        return self.resumed.step if self.resumed else 0

    def say_where(self) -> None:
        """Say, on rank 0, where the records of the finished run are."""
        if self.cluster.is_first:
            print(f"finished: {self.run.path}", flush=True)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done `every` so many steps, and after the last one, is due after `step`."""
    return step == last or (every > 0 and step % every == 0)


@contextmanager
def start_node(
    config: Config, worker_main: Callable, lead: Callable[[Start], Node] | None = None
) -> Iterator[Node]:
    """Set up this rank, yield its node, and take everything down, whatever happened.

    Rollout workers, which run `worker_main(spec, connection)`, come up while the caller loads the policy; a leader does
    `lead` instead of `start_rollout`. Raises ValueError for what the user can mend, RuntimeError if another node ends.
    """
    config.checked()
    choose_loss(config)  # a mistake ends the run before anything is made
    on_end = ExitStack()
    _prepare_process(config, on_end)
    clock = TrainerClock()
    cluster = join(config, "cuda" if visible_gpus() else "cpu", fingerprint, check_same)
    if dist.is_initialized():
        on_end.callback(dist.destroy_process_group)
    resumed = find_checkpoint(config, cluster)
    watch, node = NodeWatch(cluster, dump_stacks), None
    try:
        placement, device = _take_device(config, cluster)
        start = Start(
            config, cluster, placement, device, clock, worker_main, on_end, watch, resumed
        )
        node = (lead or start_rollout)(start) if cluster.is_leader else None
        of_node = node and (node.config, node.model_path, node.run.path / "stacks.txt")
        config, model_path, stacks = cluster.broadcast_on_node(of_node)
        write_stacks_to(stacks)
        if start.device.type == "cuda":
            # makes a context, which no plan of memory and no engine must find
            torch.cuda.set_device(start.device)
        yield node or replace(start, config=config).make_node(model_path)
        watch.finish()
    except Exception as error:
        ignore_signals()
        explained = watch.explain(error)
        if isinstance(explained, Interrupted) and cluster.is_first:
            run = Path(config.resume) if config.resume else node and node.run.path
            explained.args = (f"{explained}; {how_to_go_on(run)}", *explained.args[1:])
        raise explained from error.__cause__
    finally:
        ignore_signals()
        on_end.close()


def _prepare_process(config: Config, on_end: ExitStack) -> None:
    """Have this process show its stacks when asked, and end with whoever has started it."""
    write_stacks_to()
    watchdog = extras.find("watchdog")
    if watchdog is not None:  # it forks: there must be no thread yet
        on_end.callback(watchdog.end_what_is_stopped(config.timeout_s / 2))
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        exit_with_parent()  # torchrun killed outright must not leave its ranks behind
    keep_freed_memory()


def _take_device(config: Config, cluster: Cluster) -> tuple[Placement, torch.device]:
    """Place the node's processes and say which device is this rank's."""
    rank = cluster.local_ranks[cluster.local_rank]
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    setproctitle(f"trainer {rank}: {command}")  # found by what ps has always shown
    num_gpus, num_ranks, nccl = (
        len(visible_gpus()),
        len(cluster.local_ranks),
        dist.is_nccl_available(),
    )
    placement = place(config, num_gpus, available_cores(), num_ranks, nccl)
    torch.set_num_threads(placement.trainer_threads)
    check_shares(config, cluster.num_nodes, cluster.num_ranks)
    gpu = placement.trainer_gpus[cluster.local_rank]
    return placement, torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def start_rollout(start: Start) -> Node:
    """Make a leader's node: resolve the model, open the records and start the node's rollout workers."""
    cluster, model_path = start.cluster, resolve_model(start.config.model, start.config.task)
    start = _fit_memory(start, model_path)
    cores = extras.find("cores")
    if cores is not None:
        start = replace(start, placement=cores.claim_cores(start.placement, start.on_end))
    config = start.config
    where = f"{cluster.name(cluster.node)}: " if cluster.num_nodes > 1 else ""
    print(where + start.placement.table(), flush=True)
    # What is wrong with options and data is said before anything is written or started.
    _check_model(config, model_path)
    tickets = _make_tickets(config, cluster, model_path)
    tickets.check_prompts()
    restored = start.resumed and controller_of(start.resumed, model_path, cluster, config)
    run = _open_records(start, model_path)
    start = replace(start, config=run.config)
    start.on_end.callback(lambda: run.close(sys.exception()))
    write_stacks_to(run.path / "stacks.txt")
    make = make_controller if config.listen is None else extras.load("--listen").make_controller
    controller = make(start, model_path=model_path, run=run, tickets=tickets, restored=restored)
    start.on_end.callback(controller.stop)
    controller.launch()
    if any(worker.shared_with_rank is not None for worker in start.placement.workers):
        # The engine measures how much memory of the GPU is free, so the trainer must not be taking any meanwhile.
        controller.wait_until_ready()
    of_leader = {"run": run, "controller": controller, "restored": restored}
    return start.make_node(model_path, tokenizer=load_tokenizer(model_path), **of_leader)


def make_controller(
    start: Start,
    *,
    model_path: str,
    run: RunDirectory,
    tickets: TicketSource,
    restored: ControllerState | None,
) -> Controller:
    """Make the controller of a node, and its workers."""
    workers = Workers(start.config, start.placement, model_path, run.path, start.worker_main)
    kind = (
        extras.load("--scheduling").BaselineController if start.config.is_baseline else Controller
    )
    return kind(
        start.config, workers, tickets, run.record, start.clock, start.cluster.num_nodes, restored
    )


def _fit_memory(start: Start, model_path: str) -> Start:
    """Return the start with the options and the placement that fit the memory of the node's GPUs; collective on
    leaders."""
    if start.device.type == "cpu":
        return start
    config, placement, planning = start.config, start.placement, extras.find("planning")
    if planning is not None:
        config, placement = planning.fit(config, placement, model_path, start.cluster)
    else:
        print(
            "memory: not planned, as extras/planning is missing; --save-memory auto saves nothing",
            flush=True,
        )
    if placement.transport == "ipc":
        check_allocator()
    return replace(start, config=config, placement=placement)


def _open_records(start: Start, model_path: str) -> RunDirectory:
    """Make the run directory on rank 0, and on the leaders of other nodes a folder of their own, or go on with what is
    there; collective on them."""
    config, cluster, run = start.config, start.cluster, None
    resumed = start.resumed and start.resumed.event(cluster.node)
    make = functools.partial(
        RunDirectory,
        config,
        cluster.num_ranks,
        gpus=[gpu.name for gpu in visible_gpus()],
        resumed=resumed,
    )
    if cluster.is_first:
        weights = weights_sha256(model_path) if config.record else None
        run = make(weights_sha256=weights)
        print(f"run directory: {run.path}", flush=True)
        if texts := texts_of(run.config):
            print(f"user code: {', '.join(texts)}", flush=True)
    name, run_id = cluster.gather(run and (run.path.name, run.run_id))[0]
    folder = f"{name}/node_{cluster.node}"
    return run or make(node_folder=folder, run_id=run_id)


def _make_tickets(config: Config, cluster: Cluster, model_path: str) -> TicketSource:
    """The node's own share of the prompts; on the first also the held-out ones."""
    task = load_task(config.task, config.seed, config.data_path, config.task_args)
    check_rows(config, task)
    held_out = _held_out(config, task) if config.eval_every and cluster.is_first else []
    if 0 < len(held_out) < config.eval_problems:
        print(
            f"held-out problems: {len(held_out)}, all that there are; --eval-problems {config.eval_problems}"
        )
    prompts = PromptSource(
        train_problem=task.train_problem,
        eval_problems=held_out,
        encode=functools.partial(encode, config, task, load_tokenizer(model_path)),
    )
    return TicketSource(config, prompts.within_limits(config), cluster.node, cluster.num_nodes)


def _held_out(config: Config, task: Task) -> list[Problem]:
    """The held-out problems; those of a user's task must come within `timeout_s`."""
    draw = functools.partial(task.eval_problems, config.eval_problems)
    return (
        call_within(config, "timeout_s", draw, what="eval_problems")
        if is_own(config.task)
        else draw()
    )


def _check_model(config: Config, model_path: str) -> None:
    """Raise ValueError if the model would be trained wrongly, or a whole sequence does not fit its positions."""
    from asyncrl.trainer.families import read_config

    window = getattr(
        read_config(model_path, config.share_prefix != "off"), "max_position_embeddings", None
    )
    if window is not None and config.max_sequence_tokens > window:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
            f"{config.max_sequence_tokens} tokens, {config.model} has positions for {window}; lower one of the two"
        )
