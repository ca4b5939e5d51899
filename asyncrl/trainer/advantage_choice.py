"""Calls the advantage estimator of --advantage, and tries it on four responses before a run starts."""

import inspect

import torch
from torch import Tensor

from algos import ADVANTAGES
from asyncrl import user_code
from asyncrl.config import Config


def estimate(config: Config, rewards: Tensor, group_ids: Tensor, staleness: Tensor) -> Tensor:
    """Return the advantages [S] of responses with rewards [S] float64, group_ids [S] and staleness [S] int64.

    A function gets the arguments that it names. The staleness of a response is that of its oldest token.
    Raises ValueError, in one line, for a function that is missing, names other arguments or fails. Raises it too for
    advantages that are not finite, or too few or many.
    """
    function = user_code.load(config.advantage, "--advantage", ADVANTAGES)
    columns = {"rewards": rewards, "group_ids": group_ids, "staleness": staleness}
    with user_code.errors_as_value_error(config.advantage, "--advantage"):
        names = list(inspect.signature(function).parameters)
        if set(names) - columns.keys():
            raise TypeError(f"it takes {', '.join(names)}; name rewards, group_ids or staleness")
        advantages = function(**{name: columns[name] for name in names})
        is_one_each = isinstance(advantages, Tensor) and advantages.shape == rewards.shape
        if not is_one_each or not advantages.isfinite().all():
            raise TypeError(
                f"give a finite tensor [{len(rewards)}] for as many responses; it gave {advantages}"
            )
    return advantages


def try_estimator(config: Config) -> None:
    """Estimate the advantages of four responses. Raises ValueError as `estimate` does."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    estimate(config, rewards, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 2]))
