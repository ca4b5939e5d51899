"""Kimi k1.5: policy gradient with a squared log-ratio that pulls back to the policy that sampled.

    loss_t = −A·log π(t) + tau/2·(log π(t) − log π_behavior(t))²

Acts on: E, token, shape.
At lag: the further a token moved, the harder the square pulls it back. The policy gradient itself is not corrected.

Kimi k1.5, arXiv 2501.12599, section 2.3.2, the last gradient there. It is per token as in ROLL Flash, arXiv 2510.11345.
The name in verl is `dro`.
Differs from the paper: the square is of a token's log-ratio and not of the response's. The anchor is the policy that
sampled the token; the paper has the start of its iteration. There is no importance weight: the square resists staleness
and does not correct it. A token with A = 0 still has the gradient tau·(log π − log π_behavior).
"""

from algos.inputs import LossInputs, LossOutput, Positive


def loss(inputs: LossInputs, *, tau: Positive = 0.1) -> LossOutput:
    """Return the per-token loss [N], and no stats."""
    log_ratio = inputs.log_ratio
    per_token_loss = -inputs.advantages * inputs.logprobs + tau / 2 * log_ratio**2
    return per_token_loss, {}
