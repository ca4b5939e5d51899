"""A loss of the user's own, which comes from a file elsewhere: what it must be, tried before anything heavy starts."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from algos.inputs import LossInputs, couples_tokens

_MUST_TRAIN = {
    0.0: "fresh tokens, whose ratio is 1",
    1e-5: "tokens that only rounding has moved, by 1e-5 nats the way their advantage points",
}
"""Tokens that a loss must train some of, by how far they moved, nats: clips and bands are to be wider than what engine
and trainer differ by at one version."""


def check_signature(loss: Any) -> None:
    """Raise TypeError unless something is a function of the inputs, whose other parameters have defaults."""
    if not inspect.isfunction(loss):
        raise TypeError(f"it is a {type(loss).__name__}; give a function loss(inputs, *, NAME=VALUE)")
    first, *others = list(inspect.signature(loss).parameters.values()) or [None]
    if others and others[0].name == "update" and others[0].kind is not first.KEYWORD_ONLY:
        others = others[1:]
    without = [k.name for k in others if k.default is k.empty and k.kind in (k.POSITIONAL_OR_KEYWORD, k.KEYWORD_ONLY)]
    if first is None or first.kind is first.KEYWORD_ONLY or without:
        raise TypeError(
            f"{loss.__name__} takes {inspect.signature(loss)}; its first parameter must be the inputs "
            "(algos.LossInputs), its second may be `update`, and all others need defaults"
        )


def try_loss(loss: Callable) -> None:
    """Compute a loss on six tokens of two sequences, a good and a bad one: stale ones, then those of _MUST_TRAIN.

    Raises TypeError for what is no loss and stats for each of them, ValueError where the latter have no gradient at all
    or one that is not finite, and whatever the loss raises.
    """
    logprobs = torch.linspace(-2, -0.1, 6).requires_grad_()
    found = _call(loss, _six_tokens(logprobs, 0.1))
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise TypeError(f"the loss gave {str(found)[:80]}; give (per_token_loss [N], stats: dict of [N])")
    for name, value in {"per_token_loss": found[0], **found[1]}.items():
        if not isinstance(value, Tensor) or value.shape != (6,):
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} is {what} for N = 6 tokens; give a tensor [N], one value for each token")
    if not found[0].requires_grad:
        raise TypeError("per_token_loss carries no gradient; make it of inputs.logprobs, not detached")
    for moved, which in _MUST_TRAIN.items():
        losses = _call(loss, _six_tokens(logprobs, moved))[0]
        (slopes,) = torch.autograd.grad(losses.sum(), logprobs)
        if not (losses.isfinite().all() and slopes.isfinite().all() and slopes.any()):
            got = f"the losses {losses.tolist()} and the gradient {slopes.tolist()}"
            raise ValueError(f"{which}, have {got}: nothing would be trained; take other arguments")


def _call(loss: Callable, inputs: LossInputs) -> Any:
    """Call a loss on inputs that are a whole update."""
    return loss(inputs, inputs.to("cpu")) if couples_tokens(loss) else loss(inputs)


def _six_tokens(logprobs: Tensor, moved: float) -> LossInputs:
    """Inputs that a loss might see; good tokens are `moved`, nats, likelier than when they were sampled, bad ones less
    likely."""
    ids, held = torch.tensor([0, 0, 0, 0, 1, 1]), logprobs.detach()
    advantages = 1.0 - 2 * ids
    log_ratio = moved * advantages
    others = {"behavior_logprobs": held - log_ratio, "proximal_logprobs": held - log_ratio / 2}
    return LossInputs(logprobs, **others, advantages=advantages, rewards=1.0 - ids, sequence_ids=ids)


def describe(algo: str, loss: Callable) -> str:
    """What a loss is, in a line, and its keyword arguments with their defaults and ranges."""
    text = (inspect.getmodule(loss).__doc__ if loss.__module__.startswith("algos.") else inspect.getdoc(loss)) or ""
    _, *keywords = inspect.signature(loss, eval_str=True).parameters.values()
    rows = [(f"{k.name}={k.default}", _allowed(k.annotation)) for k in keywords if k.name != "update"]
    what = text.strip().splitlines()[0] if text else "no docstring"
    shown = [f"  {row:28}{words}".rstrip() for row, words in rows] or ["  none"]
    return "\n".join([f"--algo {algo}: {what}", "", "--algo-args, NAME=VALUE each:", *shown])


def _allowed(annotation: Any) -> str:
    """The values that an annotation allows, in words; none where any of its type is."""
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    kinds = (annotation, *get_args(annotation))  # with None, the range is that of the other
    return next((kind.__metadata__[0] for kind in kinds if hasattr(kind, "__metadata__")), "")
