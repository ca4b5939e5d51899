"""The importance ratio of a token or a sequence, and its clip. Every loss reports it, and most losses use it.

Losses with different ratios share PPO's pessimistic clip:

    objective = min(ratio·A, clip(ratio, 1 − clip_low, 1 + clip_high)·A)
    and with dual_clip c > 1, where A < 0:  max(objective, c·A)

PPO, arXiv 1707.06347, eq. 7; clip_high > clip_low («clip-higher») is DAPO, arXiv 2503.14476, eq. 10; the dual clip is
arXiv 1912.09729, section 3.

Every loss file states «Acts on: ratio, level, means» and «At lag: …», for a table in docs/staleness.md. The ratios:

    B = π_proximal/π_behavior, the staleness: start of the step against sampled
    U = π/π_proximal, the step itself:        now against start of the step
    E = π/π_behavior = B·U, both:             now against sampled
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio) of values clamped to ±20 nats, [N]; past that a ratio has no gradient.

    Above 88 nats it would be infinite in float32. If a clip then cuts its gradient to 0, 0·∞ is NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the mean of `values` [N] over its own sequence, [N]; carries gradient.

    sequence_ids as in LossInputs. The exponential of a mean log-ratio is the geometric mean of the ratios.
    """
    return sequence_sum(values, sequence_ids) / sequence_sum(torch.ones_like(values), sequence_ids)


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the sum of `values` [N] over its own sequence, [N]; carries gradient.

    sequence_ids as in LossInputs. The exponential of a sum of log-ratios is the ratio of the whole sequence.
    """
    # There are as many totals as tokens, because counting the sequences would make the host wait for a GPU.
    totals = torch.zeros_like(values).index_add(0, sequence_ids, values)
    return totals[sequence_ids]


def places(sequence_ids: Tensor) -> Tensor:
    """Return the place of each token among the trained tokens of its sequence, from 0, [N] int64."""
    indices = torch.arange(len(sequence_ids), device=sequence_ids.device)
    is_later = torch.zeros_like(sequence_ids, dtype=torch.bool)
    is_later[1:] = sequence_ids[1:] == sequence_ids[:-1]
    return indices - indices.masked_fill(is_later, 0).cummax(0).values


def prefix_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give every token the sum of `values` [N] over its own sequence up to and with itself, [N].

    LossInputs describes `sequence_ids`. The sum is float64 inside, because it runs over all sequences.
    """
    sums = values.double().cumsum(0)
    firsts = torch.arange(len(values), device=values.device) - places(sequence_ids)
    return (sums - (sums - values)[firsts]).to(values.dtype)


def clipped_objective(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the objective [N], to be maximised, and whether its gradient is cut to 0, [N] bool; ratio, advantages [N].

    A ratio is cut past the clip in the direction of its advantage, and past the dual clip.
    """
    objective = torch.minimum(
        ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    )
    detached = ratio.detach()
    clipped = is_past(detached, advantages, 1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        is_bad = advantages < 0
        objective = torch.where(is_bad, objective.maximum(dual_clip * advantages), objective)
        clipped |= is_bad & (detached > dual_clip)
    return objective, clipped


def is_past(moved: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return [N] bool: True if `moved` [N] is above `high` on a good token, or below `low` on a bad one."""
    return ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < low))
