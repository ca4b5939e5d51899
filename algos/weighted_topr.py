"""Weighted TOPR: the two sides of TOPR with a weight each.

    loss_t = positive_weight·topr_t    where reward > 0
    loss_t = negative_weight·topr_t    elsewhere

Acts on: E, token, weight.
At lag: as topr, times the weight of its side.

ROLL Flash, arXiv 2510.11345, «Weighted TOPR»; TOPR itself is arXiv 2503.14286 (topr.py).
Differs from the paper: as topr.py. With weights other than 1 it is no policy gradient, even on fresh data. It trades
the pull of good responses against the push of bad ones.
"""

import torch

from algos.inputs import LossInputs, LossOutput, NonNegative
from algos.objectives import weighted_policy_gradient


def loss(
    inputs: LossInputs, *, positive_weight: NonNegative = 1.0, negative_weight: NonNegative = 1.0
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if a ratio is cut)."""
    ratio = inputs.ratio
    is_good = inputs.rewards > 0
    weight = torch.where(is_good, positive_weight, negative_weight * ratio.clamp(0, 1))
    return weighted_policy_gradient(inputs, weight, ratio, clipped=~is_good & (ratio > 1))
