"""IcePop: PPO's clip around the proximal policy, without tokens that are too far from the policy that sampled them.

    u_t    = exp(log π(t) − log π_proximal(t))
    k_t    = exp(log π_proximal(t) − log π_behavior(t)), or its geometric mean over the sequence with level "sequence"
    w_t    = k_t where low ≤ k_t ≤ high, or 1 there with weighs=false; else 0
    loss_t = −w_t·min(u_t·A, clip(u_t, 1 − clip_low, 1 + clip_high)·A)

Acts on: B and U, token, mask, weight and shape.
At lag: a token weighs B inside the band, and is left out outside. The clip around the proximal policy does not see the
lag.

Ling team, «Every Step Evolves» (Ring-1T), arXiv 2510.18855: IcePop is its mask M(k; α, β) with α = 0.5, β = 5.
Differs from the paper: its k compares training and inference engine at one version, and ours includes staleness. Level
"sequence" is ours. It weighs by the geometric mean. That is no importance weight, but has the scale of one token's. A
token left out stays in the denominator of the mean. The KL term is the trainer's. Log-ratios are clamped to ±20 nats.
The proximal policy of a step's first update is the current one, as in decoupled_ppo.py.
With `weighs=false` the mask is only a trust region. The paper multiplies by k, and verl's rejection sampling
(`rollout_rs` without `rollout_is`) does not.
"""

from typing import Literal

from algos.inputs import BelowOne, Cap, LossInputs, LossOutput, NonNegative, Share
from algos.objectives import weighted_proximal_clip
from algos.ratio import sequence_mean


def loss(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    low: BelowOne = 0.5,
    high: Cap = 5.0,
    level: Literal["token", "sequence"] = "token",
    weighs: bool = True,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: proximal_ratio (u), weight (w), clipped.

    `clipped` is 1 if the clip or the mask cuts the gradient to 0.
    """
    log_staleness = inputs.log_staleness
    if level == "sequence":
        log_staleness = sequence_mean(log_staleness, inputs.sequence_ids)
    return weighted_proximal_clip(
        inputs, log_staleness, clip_low, clip_high, low=low, high=high, weighs=weighs
    )
