"""Policy losses, advantage and KL estimators by name. Adding one: its file, its line below, its name in config.py."""

import inspect
from collections.abc import Callable, Iterable
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
from algos.arguments import read_value
from algos.inputs import LossInputs
from config import nearest

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


def hyperparameters(algo: str, algo_args: Iterable[str]) -> dict[str, Any]:
    """Return `--algo-args`, each NAME=VALUE, as keyword arguments of the loss `algo`.

    Raises ValueError, in one line, for a name that the loss does not take and for a value that it does not allow.
    """
    _, *keywords = inspect.signature(LOSSES[algo]).parameters.values()
    kinds = {k.name: type(k.default) if k.annotation is k.empty else k.annotation for k in keywords}
    chosen = {}
    for item in algo_args:
        name, _, text = item.partition("=")
        if name not in kinds:
            takes = ", ".join(kinds) or "none"
            raise ValueError(f"--algo-args {item}: --algo {algo} takes {takes}{nearest(name, kinds)}")
        try:
            chosen[name] = read_value(text, kinds[name])
        except ValueError as error:
            raise ValueError(f"--algo-args {item}: {name} of --algo {algo} {error}") from None
    return chosen
