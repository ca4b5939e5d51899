"""The two forms that most losses have: a weight times policy gradient, and a weight times PPO's clip."""

from typing import Literal

import torch
from torch import Tensor

from algos.inputs import LossInputs, LossOutput
from algos.ratio import clipped_objective, importance_ratio


def weighted_policy_gradient(
    inputs: LossInputs, weight: Tensor, ratio: Tensor, clipped: Tensor | None = None
) -> LossOutput:
    """Return −weight·A·log π(t), [N], and the stats [N]: weight, clipped.

    `weight` and `ratio` [N] carry no gradient. `clipped` [N] bool is by default True if the weight is not the ratio.
    """
    if clipped is None:
        clipped = weight != ratio
    stats = {"weight": weight, "clipped": clipped.to(ratio.dtype)}
    return -weight * inputs.advantages * inputs.logprobs, stats


def weighted_proximal_clip(
    inputs: LossInputs,
    log_staleness: Tensor,
    *clips: float | None,
    low: float = 0.0,
    high: float,
    beyond: Literal["mask", "truncate"] = "mask",
    weighs: bool = True,
) -> LossOutput:
    """Return −w·(PPO's clipped objective of u = π(t)/π_proximal(t)), [N], and the stats [N].

    `clips` are clip_low, clip_high and dual_clip of `clipped_objective`. `log_staleness` [N] nats, without gradient, is
    the logarithm of a ratio, k. If low ≤ k ≤ high, w is k, or 1 unless it `weighs`. Beyond, w is 0 with "mask" and
    `high` with "truncate". The stats are proximal_ratio (u), weight (w) and clipped. A token is clipped if the clip
    cuts its gradient to 0, or if k is outside.
    """
    stale = importance_ratio(log_staleness)
    outside = (stale < low) | (stale > high)
    weight = torch.where(
        outside, 0.0 if beyond == "mask" else high, stale if weighs else torch.ones_like(stale)
    )
    moved = importance_ratio(inputs.logprobs - inputs.proximal_logprobs)
    objective, clipped = clipped_objective(moved, inputs.advantages, *clips)
    return -weight * objective, {
        "proximal_ratio": moved.detach(),
        "weight": weight,
        "clipped": (clipped | outside).to(moved.dtype),
    }
