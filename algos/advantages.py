"""Advantage estimators: how good a response was, compared with others.

Each takes the rewards [S] float64 of S sequences of one step, and their group_ids [S] int64. Equal ids mean the same
prompt. It returns advantages [S] float64. All raise RuntimeError for a reward that is not finite.
"""

import torch
from torch import Tensor

EPS = 1e-6


def overlong_penalty(num_tokens: int, max_tokens: int, overlong: int) -> float:
    """Return the reward, 0 to 1, that a trajectory of `num_tokens` of at most `max_tokens` loses.

    The loss is linear over the `overlong` last tokens below the limit. DAPO, arXiv 2503.14476, equation 13.
    """
    return max(0.0, 1 - (max_tokens - num_tokens) / overlong) if overlong else 0.0


def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(R − group mean) / (group std + 1e-6), unbiased std. arXiv 2402.03300, section 4.1.2.

    A group whose rewards are all equal, or that has one member, gets exactly 0.
    """
    centered, group, num_in_group = _center_on_group(rewards, group_ids)
    variance = torch.bincount(group, centered**2) / (num_in_group - 1).clamp(min=1)
    return centered / (variance.sqrt()[group] + EPS)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R − group mean, so that easy and hard prompts are not weighted up. arXiv 2503.20783, section 3.

    A group whose rewards are all equal, or that has one member, gets exactly 0.
    """
    return _center_on_group(rewards, group_ids)[0]


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R − mean of the other members of its group. arXiv 2402.14740, RLOO.

    A group whose rewards are all equal, or that has one member, gets exactly 0.
    """
    centered, group, num_in_group = _center_on_group(rewards, group_ids)
    # R − (ΣR − R)/(G − 1) = (R − mean)·G/(G − 1)
    return centered * (num_in_group / (num_in_group - 1).clamp(min=1))[group]


def reinforce(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(R − batch mean) / (batch std + 1e-6), unbiased std over the whole step. REINFORCE++, arXiv 2501.03262.

    Groups play no part: a group of equal rewards has an advantage, unless the whole batch is equal: exactly 0.
    """
    return grpo(rewards, torch.zeros_like(group_ids))


def reinforce_baseline(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """C / (batch std of C + 1e-6) with C = R − group mean, unbiased std. REINFORCE++-baseline, arXiv 2501.03262.

    A group whose rewards are all equal, or that has one member, gets exactly 0. It still counts in the batch std.
    """
    centered, _, _ = _center_on_group(rewards, group_ids)
    # The batch mean of C is 0, because each group's is.
    variance = (centered**2).sum() / max(len(centered) - 1, 1)
    return centered / (variance.sqrt() + EPS)


def reward_itself(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return R. The trainer makes each token's advantage from it and the values of states: asyncrl/trainer/gae.py."""
    _check_finite(rewards)
    return rewards


def _check_finite(rewards: Tensor) -> None:
    if not torch.isfinite(rewards).all():
        raise RuntimeError(
            f"rewards must be finite, got {rewards[~torch.isfinite(rewards)].tolist()}"
        )


def _center_on_group(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return R − group mean [S], the group index [S] int64 in 0 … K−1, and each group's size [K]."""
    _check_finite(rewards)
    ids, group = torch.unique(group_ids, return_inverse=True)
    num_in_group = torch.bincount(group, torch.ones_like(rewards))
    mean = torch.bincount(group, rewards) / num_in_group
    # Rounding can shift the mean of equal rewards (0.1 three times). A division by the std would enlarge that.
    lowest = rewards.new_zeros(len(ids)).scatter_reduce(
        0, group, rewards, "amin", include_self=False
    )
    highest = rewards.new_zeros(len(ids)).scatter_reduce(
        0, group, rewards, "amax", include_self=False
    )
    centered = torch.where((lowest == highest)[group], 0.0, rewards - mean[group])
    return centered, group, num_in_group
