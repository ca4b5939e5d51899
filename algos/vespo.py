"""VESPO: a sequence's weight is a smooth bump of its importance ratio, highest near 1 and 0 far away.

    w      = exp(sum over the sequence of log π(t) − log π_behavior(t))
    φ(w)   = e^λ·w^k·e^(−λ·w)          k_positive and lambda_positive where A ≥ 0, else k_negative and lambda_negative
    loss_t = −sg(φ(w))·A·log π(t)      sg = stop-gradient

The bump φ is 1 at w = 1. It is highest at w = k/λ: at 2/3 for good responses, at 3/2 for bad ones. The exponent k sets
how fast it falls to 0 with w, and λ how fast it falls as w grows.

Acts on: E, sequence, weight.
At lag: the further a sequence's ratio is from k/λ, the less it weighs, down to 0.

VESPO, arXiv 2602.10693, section 3.4 (k and λ are c1 and c2 there). The defaults are from its code and TRL.
Differs from the paper: the log-ratio of a sequence is clamped to ±20 nats, and φ is at most e²⁰. That shows only if
k/λ is far from 1. No length enters the weight, as there. So w is further from 1 for a longer response, and it counts
less. TRL multiplies π/π_proximal by its capped π_proximal/π_behavior; here it is one ratio.
"""

import torch

from algos.inputs import LossInputs, LossOutput, NonNegative, Positive
from algos.ratio import MAX_LOG_RATIO, importance_ratio, sequence_sum


def loss(
    inputs: LossInputs,
    *,
    k_positive: NonNegative = 2.0,
    lambda_positive: Positive = 3.0,
    k_negative: NonNegative = 3.0,
    lambda_negative: Positive = 2.0,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight (φ)."""
    advantages = inputs.advantages
    k, lam = (
        torch.where(advantages >= 0, positive, torch.full_like(advantages, negative))
        for positive, negative in ((k_positive, k_negative), (lambda_positive, lambda_negative))
    )
    ratio = importance_ratio(sequence_sum(inputs.log_ratio.detach(), inputs.sequence_ids))
    weight = (lam + k * ratio.log() - lam * ratio).clamp(max=MAX_LOG_RATIO).exp()
    return -weight * advantages * inputs.logprobs, {"weight": weight}
