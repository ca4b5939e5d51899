"""Policy losses, advantage and KL estimators by name. Adding one: its file, and its name in config.ALGOS."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from algos import advantages, kl
from algos.advantages import AdvantageOptions, overlong_penalty
from algos.inputs import LossInputs
from asyncrl.config import ALGOS, read_arguments

__all__ = [
    "ADVANTAGES",
    "KL_ESTIMATORS",
    "LOSSES",
    "AdvantageOptions",
    "LossInputs",
    "choose_loss",
    "hyperparameters",
    "overlong_penalty",
]

LOSSES: dict[str, Callable] = {name: importlib.import_module(f"algos.{name}").loss for name in ALGOS}

ADVANTAGES: dict[str, Callable] = {
    "grpo": advantages.grpo,
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "reinforce": advantages.reinforce,
    "reinforce_baseline": advantages.reinforce_baseline,
    "gae": advantages.reward_itself,
}

KL_ESTIMATORS = kl.ESTIMATORS


def choose_loss(algo: str, algo_args: Iterable[str], loss: Callable | None = None, advantage: str = "grpo") -> Callable:
    """Return the loss that --algo names with its `--algo-args`, as a function of the inputs alone.

    `loss` and what is raised as in `hyperparameters`; ValueError also where the loss needs one advantage per sequence,
    and the estimator `advantage` has one per token.
    """
    loss = loss or LOSSES[algo]
    if advantage == "gae" and hasattr(loss, "needs_equal_advantages"):
        raise ValueError(
            f"--algo {algo} needs one advantage for all tokens of a response, and --advantage gae gives each its own; "
            "take another --advantage, as grpo, or a loss that weighs tokens one by one, as tis_ppo"
        )
    return functools.update_wrapper(functools.partial(loss, **hyperparameters(algo, algo_args, loss)), loss)


def hyperparameters(algo: str, algo_args: Iterable[str], loss: Callable | None = None) -> dict[str, Any]:
    """Return `--algo-args`, each NAME=VALUE, as keyword arguments of the loss that --algo names.

    `loss` is a user's own, where `algo` is FILE.py:NAME. Raises ValueError, in one line, for a name that the loss does
    not take and for a value that it does not allow.
    """
    _, *parameters = inspect.signature(loss or LOSSES[algo], eval_str=True).parameters.values()
    keywords = [parameter for parameter in parameters if parameter.name != "update"]
    return read_arguments("algo-args", algo_args, f"--algo {algo}", keywords)
