"""KL(π ‖ π_ref) from sampled tokens, as a term that any loss can add with weight `kl_coef`.

Each estimator takes logprobs, ref_logprobs and behavior_logprobs, [N] nats, and returns the term [N]. Only logprobs
carries gradient. With x_t = log π_ref(t) − log π(t), each per token and in nats:

    k1       = −x                           value unbiased; its gradient is useless, see below
    k2       = x²/2                         value biased; gradient unbiased on fresh tokens
    k3       = e^x − 1 − x ≥ 0              value unbiased on fresh tokens; its gradient is that of KL(π_ref ‖ π)
    unbiased = r·k3, r = π(t)/π_behavior(t) with gradient     value and gradient unbiased, on stale tokens too

«Fresh» means sampled by π itself. The expected gradient of k1 is E[∇ log π] = 0 for any π_ref. In a loss k1 only adds
noise. Stale tokens bias k1, k2 and k3, because they have no importance weight. All four are about the next token after
a given prefix. They leave out that the policy also changes the prefixes, as in the papers.

k1, k2, k3: Schulman, «Approximating KL divergence», 2020; their gradients: Tang and Munos, arXiv 2506.09477; k3 is
GRPO's, arXiv 2402.03300, eq. 4; unbiased: DeepSeek-V3.2, arXiv 2512.02556, eq. 7.
Differs from the paper: r is against the engine's own log-prob, where DeepSeek-V3.2 has its old policy.
"""

import torch
from torch import Tensor

from algos.ratio import MAX_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """log π − log π_ref, [N] nats; negative as often as not."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, [N] nats."""
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """e^x − 1 − x with x = log π_ref − log π, at most MAX_LOG_RATIO, [N] nats, never negative."""
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def unbiased(logprobs: Tensor, ref_logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """π/π_behavior·k3, [N] nats, gradient through both; d/d log π = π/π_behavior·(log π − log π_ref)."""
    # r·(e^x − 1 − x), multiplied out: if π nearly excludes a token, r is 0 and e^x infinite.
    ratio = torch.exp(logprobs - behavior_logprobs)
    return torch.exp(ref_logprobs - behavior_logprobs) - ratio * (1 + ref_logprobs - logprobs)
