"""The inputs of a policy loss: the trained tokens of a micro-batch, flat, without padding or mask; and its options.

The ranges of options are annotations in a loss's signature. A ratio is at most e²⁰, so 1e9 does not limit it; float32
ends below 1e39. A loss itself checks for two arguments that exclude each other. asyncrl/trainer/loss_choice.py refuses
a loss that would not train.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed as dist
from msgspec import Meta
from torch import Tensor
from torch.utils._pytree import tree_map

from algos.ratio import importance_ratio

_FRESH = "where 1 is the ratio of a fresh token"

Share = Annotated[float, Meta(ge=0, le=1)]
BelowOne = Annotated[float, Meta(ge=0, lt=1, description=_FRESH)]
Divisor = Annotated[float, Meta(ge=1e-6, le=1e6)]
NonNegative = Annotated[float, Meta(ge=0, le=1e9)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Cap = Annotated[float, Meta(ge=1, le=1e9, description=_FRESH)]
AboveOne = Annotated[float, Meta(gt=1, le=1e9)]


@dataclass(frozen=True)
class LossInputs:
    """N trained tokens of one micro-batch, N ≥ 1; float32, or float64 which is then computed in float64."""

    logprobs: Tensor
    """[N] nats, current policy; the only field that carries gradient."""
    behavior_logprobs: Tensor
    """[N] nats, recorded by the engine when the token was sampled; never recomputed."""
    proximal_logprobs: Tensor
    """[N] nats, trainer's policy at the start of the step, before its first update; see also algos/proximal.py."""
    advantages: Tensor
    """[N] advantage of the token: that of its sequence, but with `--advantage gae` its own."""
    rewards: Tensor
    """[N] task reward of the token's sequence."""
    sequence_ids: Tensor
    """[N] int64, non-decreasing; the sequences that have a trained token, numbered 0 … S−1 in the micro-batch. Each
    sequence's tokens are in the order of their sampling."""
    lags: Tensor | None = None
    """[N] int64, the policy's version at the step's start − the token's, steps; 0 for all if it is not given."""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """[N] or [N, K], by name: recorded columns (asyncrl.records.TokenColumns), and columns that the trainer added."""

    def __post_init__(self) -> None:
        if self.lags is None:
            object.__setattr__(self, "lags", torch.zeros_like(self.sequence_ids))

    @property
    def log_ratio(self) -> Tensor:
        """log π(t) − log π_behavior(t), [N] nats: how far the policy has moved; carries gradient."""
        return self.logprobs - self.behavior_logprobs

    @property
    def ratio(self) -> Tensor:
        """π(t)/π_behavior(t), [N], from a clamped log-ratio (importance_ratio); without gradient."""
        return importance_ratio(self.log_ratio.detach())

    @property
    def log_staleness(self) -> Tensor:
        """log π_proximal(t) − log π_behavior(t), [N] nats: how stale a token was when the step began."""
        return self.proximal_logprobs - self.behavior_logprobs

    def to(self, device: torch.device | str) -> "LossInputs":
        """Return a copy on `device`, without gradient."""
        return LossInputs(**tree_map(lambda column: column.detach().to(device), vars(self)))


LossOutput = tuple[Tensor, dict[str, Tensor]]
"""The loss of each token, [N], and detached statistics of tokens by name, [N] each."""


def couples_tokens(loss: Callable) -> bool:
    """Return whether a loss couples all tokens of an optimizer update: then its second parameter is named `update`.

    The loss gets there the LossInputs of all trained tokens of the update, of all micro-batches and ranks, without
    gradient. The trainer makes one more pass over the update for it. A token's loss must depend on other
    tokens only through `update`. Then micro-batches, packing and ranks never change the gradient.
    """
    return "update" in inspect.signature(loss).parameters


def keywords_of(loss: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a loss that `--algo-args` may set."""
    _, *parameters = inspect.signature(loss, eval_str=True).parameters.values()
    return [parameter for parameter in parameters if parameter.name != "update"]


def needs_equal_advantages(loss: Callable) -> Callable:
    """Mark a loss that is right only if all tokens of a sequence have one advantage: no `--advantage gae`."""
    loss.needs_equal_advantages = True
    return loss


def joined(parts: Sequence[LossInputs]) -> LossInputs:
    """Return the tokens of several micro-batches in one, some perhaps empty, with sequences numbered through."""
    parts = [part for part in parts if len(part.logprobs)] or parts[
        :1
    ]  # an empty one lacks columns
    values = tree_map(lambda *columns: torch.cat(columns), *map(vars, parts))
    counts = [int(part.sequence_ids.max()) + 1 if len(part.sequence_ids) else 0 for part in parts]
    firsts = torch.tensor([0, *counts]).cumsum(0).tolist()
    ids = [part.sequence_ids + first for part, first in zip(parts, firsts[:-1], strict=True)]
    return LossInputs(**values | {"sequence_ids": torch.cat(ids)})


def gathered(parts: Sequence[LossInputs]) -> LossInputs:
    """Return the tokens of several micro-batches of each rank, without gradient, on the device of the first."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, joined(parts).to("cpu"))
    return joined(of_ranks).to(parts[0].logprobs.device)
