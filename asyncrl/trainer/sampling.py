"""The sampling transform of vLLM, in its order. Under it engine and trainer have the same policy."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """Options of the sampling transform, named as in asyncrl/config.py. The defaults do not change logits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def sampling_logits(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """Apply the engine's sampling transform to logits [N, V] float32: temperature, then min-p, top-k and top-p.

    Logits outside the kept set are −inf. The current policy chooses the set, and the set counts as a constant. The
    sampled token, targets [N] int64, always stays: the weights may have moved since. The rules are as for vLLM's
    `processed_logprobs`. min-p and top-k drop the logits below a limit, so ties stay. Then top-p drops the least likely
    tokens while their share of the remaining mass is at most 1 − top_p.
    """
    logits = logits / sampling.temperature
    if sampling[1:] == Sampling()[1:]:
        return logits
    return logits.masked_fill(_outside_support(logits, targets, sampling), -math.inf)


@torch.no_grad()
def _outside_support(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    likeliest = logits.topk(min(max(sampling.top_k, 1), logits.shape[1])).values
    least = likeliest[:, :1] + (math.log(sampling.min_p) if sampling.min_p else -math.inf)
    outside = logits < (least.maximum(likeliest[:, -1:]) if sampling.top_k else least)
    if sampling.top_p < 1:
        ascending, order = logits.masked_fill(outside, -math.inf).sort(dim=-1)
        cut_sorted = ascending.softmax(dim=-1).cumsum_(dim=-1) <= 1 - sampling.top_p
        cut_sorted[:, -1] = False
        outside.scatter_(1, order, cut_sorted)
    return outside.scatter_(1, targets[:, None], False)
