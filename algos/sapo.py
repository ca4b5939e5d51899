"""SAPO: a smooth gate in place of the clip. A token counts less the further it moved, and none is cut.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −4/τ·σ(τ·(r_t − 1))·A          τ = tau_positive where A > 0, else tau_negative; gradient flows through r

Its gradient is that of importance sampling times 4·σ·(1 − σ). That factor is 1 at r_t = 1 and less on either side, for
good tokens and bad ones. PPO's clip cuts one side only.

Acts on: E, token, shape.
At lag: the further the ratio is from 1 on either side, the less a token weighs beside importance sampling. None is left
out.

Soft Adaptive Policy Optimization, arXiv 2511.20347; the defaults are its authors'. If A < 0, τ is larger, because
pushing one token down raises all other tokens.
Differs from the paper: the denominator is the engine's own log-prob. 1/length is a choice of `loss_aggregation`
(`sequence_mean` there). Log-ratios are clamped to ±20 nats. Others: verl, TRL and SkyRL have the same gate. They divide
by the trainer's log-probs at the start of the step. AReaL divides by the policy that sampled, as here.
Its value at r_t = 1 is −2·A/τ and not −A: only its gradient has a meaning.
"""

import torch

from algos.inputs import Divisor, LossInputs, LossOutput
from algos.ratio import importance_ratio


def loss(
    inputs: LossInputs, *, tau_positive: Divisor = 1.0, tau_negative: Divisor = 1.05
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight (of −A·∇log π in the gradient)."""
    advantages = inputs.advantages
    tau = torch.where(advantages > 0, tau_positive, torch.full_like(advantages, tau_negative))
    ratio = importance_ratio(inputs.log_ratio)
    gate = torch.sigmoid(tau * (ratio - 1))
    opened = gate.detach()
    weight = 4 * opened * (1 - opened) * ratio.detach()
    return -4 / tau * gate * advantages, {"weight": weight}
