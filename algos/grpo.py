"""GRPO / PPO clip: pessimistic clipped importance sampling against the behaviour policy.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −min(r_t·A, clip(r_t, 1 − clip_low, 1 + clip_high)·A)
    and with dual_clip c > 1, where A < 0:  loss_t = −max(min(...), c·A)

Acts on: E, token, shape.
At lag: a token weighs its ratio. Past the clip, on the side that its advantage points to, it has no gradient.

PPO, arXiv 1707.06347, eq. 7; GRPO, arXiv 2402.03300, eq. 3; clip_high > clip_low («clip-higher») is DAPO,
arXiv 2503.14476, eq. 10; the dual clip is arXiv 1912.09729, section 3. INTELLECT-2's two-sided clip (arXiv 2505.07291)
has min(r, δ)·A in place of r·A. It is the dual clip with c = δ if δ is at least 1 + clip_high, as intended.
Differs from the paper: the denominator is the engine's own log-prob, so one update per step still corrects for
staleness. The KL term is the trainer's (`kl_coef`), and 1/length is a choice of `loss_aggregation`. Log-ratios are
clamped to ±20 nats.
"""

from algos.inputs import AboveOne, LossInputs, LossOutput, NonNegative, Share
from algos.ratio import clipped_objective, importance_ratio


def loss(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: clipped (1 if the gradient is cut to 0)."""
    ratio = importance_ratio(inputs.log_ratio)
    objective, clipped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high, dual_clip)
    return -objective, {"clipped": clipped.to(ratio.dtype)}
