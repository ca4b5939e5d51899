"""The ranks of a node: a leader with records and rollout workers, and followers.

Each of several nodes has its share of the prompts, and its own workers. The ranks are built by asyncrl/job/assemble.py.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.cores import leave_cores, use_free_cores
from asyncrl.cluster.node_watch import NodeWatch
from asyncrl.cluster.placement import Placement
from asyncrl.cluster.processes import CannotContinue, RolloutEnded
from asyncrl.config import Config
from asyncrl.controller.controller import Controller
from asyncrl.controller.snapshot import ControllerState
from asyncrl.job.probe import Probe
from asyncrl.records import Group
from asyncrl.runlog.manifest import Checkpoint
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.model import layers_of
from asyncrl.weights.ipc import IpcTransport
from asyncrl.weights.nccl import NcclTransport
from asyncrl.weights.shm import ShmTransport
from asyncrl.weights.transport import ParameterSpec, Transport

if TYPE_CHECKING:
    from asyncrl.job.publisher import Publisher


class NobodySamples(Exception):
    """The run is asked to stop, and a node that waits for a batch has no worker."""


@dataclass(frozen=True)
class Rank:
    """The place of a trainer rank in its run."""

    config: Config
    cluster: Cluster
    placement: Placement
    device: torch.device
    clock: TimeLedger
    """States of this rank; each call of the loop enters its own."""
    on_end: ExitStack
    """Stops the started parts, last first."""
    watch: NodeWatch
    checkpoint: Checkpoint | None
    """Checkpoint that the run continues from; None for a new run."""
    trains: bool = field(default=True, kw_only=True)
    """True if there are steps. Else the first weights are only evaluated."""

    @property
    def first_version(self) -> int:
        """Policy version that this start of the run begins with: 0, or the checkpoint's."""
        return self.checkpoint.step if self.checkpoint else 0

    @functools.cached_property
    def probe(self) -> Probe:
        """The probe of a new run, or the checkpoint's."""
        saved = self.checkpoint and self.checkpoint.probe_of(self.cluster.node)
        return Probe(self.config, saved)

    def parts(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of a Rank by name, some of them changed."""
        return {field.name: getattr(self, field.name) for field in fields(Rank)} | changes

    def use_device(self) -> None:
        """Make this rank's GPU context. Plans of memory and engines come first, because they must not find it."""
        if self.device.type == "cuda":
            # torch reads the first that is set
            given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get(
                "PYTORCH_CUDA_ALLOC_CONF"
            )
            # Micro-batches of all lengths do not fragment segments that grow. An engine cannot open such segments.
            is_opened = self.placement.transport == "ipc"
            options = [f"expandable_segments:{not is_opened}", given]
            if is_opened:
                options.reverse()  # the last of two counts
            torch._C._accelerator_setAllocatorSettings(",".join(filter(None, options)))
            torch.cuda.set_device(self.device)
            for plugin in self.config.plugins:
                plugin.limit_memory(self)

    @contextmanager
    def wait_together(self) -> Iterator[None]:
        """Let all ranks leave the block together; collective. Only leaders wait for rollout inside.

        If one raises RolloutEnded inside, all ranks raise CannotContinue with the reason of the first such node.
        """
        reason = ""
        try:
            yield
        except RolloutEnded as error:
            reason = str(error)
        if self.cluster.is_leader:
            reason = next(filter(None, self.cluster.gather(reason)), "")
        reason = self.cluster.broadcast_on_node(reason)
        if reason:
            raise CannotContinue(reason) from None


@dataclass(frozen=True)
class Follower(Rank):
    """A rank that only trains. Its leader gives it its part of every batch."""

    model_path: str

    def take_batch(self, step: int, publisher: "Publisher") -> None:
        """Wait with the leader. It has the groups of the step; see Leader."""
        with self.wait_together():
            pass


@dataclass(frozen=True)
class Leader(Rank):
    """Local rank 0 of a node. It trains, and it has the node's records and rollout workers."""

    model_path: str
    run: RunDirectory
    tokenizer: Any
    controller: Controller
    controller_state: ControllerState | None
    """State that the controller of a resumed run continues from; None for a new run."""

    def launch(self) -> None:
        """Start the rollout workers; `on_end` stops them. Return when they are up only if they share a GPU."""
        self.on_end.callback(self.controller.stop)
        self.controller.launch()
        if any(worker.shared_with_rank is not None for worker in self.placement.workers):
            # The engine measures the free memory of the GPU, so the trainer must not take any meanwhile.
            self.controller.wait_until_ready()

    def connect_workers(self, specs: list[ParameterSpec]) -> None:
        """Wait until all engines of this node are up, and connect them to the weight transport."""
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

    def share_cores(self, model: PreTrainedModel) -> None:
        """Leave the engine's CPU cores, and compute on them only while the engine has no response to sample.

        Each layer of `model` chooses its cores before its forward and before its backward pass.
        """
        leave_cores(self.placement, self.on_end)

        def divide_cores(*_: Any) -> None:
            use_free_cores(self.placement, engine_is_idle=self.controller.is_idle())

        if any(worker.cores for worker in self.placement.workers):
            for layer in layers_of(model):
                layer.register_forward_pre_hook(divide_cores)
                layer.register_full_backward_pre_hook(divide_cores)

    def take_batch(self, step: int, publisher: "Publisher") -> list[Group]:
        """Wait for the groups that this node trains on in a step; collective.

        The publisher compares the engines' scores with the policy's before a step trains on their samples.
        Raises CannotContinue on all ranks, before any node consumes groups, if rollout has ended on a node.
        """
        self.clock.enter("wait")
        with self.wait_together():
            self.controller.wait_for_batch()
        groups = self.controller.consume_batch()
        publisher.check_engines(step)
        self.on_batch(step, groups)
        return groups

    def on_batch(self, step: int, groups: list[Group]) -> None:
        """Show the plugins a batch before the step that trains on it."""
        for plugin in self.config.plugins:
            plugin.on_batch(self, step, groups)
