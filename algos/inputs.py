"""What a policy loss sees: the trained tokens of one micro-batch, flat, with no padding and no mask."""

from dataclasses import dataclass

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
