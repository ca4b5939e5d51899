"""DPPO: a token is left out if its probability, and not its ratio, has moved too far.

    p      = π(t),  b = π_behavior(t),  r_t = p/b
    D_t    = |p − b|                                                  with divergence "tv"
             kl(b, p) = b·log(b/p) + (1 − b)·log((1 − b)/(1 − p))     with divergence "kl"
             max(kl(b, p), kl(p, b))                                  with divergence "kl_max"
    M_t    = 0 where the update goes on moving away: A > 0, p > b and D_t > delta_high,
             or A < 0, p < b and D_t > delta_low; else 1
             and with sides "both" 0 wherever p > b and D_t > delta_high, or p < b and D_t > delta_low
    loss_t = −sg(M_t·min(r_t, cap))·A·log π(t) + squared·(log r_t)²          sg = stop-gradient

Acts on: E, token, mask and weight.
At lag: a token is left out once its probability moved past the bound, the way its advantage points. The others weigh
their ratio, at most the cap.

Divergence PPO, arXiv 2602.04879, eq. 13 and 14: «this token or another» stands for the whole distribution. A rare token
may double, and PPO's clip forbids that. A sure token may not fall by a fifth, and PPO's clip allows that. Section 5.4
has the cap. The default bounds are from verl's example: 0.15 for "tv" and 0.05 for "kl". The default cap is ours:
verl's is 3, and its example of DPPO sets 10,000.
KPop has `divergence=kl_max sides=both`: neither policy may call a token rare that the other calls usual. It is after
Ring team, «KPop» (ringtech.notion.site/kpop, 2026), as verl and AReaL have it. Our bound for "kl_max" is 0.1: a change
proposed to prime-rl (#3283) calls it the paper's. AReaL's example sets 2, and compares π_proximal with π_behavior.
IPO is the default loss of prime-rl since 27 August 2026, with `sides=both`. At first it had deltas of 0.1 and
`squared=0.001`. Since 18 September 2026 it has deltas of 0.3 and no square, and later `cap=10000`. The square is of
Kimi K2.5, arXiv 2602.02276. It pulls all tokens back to the policy that sampled, also tokens left out.
Differs from the paper: its top-k divergences are not here. A token left out stays in the denominator of the mean.
Others: verl stops the gradient at the ratio, as here. SkyRL lets it pass and has no cap. Up to the cap the gradients
are the same. Above the cap ours stays bounded, and a ratio with gradient would have none.
"""

from typing import Literal

import torch
from torch import Tensor

from algos.inputs import Cap, LossInputs, LossOutput, NonNegative, Positive
from algos.objectives import weighted_policy_gradient
from algos.ratio import is_past

_DELTA = {"tv": 0.15, "kl": 0.05, "kl_max": 0.1}


def loss(
    inputs: LossInputs,
    *,
    divergence: Literal["tv", "kl", "kl_max"] = "tv",
    delta_low: Positive | None = None,
    delta_high: Positive | None = None,
    cap: Cap = 20.0,
    sides: Literal["away", "both"] = "away",
    squared: NonNegative = 0.0,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if weight ≠ ratio).

    `delta_low` and `delta_high` are a probability with "tv" and nats with "kl" and "kl_max".
    """
    low, high = (
        _DELTA[divergence] if delta is None else delta for delta in (delta_low, delta_high)
    )
    logprobs, behavior_logprobs = inputs.logprobs.detach(), inputs.behavior_logprobs
    moved = logprobs.exp() - behavior_logprobs.exp()
    if divergence != "tv":
        distance = _binary_kl(behavior_logprobs, logprobs)
        if divergence == "kl_max":
            distance = distance.maximum(_binary_kl(logprobs, behavior_logprobs))
        moved = moved.sign() * distance
    ratio = inputs.ratio
    away = inputs.advantages if sides == "away" else moved
    weight = torch.where(is_past(moved, away, -low, high), 0.0, ratio.clamp(max=cap))
    losses, stats = weighted_policy_gradient(inputs, weight, ratio)
    return losses + squared * inputs.log_ratio**2, stats


def _binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return the KL of «this token or another», [N] nats. It is infinite if only the other policy is sure."""
    rest, other_rest = (
        (-torch.expm1(values)).clamp(min=0) for values in (logprobs, other_logprobs)
    )
    # xlogy has 0·log 0 = 0, where both policies are sure.
    return logprobs.exp() * (logprobs - other_logprobs) + rest.xlogy(rest) - rest.xlogy(other_rest)
