"""What surrounds the training loop on one node: process group, device, run directory, rollout workers."""

import datetime
import faulthandler
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from config import Config
from controller import Controller
from data.records import Group
from data.tasks import load_task
from lora import named_base_parameters
from model_path import resolve_model
from placement import Placement, available_cores, place, visible_gpus
from policy import Policy
from processes import exit_with_parent
from rollout import load_tokenizer
from run_directory import RunDirectory
from tickets import PromptSource, TicketSource
from weight_sync import IpcTransport, ParameterSpec, ShmTransport


@dataclass
class Node:
    """This rank's surroundings. Rank 0 leads: it alone has the run directory and the controller."""

    config: Config
    placement: Placement
    device: torch.device
    model_path: str
    tokenizer: object
    run: RunDirectory | None
    controller: Controller | None

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.controller is not None

    def connect(self, policy: Policy) -> ShmTransport | IpcTransport | None:
        """Join trainer and workers by the placement's transport, and wait until all engines are up."""
        if not self.is_leader:
            return None
        print(f"attention of the trainer: {policy.attention}", flush=True)
        sent = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        parameters = named_base_parameters(policy.module.model)
        specs = [ParameterSpec(name, sent, tuple(p.shape)) for name, p in parameters]
        kind = {"shm": ShmTransport, "ipc": IpcTransport}[self.placement.transport]
        transport = kind(specs)
        self.controller.connect(transport)
        return transport

    def checkpoint_path(self, step: int) -> str:
        """Where rank 0 writes the checkpoint of a step; the others need no path."""
        return str(self.run.checkpoint_path(step)) if self.is_leader else ""

    def say_where(self) -> None:
        """Say, on rank 0, where the records of the finished run are."""
        if self.is_leader:
            print(f"finished: {self.run.path}", flush=True)

    def take_batch(self) -> list[Group] | None:
        """The next batch of groups on rank 0, None on the others."""
        return self.controller.take_batch() if self.is_leader else None


@contextmanager
def start_node(config: Config) -> Iterator[Node]:
    """Set up this rank, yield, and take everything down, whatever happened.

    Rollout workers are started first and come up while the caller loads the policy. Raises ValueError for what the
    user can mend: placement, model, dataset, a prompt or response that does not fit the model.
    """
    config.checked()
    rank, local_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _check_one_node(local_ranks)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    placement = place(config, visible_gpus(), available_cores(), local_ranks)
    torch.set_num_threads(placement.trainer_threads)
    gpu = placement.trainer_gpus[int(os.environ.get("LOCAL_RANK", "0"))]
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        exit_with_parent()  # torchrun killed outright must not leave its ranks behind
    node = Node(config, placement, device, "", None, None, None)
    try:
        if rank == 0:
            _start_leading(node)
        _join_process_group(config, device)
        node.model_path = _from_rank_0(node.model_path)
        yield node
    finally:
        _take_down(node)


def _check_one_node(local_ranks: int) -> None:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != local_ranks:
        raise ValueError(
            f"{world_size} trainer ranks, {local_ranks} of them on this node: several nodes are not supported yet; "
            "use --nnodes 1"
        )


def _start_leading(node: Node) -> None:
    config = node.config
    print(node.placement.table(), flush=True)
    task = load_task(config.task, config.seed, config.data_path)
    node.model_path = resolve_model(config.model, config.task)
    _check_window(config, node.model_path)
    node.tokenizer = load_tokenizer(node.model_path)
    prompts = PromptSource(
        train_problem=task.train_problem,
        eval_problems=task.eval_problems(config.eval_problems) if config.eval_every else [],
        encode=lambda problem: task.encode_prompt(problem, node.tokenizer),
    )
    tickets = TicketSource(config, prompts)
    tickets.check_prompts()
    node.run = RunDirectory(config)
    print(f"run directory: {node.run.path}", flush=True)
    node.controller = Controller(config, node.placement, node.model_path, tickets, node.run.path, node.run.record)
    node.controller.launch()
    if node.placement.transport == "ipc":
        # The engine measures how much memory of the GPU is free, so the trainer must not be taking any meanwhile.
        node.controller.wait_until_ready()


def _check_window(config: Config, model_path: str) -> None:
    """Raise ValueError if a whole sequence does not fit the model's positions."""
    from transformers import AutoConfig

    window = getattr(AutoConfig.from_pretrained(model_path), "max_position_embeddings", None)
    if window is not None and config.max_sequence_tokens > window:
        raise ValueError(
            f"--max-prompt-tokens {config.max_prompt_tokens} + --max-response-tokens {config.max_response_tokens} = "
            f"{config.max_sequence_tokens} tokens, {config.model} has positions for {window}; lower one of the two"
        )


def _join_process_group(config: Config, device: torch.device) -> None:
    """Meet the other ranks; without torchrun, be the only one."""
    timeout = datetime.timedelta(seconds=config.startup_timeout_s + config.rollout_timeout_s)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    store = Path(tempfile.mkdtemp(prefix="train-async-")) / "store"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1, timeout=timeout)


def _from_rank_0(value: str) -> str:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _take_down(node: Node) -> None:
    """End workers, files and process group, each whatever became of the others; not to be interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with ExitStack() as stack:
        if dist.is_initialized():
            stack.callback(dist.destroy_process_group)
        if node.run is not None:
            stack.callback(node.run.close)
        if node.controller is not None:
            stack.callback(node.controller.stop)
