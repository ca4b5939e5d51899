"""What a policy loss sees: the trained tokens of one micro-batch, flat, with no padding and no mask."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """N trained tokens of one micro-batch, N ≥ 1; float32, or float64 which is then computed in float64."""

    logprobs: Tensor
    """[N] nats, current policy; the only field that carries gradient."""
    behavior_logprobs: Tensor
    """[N] nats, recorded by the engine when the token was sampled; never recomputed."""
    proximal_logprobs: Tensor
    """[N] nats, trainer's policy at the start of the step, before its first update; see also algos/proximal.py."""
    advantages: Tensor
    """[N] advantage of the token's sequence."""
    rewards: Tensor
    """[N] task reward of the token's sequence."""
    sequence_ids: Tensor
    """[N] int64, non-decreasing; the sequences that have a trained token, numbered 0 … S−1 in the micro-batch."""


def try_loss(loss: Callable) -> None:
    """Compute a loss of the user's own on six tokens of two sequences.

    Raises TypeError for what is no loss and stats for each of them, and whatever the loss raises.
    """
    ids, n = torch.tensor([0, 0, 0, 0, 1, 1]), 6
    logprobs = torch.linspace(-2, -0.1, n).requires_grad_()
    others = {"behavior_logprobs": logprobs.detach() - 0.1, "proximal_logprobs": logprobs.detach() - 0.05}
    found = loss(LossInputs(logprobs, **others, advantages=1.0 - 2 * ids, rewards=1.0 - ids, sequence_ids=ids))
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise TypeError(f"the loss gave {str(found)[:80]}; give (per_token_loss [N], stats: dict of [N])")
    for name, value in {"per_token_loss": found[0], **found[1]}.items():
        if not isinstance(value, Tensor) or value.shape != (n,):
            what = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} is {what} for N = {n} tokens; give a tensor [N], one value for each token")
    if not found[0].requires_grad:
        raise TypeError("per_token_loss carries no gradient; make it of inputs.logprobs, not detached")
