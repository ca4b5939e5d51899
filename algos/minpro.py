"""MinPRO: a token weighs its own ratio times the least ratio of the tokens before it, truncated.

    r_k    = exp(log π(k) − log π_behavior(k))
    m_t    = min over the earlier tokens of the sequence of r_k; 1 for the first token
    loss_t = −sg(clip(r_t·m_t, 1 − clip_low, 1 + clip_high))·A·log π(t)          sg = stop-gradient

The ratio of the whole prefix is the unbiased one, but its product explodes or vanishes with length. The least of its
factors does neither. One unlikely token before lowers the weight of all that follow.

Acts on: E, prefix, weight.
At lag: a token weighs its ratio times the least ratio before it, cut into the clip. None is left out.

MinPRO, after arXiv 2601.22718. The formula was read in two later texts that state it, and not in the paper itself. Its
numbers were not found: the defaults are from DAPO's clip, arXiv 2503.14476. With a clip_low of 0.2 the prefix takes at
most a fifth of a weight. A long stale response has most weights at that end. A clip_low of 1 has no lower end.
Differs from the paper, as far as known: the denominator is the engine's own log-prob. 1/length is a choice of
`loss_aggregation`. Log-ratios are clamped to ±20 nats. Tokens of the environment are not part of the prefix.
PNPO (pnpo.py) takes the geometric mean of the prefix, the token included, and leaves tokens out.
"""

import torch
from torch import Tensor

from algos.inputs import LossInputs, LossOutput, NonNegative, Share
from algos.objectives import weighted_policy_gradient
from algos.ratio import MAX_LOG_RATIO, importance_ratio, places


def loss(inputs: LossInputs, *, clip_low: Share = 0.2, clip_high: NonNegative = 0.28) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped."""
    log_ratio = inputs.log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    product = importance_ratio(log_ratio + _least_before(log_ratio, inputs.sequence_ids))
    weight = product.clamp(1 - clip_low, 1 + clip_high)
    return weighted_policy_gradient(inputs, weight, inputs.ratio, clipped=weight != product)


def _least_before(log_ratio: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the least of `log_ratio` [N] among earlier tokens of its sequence, 0 for the first, [N]."""
    # Each sequence lies below the one before it, so a running minimum begins anew with each.
    least = (log_ratio.double() - 3 * MAX_LOG_RATIO * sequence_ids).cummin(0).indices
    return torch.where(places(sequence_ids) == 0, 0.0, log_ratio[least].roll(1))
