"""The proximal policy without an extra forward pass: interpolated between behavior and current policy.

A step starts at policy version t, the proximal policy, and makes version t + 1 in M updates. After m of them the
current policy has the fractional version t + m/M. A token was sampled by version v ≤ t. Linear in the version:

    log π_proximal ≈ log π_behavior + a·(log π − log π_behavior),    a = (t − v) / (t + m/M − v),    gradient stopped

Before the first update a = 1, and the proximal policy is exactly the current one. A fresh token (v = t) has
a = 0 in later updates. Its proximal policy is then the one that sampled, but for rounding. Otherwise a is in (0, 1).

A-3PO, arXiv 2512.06547; AReaL's `prox_logp_method: loglinear`.
Differs from the paper: there a = (v_θ − 1 − v) / (v_θ − v), clamped to [0, 1]. v_θ is the whole version of the current
policy, the same in all updates of a step. So its anchor is one version back even before the first update. Ours is the
anchor of `--proximal recompute`.
"""

from torch import Tensor


def loglinear(logprobs: Tensor, behavior_logprobs: Tensor, lags: Tensor, progress: float) -> Tensor:
    """Return approximate proximal log-probs [N], nats, without gradient.

    `lags` [N] int64 ≥ 0: policy's version at the step's start − the token's, steps; `progress`: share m/M in [0, 1) of
    the step's updates that were made.
    """
    current = logprobs.detach()
    if progress == 0:
        return current
    steps = lags.to(current.dtype)
    return behavior_logprobs + steps / (steps + progress) * (current - behavior_logprobs)
