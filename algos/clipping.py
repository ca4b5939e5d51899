"""The pessimistic clip of PPO, which several losses share: they differ in the ratio that they give it.

    objective = min(ratio·A, clip(ratio, 1 − clip_low, 1 + clip_high)·A)

PPO, arXiv 1707.06347, eq. 7; clip_high > clip_low («clip-higher») is DAPO, arXiv 2503.14476, eq. 10.
"""

import torch
from torch import Tensor


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the objective [N], to be maximised, and where its gradient is cut to 0, [N] bool; ratio, advantages [N].

    Only a ratio past the clip in the direction that the advantage asks for is cut.
    """
    objective = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    return objective, is_past_clip(ratio.detach(), advantages, clip_low, clip_high)


def is_past_clip(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where a good token is likelier than the clip allows, or a bad one less likely, [N] bool."""
    return is_past(ratio, advantages, 1 - clip_low, 1 + clip_high)


def is_past(moved: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Where `moved` [N] is above `high` on a good token, or below `low` on a bad one, [N] bool."""
    return ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < low))
