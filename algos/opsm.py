"""OPSM: GRPO's clip, without bad responses that the policy has moved away from.

    r_t    = exp(log π(t) − log π_behavior(t))
    M      = 0 where A < 0 and mean over the sequence of log π_behavior(t) − log π(t) > delta; else 1
    loss_t = −M·min(r_t·A, clip(r_t, 1 − clip_low, 1 + clip_high)·A)

Acts on: E, token and sequence, mask and shape.
At lag: as grpo, and a bad sequence is left out if its tokens became less likely by more than delta on average.

DeepSeek-V3.2, arXiv 2512.02556, eq. 9, «off-policy sequence masking». M carries no gradient. The mean estimates
KL(behavior ‖ π) in nats per token. Good responses stay, however far. With an advantage per token no whole response is
good or bad, so `--advantage gae` is refused.
Differs from the paper: it gives no delta. TRL's example is 0.5, the default here; slime's default is 1e-4. The KL term
is the trainer's (`kl_coef`), and 1/length is a choice of `loss_aggregation`. A sequence left out stays in the
denominator of the mean. Log-ratios are clamped to ±20 nats.
Others: TRL has the policy that sampled in the mask, as here, and its trainer's log-probs in the clip. By default slime
has its trainer's log-probs in both.
"""

import torch

from algos.inputs import (
    LossInputs,
    LossOutput,
    NonNegative,
    Positive,
    Share,
    needs_equal_advantages,
)
from algos.ratio import clipped_objective, importance_ratio, sequence_mean


@needs_equal_advantages
def loss(
    inputs: LossInputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NonNegative = 0.2,
    delta: Positive = 0.5,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (gradient cut to 0).

    `delta` is in nats per token; weight is the ratio, and 0 if the sequence is left out.
    """
    log_ratio = inputs.log_ratio
    left_out = (inputs.advantages < 0) & (
        -sequence_mean(log_ratio.detach(), inputs.sequence_ids) > delta
    )
    ratio = importance_ratio(log_ratio)
    objective, clipped = clipped_objective(ratio, inputs.advantages, clip_low, clip_high)
    return torch.where(left_out, 0.0, -objective), {
        "weight": torch.where(left_out, 0.0, ratio.detach()),
        "clipped": (clipped | left_out).to(ratio.dtype),
    }
