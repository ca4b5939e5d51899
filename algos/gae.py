"""Generalised advantage estimation: advantages of single tokens, from values of the states before and after them.

    δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        G_t = V_t + A_t, with value_lam for λ

over the trained tokens t = 1 … n of a sequence. Schulman et al., arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347,
equations 11 and 12. V_t is the value of all tokens before token t; r_t is 0 but for r_n, the reward, and what follows
the last token counts 0, also where a response was cut. Tokens of an environment are seen, but are no step of their own:
after the last token of a turn comes the first of the next.

G_t, which the values are fitted to, are returns of the policy that sampled. With stale data that is an older one; with
λ = 1 they are what it got, without bias, and V is a baseline only. Nothing here corrects for how far the trained policy
has gone from it, as V-trace does (arXiv 1802.01561): that is left to the loss. A loss that needs equal advantages for
all tokens of a sequence is refused (algos/inputs.py).
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from algos.advantages import EPS

T = TypeVar("T", bound="Tokens")


def gae(rewards: Tensor, values: Tensor, sequence_ids: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantage of each trained token, [N] float64.

    `rewards` [N] of the token's sequence, `values` [N] before the token, `sequence_ids` [N] int64 as in LossInputs.
    """
    if not len(values):
        return values.double()
    counts = torch.bincount(sequence_ids)
    places = torch.arange(len(values), device=values.device) - (counts.cumsum(0) - counts)[sequence_ids]
    is_last = places == counts[sequence_ids] - 1
    gained = torch.where(is_last, rewards.double(), gamma * values.double().roll(-1))
    by_place = gained.new_zeros(int(counts.max()), len(counts))  # so that every sequence takes a step back at once
    by_place[places, sequence_ids] = gained - values.double()
    for place in range(len(by_place) - 2, -1, -1):
        by_place[place] += gamma * lam * by_place[place + 1]
    return by_place[places, sequence_ids]


class Tokens(Protocol):
    """The trained tokens of a micro-batch: a dataclass with these fields, [N], as in asyncrl/trainer/packing.py."""

    advantages: Tensor
    """At first the reward of the token's sequence."""
    sequence_ids: Tensor
    returns: Tensor | None


def of_step(
    updates: list[list[T]],
    values: list[list[Tensor]],
    total: Callable[[Tensor], Tensor],
    *,
    gamma: float,
    lam: float,
    value_lam: float,
    whiten: bool,
) -> tuple[list[list[T]], dict[str, float]]:
    """Give the tokens of all micro-batches of a step, [update][micro-batch], their own advantages and returns.

    `values` are [N] for each of them, and `total` sums a tensor over all ranks. Also returns the share of the returns'
    variance that the values explain: 1 if they are right, 0 if they are as good as any constant; absent where all
    returns are equal.
    """
    batches, found = [batch for update in updates for batch in update], []
    for batch, of in zip(batches, itertools.chain(*values), strict=True):
        tokens = batch.advantages.cpu(), of.cpu(), batch.sequence_ids.cpu()
        advantages, errors = (gae(*tokens, gamma, decay) for decay in (lam, value_lam))
        found.append(torch.stack([advantages, tokens[1] + errors, errors]))
    columns = torch.cat(found, dim=1)
    sums = total(torch.cat([columns.sum(1), (columns**2).sum(1), columns.new_tensor([columns.shape[1]])])).cpu()
    mean = sums[:3] / sums[-1]
    variance = (sums[3:6] - sums[-1] * mean**2).clamp(min=0) / (sums[-1] - 1).clamp(min=1)
    if whiten:
        for of in found:
            of[0] = (of[0] - mean[0]) / (variance[0].sqrt() + EPS)
    made = iter([_with(batch, *of[:2]) for batch, of in zip(batches, found, strict=True)])
    explained = {"value/explained_variance": float(1 - variance[2] / variance[1])} if variance[1] > EPS**2 else {}
    return [[next(made) for _ in update] for update in updates], explained


def _with(batch: T, advantages: Tensor, returns: Tensor) -> T:
    """The micro-batch with these columns, [N] float32, where its other ones are."""
    columns = {"advantages": advantages, "returns": returns}
    return replace(batch, **{name: of.to(batch.advantages) for name, of in columns.items()})
