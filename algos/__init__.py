"""Policy losses, advantage and KL estimators by name. To add a loss, write its file and add its name here."""

import importlib
from collections.abc import Callable

from algos import advantages, kl
from algos.inputs import LossInputs as LossInputs

_NAMES = (
    "reinforce", "grpo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr", "gspo", "kimi", "icepop", "aipo",
    "m2po", "dppo", "sapo", "opsm", "mis", "tis_ppo", "gmpo", "vespo", "sequence_is",
)  # fmt: skip

LOSSES: dict[str, Callable] = {
    name: importlib.import_module(f"algos.{name}").loss for name in _NAMES
}
"""Each is `loss` in the file of this folder with its name."""

ADVANTAGES: dict[str, Callable] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
    "reinforce_baseline": advantages.reinforce_baseline,
    "gae": advantages.reward_itself,
}

KL_ESTIMATORS = kl.ESTIMATORS
