"""TOPR: good responses are imitated, however stale. Bad ones count only as far as they are still likely.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −A·log π(t)                            where reward > 0
    loss_t = −sg(clip(r_t, 0, 1))·A·log π(t)        elsewhere                sg = stop-gradient

Acts on: E, token, weight.
At lag: a token of a bad response weighs its ratio, at most 1, so it counts less as it becomes unlikely. A good one
weighs 1, however stale.

Tapered Off-Policy REINFORCE, arXiv 2503.14286, section 3; ROLL Flash, arXiv 2510.11345.
Differs from the paper: the ratio is a token's and not the response's, as in ROLL Flash. A reward of 0 counts as bad.
The paper's rewards are ±1, and its good side is R ≥ 0. With it every response of a 0/1 task would be good. A stands in
place of the paper's R, so a good response with A < 0 is pushed away untapered.
"""

from algos import weighted_topr
from algos.inputs import LossInputs, LossOutput


def loss(inputs: LossInputs) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if a ratio is cut)."""
    return weighted_topr.loss(inputs)
