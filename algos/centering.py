"""Score centering: a term that takes from each token's gradient its mean under the policy that sampled.

    w(v)   = −∂loss/∂log π(v), of a token v that had been sampled in the place of t, with the advantage of t
    ρ      = (1 − Σ_v q(v)) / (1 − Σ_v p(v))                             v in the head
    term_t = Σ_v sg(q(v)·w(v) − ρ·w(tail)·p(v)) · log p(v)               v in the head, sg = stop-gradient

q and p are the probabilities of the policy that sampled and of the current one. The head has the K likeliest tokens of
q. `--top-logprobs K` records them. For other tokens q is taken as ρ·p. A rare token of that ratio has the weight
w(tail). If the head is the whole vocabulary, the term is exact, and ρ does not matter.

«Score Centering Stabilizes Off-policy Reinforcement Learning», arXiv 2609.20807. The mean E_q[w·∇log p] is a drift
towards the policy that sampled, or away from it. It is there for any rewards. Without this drift a constant advantage
has no gradient in the mean.
Do not center a PPO clip. With A > 0 the clip leaves out tokens of r > 1 + c. The term then adds A·∇ Σ p of these. So a
token beyond the clip rises further, for any reward. Centered `grpo` collapsed at lags of 4 and 16 (results/centering).
Differs from the paper: w is the slope of any loss of single tokens. There it is 1 or a truncated ratio. So a penalty
within the loss, such as the square of dppo, is centered, too.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from algos.inputs import LossInputs, LossOutput

RARE_LOGPROB = -20.0
"""Log-prob, nats, of the token that stands for the tail: losses that compare probabilities see no change."""
LEAST_TAIL = 1e-6
"""Probability of a tail that is counted. A smaller one is the rounding of a head that has all tokens."""


def centering_term(
    loss: Callable[[LossInputs], LossOutput],
    inputs: LossInputs,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
) -> LossOutput:
    """Return the term of each token [N], and the detached stats [N]: head_mass, drift_term.

    `loss` gives each token a loss that depends on this token only. `logprobs` and `behavior_logprobs` are of the head's
    tokens, [N, K] float32 nats. `logprobs` carry gradient. `head_mass` is the head's probability when it was sampled.
    `drift_term` is half the absolute sum of the term's gradient to the head's logits: 0 if the policy has not moved.
    """
    held = logprobs.detach()
    head, behavior_head = held.exp(), behavior_logprobs.exp()
    tail, behavior_tail = ((1 - mass.sum(1)).clamp(min=0) for mass in (head, behavior_head))
    has_tail = (tail > LEAST_TAIL) & (behavior_tail > LEAST_TAIL)
    ratio = torch.where(has_tail, behavior_tail / tail.clamp(min=LEAST_TAIL), 1.0)
    rare = torch.full_like(ratio, RARE_LOGPROB)
    current = torch.cat([held, (rare - ratio.log())[:, None]], dim=1)
    behavior = torch.cat([behavior_logprobs, rare[:, None]], dim=1)
    weights = _slopes(loss, inputs, current, behavior).neg()
    tail_weights = torch.where(has_tail, ratio * weights[:, -1], 0.0)
    factors = behavior_head * weights[:, :-1] - tail_weights[:, None] * head
    drift = (factors - head * factors.sum(1, keepdim=True)).abs().sum(1) / 2
    return (factors * logprobs).sum(1), {"head_mass": behavior_head.sum(1), "drift_term": drift}


def _slopes(
    loss: Callable[[LossInputs], LossOutput],
    inputs: LossInputs,
    logprobs: Tensor,
    behavior_logprobs: Tensor,
) -> Tensor:
    """Return ∂loss/∂log π of K tokens in the place of each sampled one, [N, K].

    `logprobs` and `behavior_logprobs` are theirs, [N, K]. A recorded column describes the sampled token only, so the
    loss gets no column.
    """
    num_tokens, width = logprobs.shape
    spread = {
        name: getattr(inputs, name).repeat_interleave(width)
        for name in ("advantages", "rewards", "lags")
    }
    varied = logprobs.flatten().requires_grad_()
    tokens = replace(
        inputs,
        logprobs=varied,
        behavior_logprobs=behavior_logprobs.flatten(),
        proximal_logprobs=logprobs.flatten(),
        sequence_ids=torch.arange(num_tokens * width, device=varied.device),
        columns={},
        **spread,
    )
    with torch.enable_grad():
        losses, _ = loss(tokens)
        (slopes,) = torch.autograd.grad(losses.sum(), varied)
    return slopes.view(num_tokens, width)
