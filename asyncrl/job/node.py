"""What surrounds the training loop on a node: process groups, device, run directory, rollout workers.

Each of several nodes has all of this for itself: its share of the prompts, and workers that only it talks to.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from setproctitle import setproctitle

from asyncrl import extras
from asyncrl.cluster.cluster import Cluster, check_shares, join
from asyncrl.cluster.cores import claim_cores, leave_cores
from asyncrl.cluster.gpus import visible_gpus
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.placement import Placement, available_cores, place
from asyncrl.cluster.processes import (
    CannotContinue,
    Interrupted,
    RolloutEnded,
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
from asyncrl.controller.prompts import PromptSource
from asyncrl.controller.snapshot import ControllerState
from asyncrl.controller.tickets import TicketSource
from asyncrl.controller.workers import Workers
from asyncrl.engine.score import load_scorer
from asyncrl.job import command_line
from asyncrl.job.disk import check_room, checkpoint_bytes
from asyncrl.job.probe import Probe
from asyncrl.job.resume import controller_of, find_checkpoint, how_to_go_on
from asyncrl.plugins import last_part
from asyncrl.records import Group
from asyncrl.runlog.manifest import Checkpoint, weights_sha256
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.tasks import encode, task_of
from asyncrl.trainer.advantage import choose_estimator
from asyncrl.trainer.loss import choose_loss
from asyncrl.trainer.optimizer import choose_lr
from asyncrl.user_code import texts_of
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.models import load_tokenizer, num_parameters, resolve_model
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.stop_tokens import describe_stop_tokens
from asyncrl.weights.transport import ParameterSpec, Transport
from data.problem import Task

# The policy imports transformers for seconds. It is imported once the workers are starting.
if TYPE_CHECKING:
    from asyncrl.job.publisher import LeadingPublisher, Publisher
    from asyncrl.trainer.policy import Policy


class NobodySamples(Exception):
    """The run is asked to stop, and a node that waits for a batch has no worker that could finish it."""


@dataclass(frozen=True)
class Rank:
    """A trainer rank in its place, before its node has a model."""

    config: Config
    cluster: Cluster
    placement: Placement
    device: torch.device
    clock: TrainerClock
    """What this rank does; every verb of the loop enters its own state."""
    on_end: ExitStack
    """Takes down what was started, last first."""
    watch: NodeWatch
    resumed: Checkpoint | None
    """What the run continues from; None for a new one."""
    trains: bool = field(default=True, kw_only=True)
    """Whether there are steps, else the first weights are only evaluated."""

    @property
    def first_version(self) -> int:
        """Policy version that this start of the run begins with: 0, or that of its checkpoint."""
        return self.resumed.step if self.resumed else 0

    @functools.cached_property
    def probe(self) -> Probe:
        """The probe of a new run, or as the checkpoint has it."""
        return Probe(self.config, self.resumed and self.resumed.probe_of(self.cluster.node))

    def use_device(self) -> None:
        """Make the context of this rank's GPU. No plan of memory and no engine must find it, so they come first."""
        if self.device.type == "cuda":
            # torch reads the first that is set
            given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get(
                "PYTORCH_CUDA_ALLOC_CONF"
            )
            # Segments that grow are not cut to pieces by micro-batches of all lengths. An engine cannot open them.
            is_opened = self.placement.transport == "ipc"
            options = [f"expandable_segments:{not is_opened}", given]
            if is_opened:
                options.reverse()  # the last of two counts
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, options)))
            torch.cuda.set_device(self.device)
            planning = extras.find("planning")
            if planning is not None:
                planning.leave_room(self)

    def wait_together(self, wait: Callable[[], Any]) -> Any:
        """Return what `wait()` gives on a leader; collective.

        Raises CannotContinue on all ranks, with the reason of the first node, where it raises RolloutEnded on one.
        """
        result, reason = None, ""
        if self.cluster.is_leader:
            try:
                result = wait()
            except RolloutEnded as error:
                reason = str(error)
            reason = next(filter(None, self.cluster.gather(reason)), "")
        reason = self.cluster.broadcast_on_node(reason)
        if reason:
            raise CannotContinue(reason)
        return result


@dataclass(frozen=True)
class Follower(Rank):
    """A rank that only trains: its leader gives it its part of every batch."""

    model_path: str

    def make_publisher(self, policy: "Policy") -> "Publisher":
        """Return what helps the leader to publish."""
        from asyncrl.job.publisher import Publisher

        return Publisher(self, policy)

    def take_batch(self, step: int, publisher: "Publisher") -> None:
        """Wait with the leader, who alone has the groups of a step; see Leader."""
        self.wait_together(list)


