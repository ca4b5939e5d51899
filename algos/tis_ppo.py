"""TIS-PPO: PPO's clip around the proximal policy, times a truncated weight for the token's staleness.

    u_t    = exp(log π(t) − log π_proximal(t))
    w_t    = min(exp(log π_proximal(t) − log π_behavior(t)), cap)
             with level "sequence" the cap is on the product of the sequence's ratios, which all its tokens get
    loss_t = −w_t·min(u_t·A, clip(u_t, 1 − clip_low, 1 + clip_high)·A)
    and with dual_clip c > 1, where A < 0:  loss_t = −w_t·max(min(...), c·A)

Acts on: B and U, token, weight and shape.
At lag: a token weighs B, at most the cap. None is left out, and the clip around the proximal policy does not see the
lag.

It is the TIS of verl, NeMo RL, SkyRL and slime: Yao et al. 2025, «Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training». Truncation is IMPALA's, arXiv 1802.01561, section 4.1; the clip is PPO's, arXiv 1707.06347,
eq. 7. verl and NeMo RL combine it with the dual clip, arXiv 1912.09729, section 3.
It is decoupled_ppo.py with `action=truncate` and a cap of 2, to the bit at level "token". ROLL's TIS (tis.py) is
another formula. It has no clip, and truncates one ratio, of the current policy to the one that sampled, at 1.
Differs from the paper: its weight compares training and inference engine at one version, and ours includes staleness.
Log-ratios are clamped to ±20 nats. The gradient passes through u and never through w, as everywhere.
The proximal policy of a step's first update is the current one, as in decoupled_ppo.py.
"""

from typing import Literal

from algos.inputs import AboveOne, Cap, LossInputs, LossOutput, NonNegative, Share
from algos.objectives import weighted_proximal_clip
from algos.ratio import sequence_sum


def loss(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
    cap: Cap = 2.0,
    level: Literal["token", "sequence"] = "token",
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: proximal_ratio (u), weight (w), clipped.

    `clipped` is 1 if the clip cuts the gradient to 0, or the cap makes it smaller.
    """
    log_staleness = inputs.log_staleness
    if level == "sequence":
        log_staleness = sequence_sum(log_staleness, inputs.sequence_ids)
    return weighted_proximal_clip(
        inputs, log_staleness, clip_low, clip_high, dual_clip, high=cap, beyond="truncate"
    )
