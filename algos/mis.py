"""MIS: masked importance sampling. Tokens outside a band of ratios are left out; TIS would truncate them.

    r_t    = exp(log π(t) − log π_behavior(t))
    level "token":      w_t = r_t where low ≤ r_t ≤ high, else 0
    level "sequence":   w_t = s where low ≤ s ≤ high, else 0, with s = Π r over the sequence
    level "geometric":  w_t = r_t where low ≤ g ≤ high, else 0, with g = exp(mean over the sequence of log r)
    loss_t = −sg(min(w_t, cap))·A·log π(t)          sg = stop-gradient; without cap that is w_t

Acts on: E, token, mask and weight.
At lag: a token weighs its ratio inside the band, and is left out outside, whatever its advantage.

Trust Region Masking, arXiv 2512.23075, has the theory. Clips of tokens cannot bound the error of a long sequence, so a
sequence goes or stays as a whole. The mean g shows how far a token moved on average, at any length. The product s
favours short sequences. Useful bands are far narrower for g: SkyRL has 0.99 … 1.01 and NeMo RL 0.999 … 1.002 for long
responses. Level "token" is also the «double-sided importance sampling» of SAO, arXiv 2607.07508, for an actor with a
critic.
Differs from the paper: there a token's largest divergence over the vocabulary decides. Here the ratios of sampled
tokens decide, as in public code. Tokens left out stay in the denominator of the mean.
Others: verl, TRL, SkyRL and NeMo RL mask by π_proximal/π_behavior on top of a PPO clip, like icepop.py. Here the ratio
is of the current policy, and there is no clip. With "sequence" TRL weighs by s, as here, and SkyRL by another ratio.
With "geometric" NeMo RL weighs by r_t, as here, and verl not at all: g is no importance weight. The gradient stops at
the weight, or it would be spread over the sequence. A cap below `high` truncates inside the mask, as in verl, SkyRL and
slime.
"""

from typing import Literal

import torch

from algos.inputs import BelowOne, Cap, LossInputs, LossOutput
from algos.objectives import weighted_policy_gradient
from algos.ratio import importance_ratio, sequence_mean, sequence_sum


def loss(
    inputs: LossInputs,
    *,
    low: BelowOne = 0.5,
    high: Cap = 2.0,
    level: Literal["token", "sequence", "geometric"] = "token",
    cap: Cap | None = None,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (left out, or capped)."""
    log_ratio = inputs.log_ratio.detach()
    ratio = judged = weight = inputs.ratio
    if level == "sequence":
        judged = weight = importance_ratio(sequence_sum(log_ratio, inputs.sequence_ids))
    elif level == "geometric":
        judged = importance_ratio(sequence_mean(log_ratio, inputs.sequence_ids))
    outside = (judged < low) | (judged > high)
    kept = torch.where(outside, 0.0, weight)
    weight = kept if cap is None else kept.clamp(max=cap)
    return weighted_policy_gradient(inputs, weight, ratio, clipped=outside | (weight != kept))
