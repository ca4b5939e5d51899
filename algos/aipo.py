"""AIPO: importance-weighted policy gradient whose weight is capped from above only.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −sg(min(r_t, cap))·A·log π(t)          sg = stop-gradient

Acts on: E, token, weight.
At lag: a token weighs its ratio, at most the cap. None is left out.

LlamaRL, arXiv 2505.24034, «Asynchronous Importance weighted Policy Optimization».
Differs from the paper: nothing known. It is tis.py with a cap above 1, so likelier tokens weigh more.
"""

from algos import tis
from algos.inputs import Cap, LossInputs, LossOutput


def loss(inputs: LossInputs, *, cap: Cap = 5.0) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if weight ≠ ratio)."""
    return tis.loss(inputs, clip_high=cap)
