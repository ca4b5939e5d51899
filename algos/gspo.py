"""GSPO: PPO's clip on one ratio per sequence, the geometric mean of its tokens' ratios.

    s      = exp(mean over the sequence of log π(t) − log π_behavior(t))
    loss_t = −min(s·A, clip(s, 1 − clip_low, 1 + clip_high)·A)      for every token; gradient flows through s

Acts on: E, sequence, shape.
At lag: a sequence weighs its ratio. Past the clip, on the side that its advantage points to, it has no gradient.

Group Sequence Policy Optimization, arXiv 2507.18071, section 4.1; the defaults are from its section 5.1.
Differs from the paper: the denominator is the engine's own log-prob. Every token has the loss of its sequence.
`loss_aggregation` chooses whether sequences (`sequence_mean`, as in the paper) or tokens weigh the same. The mean
log-ratio is clamped to ±20 nats. The gradient of one token's loss is spread over the sequence, −s·A/length to each
token. With every `loss_aggregation` the tokens of a sequence share their weight. If they share the advantage, too,
their sum is −s·A: on fresh data policy gradient. With an advantage per token every token would get the mean, so
`--advantage gae` is refused.
"""

from algos.inputs import LossInputs, LossOutput, NonNegative, Share, needs_equal_advantages
from algos.ratio import clipped_objective, importance_ratio, sequence_mean


@needs_equal_advantages
def loss(
    inputs: LossInputs, *, clip_low: Share = 3e-4, clip_high: NonNegative = 4e-4
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight (also of clipped tokens), clipped."""
    log_ratio = inputs.log_ratio
    ratio = importance_ratio(sequence_mean(log_ratio, inputs.sequence_ids))
    objective, clipped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high)
    return -objective, {"weight": ratio.detach(), "clipped": clipped.to(ratio.dtype)}
