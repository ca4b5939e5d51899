"""CPPO: DPPO's mask with a budget for the whole prefix. A token is left out if it, or what came before, moved too far.

    p      = π(t),  b = π_behavior(t),  r_t = p/b,  D_t = |p − b|
    w_t    = 1 − (1 − weight_floor)·(t − 1)/(T − 1)        for the t-th of a sequence's T tokens; 1 if T = 1
    c_t    = min(delta, delta + δ_b·Σ_{k<t} w_k − Σ_{k<t} w_k·D_k)
    δ_b    = budget, or with adaptive the 90th percentile of the sequence's D, cut into budget … 2·budget
    M_t    = 0 where A·(p − b) > 0 and w_t·D_t > c_t; else 1
    loss_t = −sg(M_t·min(r_t, cap))·A·log π(t)             sg = stop-gradient

Early tokens weigh more than late ones, because all later tokens were sampled after them. The prefix may drift by δ_b a
token on average. Above that, less than delta is left for the next token. Tokens that are left out spend the budget,
too.

Acts on: E, prefix, mask and weight.
At lag: a token is left out once its probability moved too far, the way its advantage points: past delta, or past what
its prefix has left of the budget. The others weigh their ratio, at most the cap.

CPPO, arXiv 2606.10968, eq. 8 to 11 and section 4.1. The numbers for weight and delta are the paper's (0.2 for its
mixture of experts). Its fixed budget is 0.015, for a model after training. 0.02 is the budget of UniRL and verl.
Differs from the paper: D is the change of the token's own probability. The paper tries that, and the sum over the 20
likeliest tokens. The cap is ours: the paper and UniRL have no cap and let the gradient pass through r. Below the cap it
is the same gradient. Tokens of the environment count neither as place nor as drift.
Others: verl's cap is 20, too, with a stopped gradient.
"""

import torch
from torch import Tensor

from algos.inputs import Cap, LossInputs, LossOutput, NonNegative, Positive, Share
from algos.objectives import weighted_policy_gradient
from algos.ratio import places, prefix_sum, sequence_sum


def loss(
    inputs: LossInputs,
    *,
    delta: Positive = 0.15,
    budget: NonNegative = 0.02,
    adaptive: bool = True,
    weight_floor: Share = 0.8,
    cap: Cap = 20.0,
) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if weight ≠ ratio).

    `delta` and `budget` are probabilities.
    """
    ids = inputs.sequence_ids
    behavior = inputs.behavior_logprobs.exp()
    moved = inputs.logprobs.detach().exp() - behavior
    position_weight = 1 - (1 - weight_floor) * _progress(ids).to(moved.dtype)
    spent = position_weight * moved.abs()
    per_token = budget
    if adaptive:
        per_token = _percentile(moved.abs(), ids, 0.9).clamp(budget, 2 * budget)
    earned = per_token * (prefix_sum(position_weight, ids) - position_weight)
    left = (delta + earned - (prefix_sum(spent, ids) - spent)).clamp(max=delta)
    is_out = (inputs.advantages * moved > 0) & (spent > left)
    ratio = inputs.ratio
    weight = torch.where(is_out, 0.0, ratio.clamp(max=cap))
    return weighted_policy_gradient(inputs, weight, ratio)


def _progress(sequence_ids: Tensor) -> Tensor:
    """Return the place of each token in its sequence, [N] float64: 0 for the first, 1 for the last of several."""
    lengths = sequence_sum(torch.ones_like(sequence_ids), sequence_ids)
    return places(sequence_ids).double() / (lengths - 1).clamp(min=1)


def _percentile(values: Tensor, sequence_ids: Tensor, share: float) -> Tensor:
    """Give every token the `share` quantile of `values` [N] over its own sequence, [N], interpolated linearly."""
    # The host would wait for a loop of torch.quantile over sequences. So sort by value, then by sequence.
    by_value = values.argsort()
    in_order = values[by_value[sequence_ids[by_value].argsort(stable=True)]]
    place = places(sequence_ids)
    firsts = torch.arange(len(place), device=place.device) - place
    lengths = sequence_sum(torch.ones_like(place), sequence_ids)
    wanted = share * (lengths - 1).to(values.dtype)
    below, above = (firsts + side.long() for side in (wanted.floor(), wanted.ceil()))
    return torch.lerp(in_order[below], in_order[above], wanted.frac())
