"""Sequence IS: importance sampling of whole sequences. The control: unbiased where tokens are summed, and the noisiest.

    s      = exp(sum over the sequence of log π(t) − log π_behavior(t)) = Π r, at most cap if there is one
    loss_t = −sg(s)·A·log π(t)          sg = stop-gradient

Without a cap the sum over a sequence has the gradient s·A·∇log π(sequence), whose mean over the policy that sampled is
that of A·∇log π(sequence) over π: what fresh data would give. A token's own ratio is only a factor of s, so a loss that
weighs tokens one by one is biased however wide its clip; the price of s is a variance that grows exponentially with
length and staleness. results/bandit shows both: use it to measure others by, and on short responses.

Per-trajectory importance sampling: Precup, Sutton and Singh 2000, «Eligibility Traces for Off-Policy Policy
Evaluation»; as the naive correction that is unbiased and unusably noisy it is in VESPO, arXiv 2602.10693.
Differs from the paper: log s is clamped to ±20 nats. Unbiased holds with `loss_aggregation` constant, since the other
two divide by lengths that the policy chooses, and with an advantage whose baseline is independent of the response.
The gradient stops at s. With −s·A as the loss of every token it would come once per token, as many times too large as
the sequence is long; it would have to be divided by the length; and a cap would then cut a gradient instead of
bounding it. verl's and SkyRL's sequence-level TIS is the capped one, on top of a PPO clip: tis_ppo.py.
"""

from algos.inputs import Cap, LossInputs, LossOutput
from algos.objectives import weighted_policy_gradient
from algos.ratio import importance_ratio, sequence_sum


def loss(inputs: LossInputs, *, cap: Cap | None = None) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: ratio (the sequence's), weight, clipped by the cap."""
    ratio = importance_ratio(sequence_sum(inputs.log_ratio.detach(), inputs.sequence_ids))
    weight = ratio if cap is None else ratio.clamp(max=cap)
    return weighted_policy_gradient(inputs, weight, ratio)
