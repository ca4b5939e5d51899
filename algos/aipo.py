"""AIPO: importance-weighted policy gradient whose weight is capped from above only.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −sg(min(r_t, cap))·A·log π(t)          sg = stop-gradient

LlamaRL, arXiv 2505.24034, «Asynchronous Importance weighted Policy Optimization».
Differs from the paper: nothing known; it is tis.py with a cap above 1, which lets likelier tokens weigh more.
"""

from torch import Tensor

from algos.arguments import Cap
from algos.inputs import LossInputs
from algos.ratio import importance_ratio


def loss(inputs: LossInputs, *, cap: Cap = 5.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss [N], and the detached stats [N]: ratio, weight, clipped (1 where weight ≠ ratio)."""
    ratio = importance_ratio(inputs.logprobs.detach() - inputs.behavior_logprobs)
    weight = ratio.clamp(max=cap)
    per_token_loss = -weight * inputs.advantages * inputs.logprobs
    return per_token_loss, {
        "ratio": ratio,
        "weight": weight,
        "clipped": (weight != ratio).to(ratio.dtype),
    }
