"""DRPO: a squared distance of probabilities in place of DPPO's mask. The gradient fades, and turns past the bound.

    p      = π(t),  b = π_behavior(t),  r_t = p/b
    loss_t = −A·r_t + |A|·b·(r_t − 1)²/(2·delta)          gradient flows through r

Its gradient is that of importance sampling times 1 − sign(A)·(p − b)/delta. So a token that moves the way its advantage
points counts less, and one that moves back counts more. Past delta the update turns and pulls it back.

Acts on: E, token, shape.
At lag: a token weighs its ratio without a cap, less the further its probability moved the way its advantage points,
and more the further it moved back.

Divergence Regularized Policy Optimization, arXiv 2606.09821, section 3; the default is the number of its section 4. A
probability moves by at most 1. So with 12.5 the factor stays between 0.92 and 1.08, and the update never turns. Only a
delta below 1 has a bound.
Differs from the paper: the denominator is the engine's own log-prob. Log-ratios are clamped to ±20 nats; past that a
token has no gradient. 1/length is a choice of `loss_aggregation`. Others: UniRL and Axolotl have the same loss.
"""

from algos.inputs import Divisor, LossInputs, LossOutput
from algos.ratio import importance_ratio


def loss(inputs: LossInputs, *, delta: Divisor = 12.5) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight (of −A·∇log π in the gradient).

    `delta` is a probability.
    """
    advantages, behavior = inputs.advantages, inputs.behavior_logprobs.exp()
    ratio = importance_ratio(inputs.log_ratio)
    moved = behavior * (ratio - 1)
    pull = advantages.abs() * moved * (ratio - 1) / (2 * delta)
    weight = ratio.detach() * (1 - advantages.sign() * moved.detach() / delta)
    return pull - advantages * ratio, {"weight": weight}
