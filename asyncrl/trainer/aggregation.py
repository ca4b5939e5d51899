"""Weighs each trained token once for the whole update, by --loss-aggregation."""

from typing import NamedTuple

import torch
from torch import Tensor

from asyncrl.config import Config


class UpdateTotals(NamedTuple):
    """Totals of one optimizer update over all ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences with a trained token."""
    trajectories: float
    """Trajectories with a trained token; fewer than sequences if some have several segments."""


def token_weights(trained_in_trajectory: Tensor, totals: UpdateTotals, config: Config) -> Tensor:
    """Return the weight [N] float32 of each trained token in the summed loss of one update.

    `trained_in_trajectory` [N] int64 as in MicroBatch. Totals of the whole update make the gradient independent of
    micro-batches, packing and ranks.
    """
    divisors = {
        "token_mean": totals.tokens,
        "sequence_mean": totals.trajectories * trained_in_trajectory.double(),
        "constant": totals.trajectories * config.max_response_tokens,
    }
    ones = torch.ones_like(trained_in_trajectory, dtype=torch.float64)
    weights = ones / divisors[config.loss_aggregation]
    return weights.float()
