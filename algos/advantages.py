"""Advantage estimators: how good a response was, compared with others, and what `--advantage-args` say of them.

Each takes rewards [S] float64 and group_ids [S] int64 (any integers; equal means same prompt), S sequences of one step,
and returns advantages [S] float64. All raise RuntimeError on a reward that is not finite.
"""

import functools
import inspect
from dataclasses import dataclass

import torch
from torch import Tensor

from algos.arguments import Count, NonNegative, Positive, Share
from asyncrl.config import Config, read_arguments

EPS = 1e-6


@dataclass(frozen=True)
class AdvantageOptions:
    """Options of the advantages, by the names and with the defaults of `--advantage-args`; all but `overlong` are for
    --advantage gae, algos/gae.py."""

    overlong: Count = 0
    """Last tokens below max_response_tokens over which a reward falls, linearly, by 1 at the limit; 0: by none. DAPO,
    arXiv 2503.14476, equation 13. Only advantages know of it: metrics, samples and filters have the reward as it is."""
    gamma: Share = 1.0
    """Discount per trained token (γ)."""
    lam: Share = 1.0
    """λ of the advantages. At 1 what was gained alone counts: no bias, and the choice of most for one reward at the
    end; below 1 the values say more, which has less variance."""
    value_lam: Share = 1.0
    """λ of the returns that the values are fitted to; apart from the other as in VAPO, arXiv 2504.05118."""
    whiten: bool = True
    """Whether a step's advantages, of all ranks, get mean 0 and standard deviation 1, as PPO for language models mostly
    has it: lr and kl_coef then mean the same whatever rewards are, and while the values know nothing."""
    value_coef: NonNegative = 0.1
    """Weight of half the squared error of a token's value beside the token's loss: what the model below the head gets;
    the head itself, by AdamW, learns as fast with any above 0."""
    value_lr: Positive = 10.0
    """Learning rate of the value head, times that of the model."""

    @classmethod
    @functools.cache
    def of(cls, config: Config) -> "AdvantageOptions":
        """The options of a run. Raises ValueError, in one line, for what is none of them, or is for values that it has
        not."""
        owner, taken = f"--advantage {config.advantage}", inspect.signature(cls, eval_str=True).parameters
        if config.advantage != "gae":
            owner, taken = f"{owner}, which has no values as gae has,", {"overlong": taken["overlong"]}
        options = cls(**read_arguments("advantage-args", config.advantage_args, owner, taken.values()))
        if options.overlong >= config.max_response_tokens:
            raise ValueError(
                f"--advantage-args overlong={options.overlong} must be below --max-response-tokens "
                f"{config.max_response_tokens}, or no response is short enough; change one of the two"
            )
        return options


def overlong_penalty(num_tokens: int, config: Config) -> float:
    """What a trajectory of `num_tokens` beyond its prompt loses of its reward by its length, 0 to 1."""
    left, overlong = config.max_response_tokens - num_tokens, AdvantageOptions.of(config).overlong
    return max(0.0, 1 - left / overlong) if overlong else 0.0


def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """(R − group mean) / (group std + 1e-6), unbiased std. arXiv 2402.03300, section 4.1.2.

    A group whose rewards are all equal, or that has one member, gets exactly 0.
    """
    centered, group, num_in_group = _center_on_group(rewards, group_ids)
    variance = _sum_by_group(centered**2, group) / (num_in_group - 1).clamp(min=1)
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

    A group whose rewards are all equal, or that has one member, gets exactly 0; it still counts in the batch std.
    """
    centered, _, _ = _center_on_group(rewards, group_ids)
    # The batch mean of C is 0, because each group's is.
    variance = (centered**2).sum() / max(len(centered) - 1, 1)
    return centered / (variance.sqrt() + EPS)


def reward_itself(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """R, from which the trainer makes the advantage of each token, by the values of states: algos/gae.py."""
    _check_finite(rewards)
    return rewards


def _check_finite(rewards: Tensor) -> None:
    if not torch.isfinite(rewards).all():
        raise RuntimeError(f"rewards must be finite, got {rewards[~torch.isfinite(rewards)].tolist()}")


def _center_on_group(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return R − group mean [S], the group index [S] int64 in 0 … K−1, and the members of each group [K]."""
    _check_finite(rewards)
    ids, group = torch.unique(group_ids, return_inverse=True)
    num_in_group = _sum_by_group(torch.ones_like(rewards), group)
    mean = _sum_by_group(rewards, group) / num_in_group
    # The mean of equal rewards can be off by rounding (0.1 three times), and dividing by the std would blow that up.
    lowest = rewards.new_zeros(len(ids)).scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = rewards.new_zeros(len(ids)).scatter_reduce(0, group, rewards, "amax", include_self=False)
    centered = torch.where((lowest == highest)[group], 0.0, rewards - mean[group])
    return centered, group, num_in_group


def _sum_by_group(values: Tensor, group: Tensor) -> Tensor:
    """Sum values [S] over the members of each group, [K]."""
    return values.new_zeros(int(group.max()) + 1 if len(group) else 0).index_add(0, group, values)
