"""REINFORCE: plain policy gradient, with no correction for stale data.

    loss_t = −A · log π(t)

Acts on: none, token, nothing.
At lag: a stale token has the gradient of a fresh one.

Williams 1992, «Simple statistical gradient-following algorithms»; the `vanilla` variant of ROLL Flash
(arXiv 2510.11345).
Differs from the paper: the advantage has the baseline (algos/advantages.py). Tokens have weights, not episodes.
"""

from algos.inputs import LossInputs, LossOutput


def loss(inputs: LossInputs) -> LossOutput:
    """Return the per-token loss [N], and no stats."""
    return -inputs.advantages * inputs.logprobs, {}