@dataclass(frozen=True)
class Leader(Rank):
    """Local rank 0 of a node: it trains too, and it alone has records and rollout workers."""

    model_path: str
    run: RunDirectory
    tokenizer: Any
    controller: Controller
    restored: ControllerState | None
    """What the controller continues from."""

    def launch(self) -> None:
        """Start the rollout workers, which `on_end` stops; returns before they are up, unless they share a GPU."""
        self.on_end.callback(self.controller.stop)
        self.controller.launch()
        if any(worker.shared_with_rank is not None for worker in self.placement.workers):
            # The engine measures how much memory of the GPU is free, so the trainer must not be taking any meanwhile.
            self.controller.wait_until_ready()

    def connect_workers(self, specs: list[ParameterSpec]) -> None:
        """Join the workers to where weights are staged on this node, and wait until all their engines are up."""
        transport = Transport(specs)
        match self.placement.transport:
            case "shm":
                transport = ShmTransport(specs)
            case "ipc":
                transport = IpcTransport(specs)
            case "nccl":
                transport = NcclTransport(
                    specs, self.device, self.config.rollout_tp, self.config.timeout_s
                )
        self.controller.connect(transport)
        leave_cores(self.placement, self.on_end)

    def make_publisher(self, policy: "Policy") -> "LeadingPublisher":
        """Return what publishes versions, once all engines of this node are up."""
        from asyncrl.job.publisher import LeadingPublisher

        return LeadingPublisher(self, policy)

    def take_batch(self, step: int, publisher: "Publisher") -> list[Group]:
        """Wait for the groups that this node trains on in a step, and compare the engines by then; collective.

        Raises CannotContinue, on all ranks, if rollout has ended on a node. No node has then taken groups out.
        """
        self.clock.enter("wait")
        self.wait_together(self.controller.wait_for_batch)
        groups = self.controller.take_batch()
        publisher.check_engines(step)
        self.on_batch(step, groups)
        return groups

    def on_batch(self, step: int, groups: list[Group]) -> None:
        """Tell the plugins of a batch before the step that trains on it."""
        for plugin in self.config.plugins:
            plugin.on_batch(self, step, groups)


def node_kinds(config: Config) -> tuple[type[Leader], type[Follower]]:
    """Return the classes of a node's ranks in a run."""
    return last_part((plugin.ranks for plugin in config.plugins), (Leader, Follower))


@contextmanager
def start_rank(config: Config, trains: bool = True) -> Iterator[Rank]:
    """Set up this rank, yield it, and take everything down, whatever happened.

    Raises ValueError for what the user can fix, RuntimeError if another node ends.
    """
    config.checked()
    # a mistake ends the run before anything is made
    choose_loss(config)
    choose_estimator(config)
    on_end = ExitStack()
    _prepare_process(config, on_end)
    clock = TrainerClock()
    cluster = join(config, "cuda" if visible_gpus() else "cpu")
    resumed = find_checkpoint(config, cluster)
    watch_class = extras.load("--nnodes").LeaderWatch if cluster.num_nodes > 1 else NodeWatch
    watch = watch_class(cluster, dump_stacks)
    try:
        placement, device = _take_device(config, cluster)
        yield Rank(config, cluster, placement, device, clock, on_end, watch, resumed, trains=trains)
        watch.finish()
    except (Exception, SystemExit, Interrupted) as error:
        # Whatever ends this node, also an exit by user code, may follow from the end of another node.
        ignore_signals()
        raise watch.explain(error) from error.__cause__
    finally:
        ignore_signals()
        if cluster.num_ranks > 1 and sys.exception() is not None:
            end_by(sys.exception(), on_end.close)
        on_end.close()
        dist.destroy_process_group()


@contextmanager
def start_node(rank: Rank, worker_main: Callable) -> Iterator[Leader | Follower]:
    """Give the rank its node's model and, if it leads, records and rollout workers, which `rank` takes down.

    Workers run `worker_main(spec, connection)`, and come up while the caller loads the policy. A signal that ends the
    run says how to continue.
    """
    cluster = rank.cluster
    run = rank.config.resume and Path(rank.config.resume)
    try:
        model_path, task = "", None
        if cluster.is_leader:
            # Rows come first: what is wrong with them is reported before a model is fetched.
            task = read_task(rank.config, cluster)
            model_path = resolve_model(rank.config.model, rank.config.task)
        cluster.wait_for_models()
        if cluster.is_leader:
            node = start_leader(rank, model_path, task, worker_main)
            run = run or node.run.path
            stacks = node.run.path / "stacks.txt"
            cluster.broadcast_on_node((node.config, node.model_path, stacks))
        else:
            config, model_path, stacks = cluster.broadcast_on_node(None)
            write_stacks_to(stacks)
            node = follow(replace(rank, config=config), model_path)
        node.use_device()
        yield node
    except Interrupted as error:
        if cluster.is_first:
            error.args = (f"{error}; {how_to_go_on(run)}", *error.args[1:])
        raise


