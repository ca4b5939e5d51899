"""Policy losses, advantage and KL estimators by name. To add a loss, write its file and add its name here."""

import functools
import importlib
from collections.abc import Callable, Iterable

import msgspec

from algos import advantages, kl
from algos.inputs import LossInputs as LossInputs
from algos.inputs import keywords_of

_NAMES = (
    "reinforce", "grpo", "decoupled_ppo", "tis", "cispo", "topr", "weighted_topr", "gspo", "kimi", "icepop", "aipo",
    "m2po", "dppo", "sapo", "opsm", "mis", "tis_ppo", "gmpo", "vespo", "sequence_is", "cppo", "drpo", "pnpo", "minpro",
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

KL_ESTIMATORS: dict[str, Callable] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "unbiased": kl.unbiased,
}


def make_loss(name: str, arguments: Iterable[str] = ()) -> Callable:
    """Return a loss of LOSSES with arguments, NAME=VALUE each.

    Raises ValueError, one line, for an unknown name and for a value out of its range.
    """
    if name not in LOSSES:
        raise ValueError(f"--algo must be one of {', '.join(LOSSES)}, got {name}")
    kinds = {keyword.name: keyword.annotation for keyword in keywords_of(LOSSES[name])}
    values = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in kinds:
            raise ValueError(f"--algo-args {argument}: {name} takes {', '.join(kinds) or 'none'}")
        try:
            values[key] = msgspec.convert(text, kinds[key], strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"--algo-args {argument}: {error}") from None
    return functools.partial(LOSSES[name], **values)
