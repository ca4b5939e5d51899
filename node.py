"""What surrounds the training loop on a node: process groups, device, run directory, rollout workers.

With several nodes each has all of this for itself: its own share of the prompts, and workers that only it talks to.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cluster import Cluster, check_shares, join, share_of_sampler
from config import Config
from controller import Controller
from data.records import Group
from data.tasks import load_task
from exchange import exchange_groups
from gpus import visible_gpus
from model_path import load_tokenizer, resolve_model
from model_shape import read_shape
from nccl_sync import NcclTransport
from node_watch import NodeWatch
from placement import Placement, available_cores, place, plan_memory
from processes import dump_trainer_stacks, exit_with_parent
from recorded_batches import batch_path, weights_sha256, write_batch
from run_directory import NodeRecords, RunDirectory
from tickets import PromptSource, TicketSource
from weight_sync import IpcTransport, ParameterSpec, ShmTransport

if TYPE_CHECKING:
    from policy import Policy  # imports transformers, for which no worker is to wait


@dataclass
class Node:
    """This rank's surroundings. Local rank 0 leads: it alone has records and the controller."""

    config: Config
    """That of the run, all nodes together."""
    share: Config
    """What this node's rollout has to do, if it samples: the run's options with its share of the groups."""
    cluster: Cluster
    placement: Placement
    device: torch.device
    model_path: str
    tokenizer: object
    run: RunDirectory | NodeRecords | None
    """The run directory on rank 0; on the leaders of other nodes their own part of it."""
    controller: Controller | None
    """On leaders of nodes that sample."""

    @property
    def is_leader(self) -> bool:
        """Whether this is local rank 0."""
        return self.run is not None

    def connect(self, policy: "Policy") -> None:
        """Join trainer and workers by the placement's transport, and wait until all engines of this node are up."""
        if not self.is_leader:
            return
        if self.cluster.is_first:
            print(f"attention of the trainer: {policy.attention}", flush=True)
        if self.controller is not None:
            self.connect_workers(policy.sent_specs())

    def connect_workers(self, specs: list[ParameterSpec]) -> None:
        """Join the workers to where weights are staged on this node, and wait until all their engines are up."""
        self.controller.connect(self._make_transport(specs))

    def _make_transport(self, specs: list[ParameterSpec]) -> ShmTransport | IpcTransport | NcclTransport:
        config = self.config
        match self.placement.transport:
            case "shm":
                return ShmTransport(specs)
            case "ipc":
                return IpcTransport(specs)
            case "nccl":
                # Here, and not by a thread of the transport in the middle of a step: it takes seconds.
                import vllm.distributed.weight_transfer.packed_tensor  # noqa: F401

                timeouts_s = config.startup_timeout_s, config.rollout_timeout_s
                return NcclTransport(specs, self.device, config.rollout_tp, *timeouts_s)

    def checkpoint_path(self, step: int) -> str:
        """Where rank 0 writes the checkpoint of a step; the others need no path."""
        return str(self.run.checkpoint_path(step)) if self.cluster.is_first else ""

    def say_where(self) -> None:
        """Say, on rank 0, where the records of the finished run are."""
        if self.cluster.is_first:
            print(f"finished: {self.run.path}", flush=True)

    def take_batch(self, enter: Callable[[str], None] = lambda state: None) -> list[Group] | None:
        """What this node trains on in the next step, on its leader; None on the others, and where nobody trains.

        `enter` is told what is waited for.
        """
        if not self.is_leader:
            return None
        sampled = self.controller.take_batch(enter) if self.controller is not None else None
        return exchange_groups(sampled, self.config.groups_per_step, self.cluster)

    def record_batch(self, step: int, groups: list[Group] | None) -> None:
        """Keep the batch of a step in the leader's run directory."""
        if self.is_leader:
            write_batch(batch_path(self.run.path, step), step, groups)

    def dump_stacks(self) -> None:
        """Have the processes on this node write their stacks: workers to their logs, trainer ranks to stderr."""
        if self.controller is None:
            dump_trainer_stacks()
        else:
            self.controller.workers.dump_stacks()


@contextmanager
def start_node(config: Config, lead: Callable[[Node], None] | None = None) -> Iterator[Node]:
    """Set up this rank, yield, and take everything down, whatever happened.

    Rollout workers are started first and come up while the caller loads the policy; `lead` is what a leader does
    instead of `start_rollout`, at least set model_path and run. Raises ValueError for what the user can mend: nodes
    that differ, placement, model, dataset, a prompt or response that does not fit the model; and RuntimeError, with
    the reason, if another node ends.
    """
    config.checked()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        exit_with_parent()  # torchrun killed outright must not leave its ranks behind
    cluster, node = join(config, "cuda" if visible_gpus() else "cpu"), None
    watch = NodeWatch(cluster)
    try:
        node = _make_node(config, cluster)
        watch.dump_stacks = node.dump_stacks
        for leaders in filter(None, (cluster.leaders, cluster.trainer_leaders)):
            leaders.dump_stacks = node.dump_stacks
        if cluster.is_leader:
            (lead or start_rollout)(node)
        node.model_path = cluster.broadcast_on_node(node.model_path)
        yield node
        if cluster.is_leader:
            cluster.gather("finished")  # one that only samples is done long before the last checkpoint
        watch.finish()
    except Exception as error:
        _ignore_signals()
        raise watch.explain(error) from error.__cause__
    finally:
        _take_down(node)