def follow(rank: Rank, model_path: str) -> Follower:
    """Return a rank that trains, and follows its node's leader in all else."""
    _, kind = node_kinds(rank.config)
    return kind(**_parts(rank), model_path=model_path)


def _parts(rank: Rank) -> dict[str, Any]:
    """Return the fields of a rank by name; what it has cached is none of them."""
    return {field.name: getattr(rank, field.name) for field in fields(Rank)}


def _prepare_process(config: Config, on_end: ExitStack) -> None:
    """Have this process show its stacks when asked, and end with whoever has started it."""
    keep_printing()  # also in a script of the user's
    write_stacks_to()
    on_end.callback(
        watch_for_stopped(config.timeout_s / 2)
    )  # it forks: there must be no thread yet
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        exit_with_parent()  # torchrun killed outright must not leave its ranks behind
        end_if_stuck()
    keep_freed_memory()


def _take_device(config: Config, cluster: Cluster) -> tuple[Placement, torch.device]:
    """Place the node's processes and say which device is this rank's."""
    rank = cluster.local_ranks[cluster.local_rank]
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    setproctitle(f"trainer {rank}: {command}")  # found by what ps has always shown
    placement = place(
        config,
        len(visible_gpus()),
        available_cores(),
        len(cluster.local_ranks),
        dist.is_nccl_available(),
    )
    torch.set_num_threads(placement.trainer_threads)
    check_shares(config, cluster.num_nodes, cluster.num_ranks)
    gpu = placement.trainer_gpus[cluster.local_rank]
    return placement, torch.device("cpu") if gpu is None else torch.device("cuda", gpu)


def start_leader(rank: Rank, model_path: str, task: Task, worker_main: Callable) -> Leader:
    """Make a leader: open the records and start the node's rollout workers."""
    cluster = rank.cluster
    rank = _fit_memory(_fit_model(rank, model_path), model_path)
    rank = replace(rank, placement=claim_cores(rank.placement, rank.on_end))
    where = f"{cluster.name(cluster.node)}: " if cluster.num_nodes > 1 else ""
    print(where + rank.placement.table(), flush=True)
    # What is wrong with options and data is said before anything is written or started.
    _check_model(rank.config, model_path, rank.device.type)
    ends = describe_stop_tokens(model_path, load_tokenizer(model_path))
    if cluster.is_first:
        print(ends, flush=True)
    tickets = _make_tickets(rank.config, cluster, model_path, task)
    restored = rank.resumed and controller_of(
        rank.resumed, model_path, cluster, rank.config, tickets.prompts.digest
    )
    run = open_records(rank, model_path)
    config = run.config
    if not rank.resumed:
        _try_copies(config)
    rank = replace(rank, config=config)
    write_stacks_to(run.path / "stacks.txt")
    kind, _ = node_kinds(config)
    workers_class = last_part((plugin.workers for plugin in config.plugins), Workers)
    controller_class = last_part((plugin.controller for plugin in config.plugins), Controller)
    workers = workers_class(config, rank.placement, model_path, run.path, worker_main)
    leader = kind(
        **_parts(rank),
        model_path=model_path,
        run=run,
        tokenizer=load_tokenizer(model_path),
        controller=controller_class(
            config, workers, tickets, run.record, rank.clock, cluster.num_nodes, restored
        ),
        restored=restored,
    )
    leader.launch()
    return leader


def _fit_model(rank: Rank, model_path: str) -> Rank:
    """Return the rank with a learning rate that fits the number of parameters, and look at the disk on rank 0.

    Raises ValueError if there is no room for checkpoints. Several nodes are only warned: if they do not share the
    folder, checkpoints have the weights alone.
    """
    size = num_parameters(model_path)
    config, line = choose_lr(rank.config, size)
    if rank.cluster.is_first and rank.trains:
        print(config.freshness(), line, sep="\n", flush=True)
    if rank.cluster.is_first and config.save_every is not None:
        sizes = checkpoint_bytes(config, size, rank.device.type)
        try:
            line = check_room(config, sizes, rank.first_version)
        except ValueError as error:
            if rank.cluster.num_nodes == 1:
                raise
            line = f"warning: {error}"
        print(line, flush=True)
    return replace(rank, config=config)


def _try_copies(config: Config) -> None:
    """Load user code as all processes of the run will. Raises ValueError if it needs more than was copied."""
    texts = texts_of(config)
    try:
        if texts:
            command_line.check(config)
        if config.task in texts:
            task_of(config).train_problem(0)
    except ValueError as error:
        raise ValueError(
            f"{error}; a run loads copies of user code, and data beside it are not copied: give their absolute paths"
        ) from None


