"""The two forms that most losses have: a weight times policy gradient, and a weight times PPO's clip."""

from torch import Tensor

from algos.inputs import LossInputs, LossOutput
from algos.ratio import clipped_objective, importance_ratio


def weighted_policy_gradient(
    inputs: LossInputs, weight: Tensor, ratio: Tensor, clipped: Tensor | None = None
) -> LossOutput:
    """Return −weight·A·log π(t), [N], and the stats [N]: ratio, weight, clipped.

    `weight` and `ratio` [N] carry no gradient. `clipped` [N] bool is by default where the weight is not the ratio.
    """
    if clipped is None:
        clipped = weight != ratio
    stats = {"ratio": ratio, "weight": weight, "clipped": clipped.to(ratio.dtype)}
    return -weight * inputs.advantages * inputs.logprobs, stats


def weighted_proximal_clip(
    inputs: LossInputs, weight: Tensor, is_cut: Tensor, clip_low: float, clip_high: float
) -> LossOutput:
    """Return −weight·min(u·A, clip(u, 1 − clip_low, 1 + clip_high)·A), [N], with u = π(t)/π_proximal(t), and stats [N].

    The stats are ratio, proximal_ratio (u), weight, and clipped: where the clip cuts the gradient to 0, or `is_cut`
    [N] bool says that the weight was changed. `weight` [N] carries no gradient.
    """
    moved = importance_ratio(inputs.logprobs - inputs.proximal_logprobs)
    objective, clipped = clipped_objective(moved, inputs.advantages, clip_low, clip_high)
    return -weight * objective, {
        "ratio": importance_ratio(inputs.log_ratio.detach()),
        "proximal_ratio": moved.detach(),
        "weight": weight,
        "clipped": (clipped | is_cut).to(moved.dtype),
    }
