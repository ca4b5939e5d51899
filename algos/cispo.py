"""CISPO: the clip limits the importance weight and not the update, so rare tokens keep their gradient.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −sg(clip(r_t, 1 − clip_low, 1 + clip_high))·A·log π(t)          sg = stop-gradient
    and with unified_mask, weight 0 where PPO would cut the gradient:
             (A > 0 and r_t > 1 + clip_high) or (A < 0 and r_t < 1 − clip_low)

Acts on: E, token, weight.
At lag: a token weighs its ratio, cut into the range of the clip. None is left out, except with the unified mask.

MiniMax-M1, arXiv 2506.13585, section 3.1; its «unified» form has the mask.
Differs from the paper: the denominator is the engine's own log-prob. The paper has no lower bound of the weight
(`clip_low=1`) and tunes the upper one. The defaults are from ROLL Flash's code. The mask has the range of the clip. The
advantage normalises by group, and `loss_aggregation` by length.
"""

import torch

from algos.inputs import LossInputs, LossOutput, NonNegative, Share
from algos.objectives import weighted_policy_gradient
from algos.ratio import is_past


def loss(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.1,
    clip_high: NonNegative = 0.1,
    unified_mask: bool = False,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if weight ≠ ratio)."""
    ratio = inputs.ratio
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    if unified_mask:
        is_cut = is_past(ratio, inputs.advantages, 1 - clip_low, 1 + clip_high)
        weight = torch.where(is_cut, 0.0, weight)
    return weighted_policy_gradient(inputs, weight, ratio)
