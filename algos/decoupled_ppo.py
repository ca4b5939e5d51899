"""Decoupled PPO: PPO's clip around the proximal policy, times a weight that corrects for staleness.

    u_t    = exp(log π(t) − log π_proximal(t))                     how far this step has moved
    w_t    = exp(log π_proximal(t) − log π_behavior(t))            how stale the token was when the step began
    loss_t = −w_t·min(u_t·A, clip(u_t, 1 − clip_low, 1 + clip_high)·A)
    action "mask": w_t = 0 where w_t > behavior_weight_cap;  "truncate": w_t = min(w_t, the cap)

Acts on: B and U, token, mask, weight and shape.
At lag: a token weighs B, and is left out where B is above the cap. The clip around the proximal policy does not see the
lag.

AReaL, arXiv 2505.24298, eq. 5; the decoupling is arXiv 2110.00641. The proximal policy is the trainer's at the start of
the step. In the first update of a step it is the current one. Then u is 1, the clip has no effect, and the gradient is
−w·A, importance-weighted policy gradient. With `minibatches` 1 there is no other update, and that is right.
Differs from the paper: w is capped, as in its code. A cap of 5 per token was then the default. A masked token stays in
the denominator of the mean, because token weights are fixed before the loss. Log-ratios are clamped to ±20 nats.
"""

from typing import Literal

from algos.inputs import Cap, LossInputs, LossOutput, NonNegative, Share
from algos.objectives import weighted_proximal_clip


def loss(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    behavior_weight_cap: Cap = 5.0,
    action: Literal["mask", "truncate"] = "mask",
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: proximal_ratio (u), weight (w), clipped.

    `clipped` is 1 if the clip or the mask cuts the gradient to 0, or the cap makes it smaller.
    """
    return weighted_proximal_clip(
        inputs, inputs.log_staleness, clip_low, clip_high, high=behavior_weight_cap, beyond=action
    )