def _fit_memory(rank: Rank, model_path: str) -> Rank:
    """Return the rank with the options and the placement that fit the memory of the node's GPUs; collective on
    leaders."""
    if rank.device.type == "cpu":
        return rank
    planning = extras.find("planning")
    if planning is None:
        print(
            "memory: not planned, as extras/planning is missing; --save-memory auto saves nothing",
            flush=True,
        )
        return rank
    config, placement = planning.fit(rank.config, rank.placement, model_path, rank.cluster)
    return replace(rank, config=config, placement=placement)


def open_records(rank: Rank, model_path: str) -> RunDirectory:
    """Make the run directory on rank 0, and on the leaders of other nodes a folder in it, or continue what is there.

    Collective on leaders.
    """
    config, cluster = rank.config, rank.cluster
    open_directory = functools.partial(
        RunDirectory,
        config,
        cluster.num_ranks,
        gpus=[gpu.name for gpu in visible_gpus()],
        resumed=rank.resumed and rank.resumed.event(cluster.node),
    )
    run = None
    if cluster.is_first:
        run = open_directory(weights_sha256=weights_sha256(model_path) if config.record else None)
        if rank.trains:
            print(f"run directory: {run.path}", flush=True)
        texts = texts_of(run.config)
        if texts:
            print(f"user code: {', '.join(texts)}", flush=True)
    name, run_id = cluster.gather(run and (run.path.name, run.run_id))[0]
    run = run or open_directory(node_folder=f"{name}/node_{cluster.node}", run_id=run_id)
    rank.on_end.callback(lambda: run.close(sys.exception()))
    return run


def read_task(config: Config, cluster: Cluster) -> Task:
    """The task, of which each row can be scored."""
    task = task_of(config)
    if task.summary and cluster.is_first:
        print(task.summary, flush=True)
    if config.reward or config.task == "jsonl":
        score = load_scorer(config.task, config.reward)
        for problem in task.rows or [task.train_problem(0)]:
            score.check(problem)
    return task


def _make_tickets(config: Config, cluster: Cluster, model_path: str, task: Task) -> TicketSource:
    """The node's own share of the prompts; on the first also the held-out ones.

    Raises ValueError if one does not fit, or the nodes have different ones.
    """
    from asyncrl.trainer.families import read_config

    held_out = []
    if config.eval_every and cluster.is_first:
        held_out = task.eval_problems(config.eval_problems)
    if 0 < len(held_out) < config.eval_problems:
        print(
            f"held-out problems: {len(held_out)}, all that there are; --eval-problems {config.eval_problems}"
        )
    prompts = PromptSource(
        train_problem=task.train_problem,
        eval_problems=held_out,
        encode=functools.partial(encode, config, task, load_tokenizer(model_path)),
        rows=task.rows,
        vocab_size=read_config(model_path).vocab_size,
    )
    prompts.check(config)
    if any(digest != prompts.digest for digest in cluster.gather(prompts.digest)):
        raise ValueError("the nodes have different rows; give all the same by --data-path")
    tickets_class = last_part((plugin.tickets for plugin in config.plugins), TicketSource)
    return tickets_class(config, prompts, cluster.node, cluster.num_nodes)


def _check_model(config: Config, model_path: str, device: str) -> None:
    """Raise ValueError if the model would be trained wrongly, or a token or a whole sequence does not fit it."""
    from asyncrl.trainer.families import check_engine, longest_sequence, read_config

    model = read_config(model_path)
    for plugin in config.plugins:
        plugin.check(config, model)
    check_engine(config, model, device)
    tokenizer = load_tokenizer(model_path)
    if config.tool_parser and "tools" not in str(tokenizer.chat_template):
        print(
            f"warning: --tool-parser {config.tool_parser} reads calls of tools, and the chat template of --model "
            f"{config.model} shows the policy no tools; describe them in a message, or change the template",
            flush=True,
        )
    special = set(tokenizer.all_special_ids)
    for token, index in tokenizer.get_vocab().items():
        # Gemma's text models lack the token of an image, which no template writes.
        is_unused = index in special and token not in str(tokenizer.chat_template)
        if index >= model.vocab_size and not is_unused:
            raise ValueError(
                f"--model {config.model}: its tokenizer writes {token!r} as {index}, and its config.json has a "
                f"vocabulary of {model.vocab_size}; take that model's own tokenizer, or resize its embeddings"
            )
    limit = longest_sequence(model)
    if limit is not None and config.max_sequence_tokens > limit:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
            f"{config.max_sequence_tokens} tokens, and a sequence of {config.model} may have {limit}: its positions "
            "end there, or its longrope changes there; lower one of the two"
        )