def _make_node(config: Config, cluster: Cluster) -> Node:
    """Give this rank its device."""
    nccl = dist.is_nccl_available()
    placement = place(config, len(visible_gpus()), available_cores(), len(cluster.local_ranks), nccl)
    torch.set_num_threads(placement.trainer_threads)
    gpu = placement.trainer_gpus[cluster.local_rank] if cluster.trains else None
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    check_shares(config, len(cluster.samplers), len(cluster.trainers), cluster.num_ranks)
    share = share_of_sampler(config, len(cluster.samplers))
    return Node(config, share, cluster, placement, device, "", None, None, None)


def start_rollout(node: Node) -> None:
    """A leader's part: resolve the model, open the records and start the rollout workers for the node's share."""
    cluster, config = node.cluster, node.share
    node.model_path = resolve_model(config.model, config.task)
    _plan_memory(node)
    where = f"{cluster.name(cluster.node)}: " if cluster.num_nodes > 1 else ""
    print(where + node.placement.table(), flush=True)
    tickets = _make_tickets(node) if cluster.samples else None
    node.run = _open_records(node)
    if tickets is not None:
        node.controller = Controller(config, node.placement, node.model_path, tickets, node.run.path, node.run.record)
        node.controller.launch()
    # From here on transformers is imported, for seconds, in which the workers import vLLM.
    _check_window(config, node.model_path)
    node.tokenizer = load_tokenizer(node.model_path)
    if tickets is None:
        return
    tickets.check_prompts()
    if node.placement.workers[0].shared_with_rank is not None:
        # The engine measures how much memory of the GPU is free, so the trainer must not be taking any meanwhile.
        node.controller.wait_until_ready()


def _make_tickets(node: Node) -> TicketSource:
    """The node's own share of the prompts; on the node that evaluates the held-out ones too."""
    cluster, config = node.cluster, node.share
    task = load_task(config.task, config.seed, config.data_path)
    prompts = PromptSource(
        train_problem=task.train_problem,
        eval_problems=task.eval_problems(config.eval_problems) if config.eval_every and cluster.evaluates else [],
        encode=lambda problem: task.encode_prompt(problem, node.tokenizer),
    )
    return TicketSource(config, prompts, cluster.samplers.index(cluster.node), len(cluster.samplers))


def _plan_memory(node: Node) -> None:
    """On GPUs, check that all fits and give an engine that shares one its part; prints the arithmetic."""
    gpus, config, cluster = visible_gpus(), node.config, node.cluster
    if not gpus:
        return
    num_ranks, num_shards = len(cluster.local_ranks) * len(cluster.trainers), cluster.num_ranks // config.replicas
    shape = read_shape(node.model_path)
    node.placement, arithmetic = plan_memory(config, node.placement, shape, gpus, num_ranks, num_shards)
    print(arithmetic, flush=True)


def _open_records(node: Node) -> RunDirectory | NodeRecords:
    """Make the run directory on rank 0, and in it, or in one of the same name where no file system is shared, a folder
    for each other node; collective over leaders."""
    cluster, run = node.cluster, None
    if cluster.is_first:
        weights = weights_sha256(node.model_path) if node.config.record else None
        run = RunDirectory(node.config, weights, cluster.num_ranks)
        print(f"run directory: {run.path}", flush=True)
    run_name = cluster.gather(run and run.path.name)[cluster.trainers[0]]
    return run or NodeRecords(node.config, run_name, cluster.node, cluster.num_ranks)


def _check_window(config: Config, model_path: str) -> None:
    """Raise ValueError if a whole sequence does not fit the model's positions."""
    from transformers import AutoConfig

    window = getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", None)
    if window is not None and config.max_sequence_tokens > window:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
            f"{config.max_sequence_tokens} tokens, {config.model} has positions for {window}; lower one of the two"
        )


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _take_down(node: Node | None) -> None:
    """End workers, files and process group, each whatever became of the others; not to be interrupted."""
    _ignore_signals()
    with ExitStack() as stack:
        if dist.is_initialized():
            stack.callback(dist.destroy_process_group)
        if node is not None and node.run is not None:
            stack.callback(node.run.close, sys.exception())
        if node is not None and node.controller is not None:
            stack.callback(node.controller.stop)
