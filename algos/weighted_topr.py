"""Weighted TOPR: the two sides of TOPR with a weight each.

    loss_t = positive_weight·topr_t    where reward > 0
    loss_t = negative_weight·topr_t    elsewhere

ROLL Flash, arXiv 2510.11345, «Weighted TOPR»; TOPR itself is arXiv 2503.14286 (topr.py).
Differs from the paper: as topr.py. With weights other than 1 it is not policy gradient even on fresh data: that is the
option's purpose, it trades the pull of good responses against the push of bad ones.
"""

import torch
from torch import Tensor

from algos import topr
from algos.arguments import NonNegative
from algos.inputs import LossInputs


def loss(
    inputs: LossInputs, *, positive_weight: NonNegative = 1.0, negative_weight: NonNegative = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss [N], and the detached stats [N]: ratio, weight, clipped (1 where a ratio is cut).

    Raises ValueError where both weights are 0.
    """
    if positive_weight == negative_weight == 0:
        raise ValueError(
            "positive_weight and negative_weight are both 0, and nothing is trained; one must be above 0"
        )
    per_token_loss, stats = topr.loss(inputs)
    side = torch.where(
        inputs.rewards > 0, positive_weight, torch.full_like(inputs.rewards, negative_weight)
    )
    return side * per_token_loss, {**stats, "weight": side * stats["weight"]}
