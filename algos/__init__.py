"""Policy losses and advantage estimators by name. Adding one: its file, its line below, its name in config.py."""

import inspect
from collections.abc import Callable
from typing import Any

from algos import advantages, grpo, reinforce, tis
from algos.inputs import LossInputs

__all__ = ["ADVANTAGES", "LOSSES", "LossInputs", "hyperparameters"]

LOSSES: dict[str, Callable] = {
    "reinforce": reinforce.loss,
    "grpo": grpo.loss,
    "tis": tis.loss,
}

ADVANTAGES: dict[str, Callable] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
}


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
