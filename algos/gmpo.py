"""GMPO: each token is clipped, and the sequence weighs by the geometric mean of the clipped ratios.

    l_t    = log π(t) − log π_behavior(t), at most log_clip_high where A > 0, at least −log_clip_low where A < 0
    g      = exp(mean over the sequence of l)
    loss_t = −g·A          for every token; gradient flows through g to the tokens that are not clipped

Acts on: E, token and sequence, shape.
At lag: a sequence weighs the geometric mean of its clipped ratios. A token past the clip, on the side that its
advantage points to, has no gradient.

Geometric-Mean Policy Optimization, arXiv 2507.20673. The defaults are its range of ratios, exp(−0.4) … exp(0.4).
GSPO (gspo.py) takes the mean first and clips afterwards. It cuts a sequence as a whole, GMPO token by token.
Differs from the paper: the denominator is the engine's own log-prob. Every token has the loss of its sequence.
`loss_aggregation` chooses whether sequences (`sequence_mean`, as in the paper) or tokens weigh the same. The mean
log-ratio is clamped to ±20 nats. Others: verl and TRL clip in nats too, as here. The gradient of one token's loss is
spread over the sequence, −g·A/length to each token. With every `loss_aggregation` the tokens of a sequence share their
weight. If they share the advantage, too, their sum is −g·A: on fresh data policy gradient. With an advantage per token
every token would get the mean, so `--advantage gae` is refused.
"""

import torch

from algos.inputs import LossInputs, LossOutput, Positive, needs_equal_advantages
from algos.ratio import importance_ratio, is_past, sequence_mean


@needs_equal_advantages
def loss(
    inputs: LossInputs, *, log_clip_low: Positive = 0.4, log_clip_high: Positive = 0.4
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (gradient cut to 0).

    `log_clip_low` and `log_clip_high` are in nats; weight is g, and 0 if a token is clipped.
    """
    log_ratio = inputs.log_ratio
    detached = log_ratio.detach()
    clipped = is_past(detached, inputs.advantages, -log_clip_low, log_clip_high)
    log_clipped = torch.where(clipped, detached.clamp(-log_clip_low, log_clip_high), log_ratio)
    mean_ratio = importance_ratio(sequence_mean(log_clipped, inputs.sequence_ids))
    return -mean_ratio * inputs.advantages, {
        "weight": torch.where(clipped, 0.0, mean_ratio.detach()),
        "clipped": clipped.to(detached.dtype),
    }
