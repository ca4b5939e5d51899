"""M2PO: no clip. The tokens that moved furthest are left out, until the second moment of the update is small enough.

    r_t    = exp(log π(t) − log π_behavior(t)),    m_t = (log r_t)²
    M_t    = 0 for the tokens with the largest m_t among those that go on moving away (A·log r_t > 0), until the mean of
             m over those of them that are left, in the whole update, is at most m2_threshold; else 1
    loss_t = −M_t·r_t·A

Acts on: E, update, mask and shape.
At lag: a token weighs its ratio. Some tokens moved the way their advantage points. The furthest of these are left out,
until the second moment is below the threshold.

Second-Moment Trust Policy Optimization, arXiv 2510.01161, algorithm 1. The mean of m is over the tokens that go on, as
in Trinity-RFT and ms-swift. The loss couples all tokens of an update. A token that is left out stays in the
denominator of the mean loss.
Differs: tokens that moved exactly as far as the last one left out go with it. The logarithm of r, not that in m, is
clamped to ±20 nats.
The authors' code cuts more tokens. It solves Σ min(m, τ²) = m2_threshold·n for τ, and clips there. A cut token still
counts τ² in their sum, and here it does not count. By default their clip is never inside 0.7 … 1.5.
AReaL has another form. Its m compares the proximal policy with the one that sampled. It leaves out tokens of either
direction, in each micro-batch, until the mean is below the threshold. One token always stays. Tokens left out leave the
loss mask, and so the denominator. Its PPO clip stays on top.
"""

import torch
from torch import Tensor

from algos.inputs import LossInputs, LossOutput, Positive
from algos.ratio import importance_ratio


def loss(inputs: LossInputs, update: LossInputs, *, m2_threshold: Positive = 0.04) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: clipped (1 if a token is left out)."""
    moments, goes_on = _moments(inputs)
    left_out = goes_on & (moments >= _least_left_out(*_moments(update), m2_threshold))
    ratio = importance_ratio(inputs.log_ratio)
    per_token_loss = torch.where(left_out, 0.0, -ratio * inputs.advantages)
    return per_token_loss, {"clipped": left_out.to(ratio.dtype)}


def _moments(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return m [N], nats², and whether the gradient moves a token further from the policy that sampled it, [N] bool."""
    log_ratio = inputs.log_ratio.detach()
    return log_ratio.square(), inputs.advantages * log_ratio > 0


def _least_left_out(moments: Tensor, goes_on: Tensor, threshold: float) -> Tensor:
    """Return the smallest m that is left out of the update; infinite if all are kept."""
    # Tokens that do not go on count as 0. To drop or count them, a host waits for its GPU.
    ascending = torch.where(goes_on, moments, 0.0).sort().values
    # The mean of the smallest 1, 2, 3 … rises, so means within the threshold come first.
    is_small = ascending.double().cumsum(0) <= threshold * (ascending > 0).cumsum(0)
    return torch.cat([ascending, moments.new_full((1,), torch.inf)]).take(is_small.sum())
