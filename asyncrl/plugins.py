"""Changes of a run by optional systems. One class has a part or a method for each place of the core that asks.

`PLUGIN` of a module of extras/ is an instance. `Config.plugins` lists the instances of the options in use. A class that
a plugin gives to the core overrides public names only.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig

    from asyncrl.cluster.cluster import Cluster
    from asyncrl.cluster.placement import Placement, WorkerSpec
    from asyncrl.config import Config, Rule
    from asyncrl.controller.controller import Controller
    from asyncrl.controller.tickets import TicketSource
    from asyncrl.controller.workers import Workers
    from asyncrl.engine.environments import Environments
    from asyncrl.job.node import Follower, Leader, Rank
    from asyncrl.records import Group
    from asyncrl.runlog.run_directory import RunDirectory
    from asyncrl.trainer.logprobs import TokenLogprobs, TokenScores
    from asyncrl.trainer.packing import Bundle, MicroBatch, TrainSequence
    from asyncrl.trainer.policy import Policy
    from data.problem import Task


Given = TypeVar("Given")


def last_given(values: Iterable[Given | None], default: Given) -> Given:
    """Return the last value that a plugin gives, or the core's own."""
    return [default, *(value for value in values if value is not None)][-1]


class Plugin:
    """Changes by an optional system. By default no part and no method changes a run."""

    rules: ClassVar[Sequence["Rule"]] = ()
    """Combinations of options that are refused, each with its error."""

    # Dispatch

    controller: ClassVar[type["Controller"] | None] = None
    """Leads rollout. Its `dispatcher_class` decides which groups start and which worker gets a ticket. It also answers
    messages that the controller does not know. Its `buffer_class` decides which groups make a batch."""
    workers: ClassVar[type["Workers"] | None] = None
    """Starts and replaces a node's rollout workers."""
    tickets: ClassVar[type["TicketSource"] | None] = None
    """Makes the tickets of groups (`for_group`)."""

    # A task

    def prepare_task(self, config: "Config") -> Callable[[], "Task"] | None:
        """Return a function that makes the task and reads its data; None for a task of another kind.

        Raises ValueError for a wrong name or argument.
        """

    def start_environments(self, spec: "WorkerSpec", tokenizer) -> "Environments | None":
        """Return the environments of a worker's task; None for the core's own."""

    # A rollout worker

    rollout_worker: ClassVar[type | None] = None
    """A class of rollout.RolloutWorker. It acts on messages (`act`), and makes the episodes of a ticket
    (`make_episodes`)."""

    def engine_options(self, on_cpu: bool) -> dict[str, Any]:
        """Return more arguments of vLLM's engine. The process that starts the engine calls this."""
        return {}

    # A run

    ranks: ClassVar[tuple[type["Leader"], type["Follower"]] | None] = None
    """Classes of a node's ranks: how they wait for a batch (`take_batch`) and start (`launch`)."""

    def start_tracker(
        self, config: "Config", run_path: Path, run_id: str, resumed_from: int | None
    ) -> Any:
        """Return a second place for metrics; None gives no such place. It has `log(metrics, step=)` and `finish()`.

        The run is resumed from the step `resumed_from`, or new.
        """

    def fit_memory(
        self, config: "Config", placement: "Placement", model_path: str, cluster: "Cluster"
    ) -> "tuple[Config, Placement] | None":
        """Return options and placement that fit the memory of a node's GPUs; collective on leaders.

        None leaves both unchanged. Raises ValueError if no options fit.
        """

    def limit_memory(self, rank: "Rank") -> None:
        """Limit the memory that a rank takes of its GPU, before it takes any."""

    def check(self, config: "Config", hf_config: "PreTrainedConfig") -> None:
        """Raise ValueError, in one line, for a model that does not fit the options."""

    def on_batch(self, leader: "Leader", step: int, groups: list["Group"]) -> None:
        """Act on a batch before the step that trains on it."""

    def on_step(self, run: "RunDirectory", metrics: dict[str, float]) -> None:
        """Act on the metrics of a step after they were logged, on rank 0."""

    def keep_batch(
        self, rank: "Leader | Follower", policy: "Policy", step: int, groups: list["Group"] | None
    ) -> str | None:
        """Keep the batch of a step that failed, and return the end of its error, on rank 0; collective.

        Leaders have the `groups` of their node. None stands for a batch that is not kept.
        """

    def on_end(self, run_path: Path) -> None:
        """Act after the last step, on rank 0."""

    def make_policy_plugin(self, policy: "Policy") -> "PolicyPlugin | None":
        """Return the changes of a policy's passes and updates; None for a policy that is unchanged."""


class PolicyPlugin:
    """Changes of one policy by an optional system. By default no method changes it.

    The policy lists them in the order of `Config.plugins`, and asks each at the same places on all ranks.
    """

    def split_over_ranks(
        self, sequences: list["TrainSequence"], num_ranks: int
    ) -> "list[list[Bundle]] | None":
        """Return the sequences of an update as bundles for each rank; None leaves that to the policy."""

    def extend_batch(self, batch: "MicroBatch", bundles: list["Bundle"]) -> "MicroBatch":
        """Return a micro-batch of a step, packed from `bundles`, with more fields or columns; it is on the host."""
        return batch

    def forward(
        self,
        score: Callable[..., "TokenScores"],
        module: "TokenLogprobs",
        batch: "MicroBatch",
        attention_kwargs: dict | None,
    ) -> "TokenScores":
        """Return the scores of a micro-batch by `score(module, batch, attention_kwargs)`: the rest of the pass.

        `module` is that of the policy or of the reference. `attention_kwargs` are the model's arguments that tell which
        tokens see which; None derives them from positions.
        """
        return score(module, batch, attention_kwargs)

    def extra_loss(self, batch: "MicroBatch", num_sequences: float) -> "Tensor | float":
        """Return a micro-batch's part, [] float32, of a loss beside that of tokens.

        It is called once after each forward pass of an update with `num_sequences` trained sequences on all ranks.
        """
        return 0.0

    def after_backward(self) -> None:
        """Change the gradients of an update before they are clipped."""

    def skips_update(self, loss: float, is_finite: bool) -> bool:
        """Return whether to drop an update. `loss` and `is_finite`, of loss and gradient, are equal on all ranks."""
        return False

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step that ends, by their names in the log, equal on all ranks; collective."""
        return {}
