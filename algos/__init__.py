"""Policy losses, advantage and KL estimators by name. Adding one: its file, its line below, its name in config.py."""

import inspect
from collections.abc import Callable
from typing import Any

from algos import (
    advantages,
    aipo,
    cispo,
    decoupled_ppo,
    grpo,
    gspo,
    icepop,
    kimi,
    kl,
    reinforce,
    tis,
    topr,
    weighted_topr,
)
from algos.inputs import LossInputs

__all__ = ["ADVANTAGES", "KL_ESTIMATORS", "LOSSES", "LossInputs", "hyperparameters"]

LOSSES: dict[str, Callable] = {
    "reinforce": reinforce.loss,
    "grpo": grpo.loss,
    "decoupled_ppo": decoupled_ppo.loss,
    "tis": tis.loss,
    "cispo": cispo.loss,
    "topr": topr.loss,
    "weighted_topr": weighted_topr.loss,
    "gspo": gspo.loss,
    "kimi": kimi.loss,
    "icepop": icepop.loss,
    "aipo": aipo.loss,
}

ADVANTAGES: dict[str, Callable] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
    "reinforce_baseline": advantages.reinforce_baseline,
}

KL_ESTIMATORS = kl.ESTIMATORS


def hyperparameters(algo: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set (not None), as keyword arguments of the loss `algo`.

    Raises ValueError for a set option that this loss does not take, naming the losses that do.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        takers = [other for other, loss in LOSSES.items() if name in inspect.signature(loss).parameters]
        if algo not in takers:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} has no meaning for --algo {algo}; "
                f"it is an option of {', '.join(takers) or 'no loss'}"
            )
    return chosen
