"""REINFORCE: plain policy gradient, with no correction for stale data.

    loss_t = −A · log π(t)

Acts on: none, token, nothing.
At lag: a stale token has the gradient of a fresh one.

Williams 1992, «Simple statistical gradient-following algorithms»; the `vanilla` variant of ROLL Flash
(arXiv 2510.11345).
Differs from the paper: the advantage has the baseline (algos/advantages.py). Tokens have weights, not episodes.
"""

from algos.inputs import LossInputs, LossOutput
from algos.ratio import importance_ratio


def loss(inputs: LossInputs) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: ratio."""
    per_token_loss = -inputs.advantages * inputs.logprobs
    # The ratio is reported, to show how far off-policy the data were; it takes no part in the loss.
    ratio = importance_ratio(inputs.log_ratio.detach())
    return per_token_loss, {"ratio": ratio}
