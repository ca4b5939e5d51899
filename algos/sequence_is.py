"""Sequence IS: importance sampling of whole sequences. The control: unbiased if tokens are summed, and the noisiest.

    s      = exp(sum over the sequence of log π(t) − log π_behavior(t)) = Π r, at most cap if there is one
    loss_t = −sg(s)·A·log π(t)          sg = stop-gradient

Without a cap, the sum over a sequence has the gradient s·A·∇log π(sequence). Its mean over the policy that sampled
equals that of A·∇log π(sequence) over π, as on fresh data. A token's own ratio is only a factor of s. So a loss that
weighs single tokens is biased, with any clip. The price of s is a variance that grows exponentially with length and
staleness. results/bandit shows both. Use it as a measure for other losses, and on short responses.

Acts on: E, sequence, weight.
At lag: a sequence weighs the product of its ratios. None is left out, and without a cap no weight is limited.

Per-trajectory importance sampling: Precup, Sutton and Singh 2000, «Eligibility Traces for Off-Policy Policy
Evaluation». VESPO, arXiv 2602.10693, has it as the naive correction: unbiased, and too noisy to use.
Differs from the paper: log s is clamped to ±20 nats. It is unbiased with `loss_aggregation` constant, because the other
two divide by lengths that the policy chooses. The baseline of the advantage must not depend on the response.
The gradient stops at s. With the loss −s·A at every token, the gradient would come once per token. It would need a
division by the length. A cap would then cut the gradient and not bound it. The sequence-level TIS of verl and SkyRL is
the capped one, on top of a PPO clip: tis_ppo.py.
"""

from algos.inputs import Cap, LossInputs, LossOutput
from algos.objectives import weighted_policy_gradient
from algos.ratio import importance_ratio, sequence_sum


def loss(inputs: LossInputs, *, cap: Cap | None = None) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped by the cap."""
    ratio = importance_ratio(sequence_sum(inputs.log_ratio.detach(), inputs.sequence_ids))
    weight = ratio if cap is None else ratio.clamp(max=cap)
    return weighted_policy_gradient(inputs, weight, ratio)
