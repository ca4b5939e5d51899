"""PNPO: a token weighs the geometric mean of the ratios up to it, and is left out where that mean is far from 1.

    r_k    = exp(log π(k) − log π_behavior(k))
    w_t    = exp(mean of log r_k over the sequence's first t tokens, the t-th included)
    h_t    = sqrt(T/t)                                           T = tokens of the sequence
    M_t    = 1 where −log_low·h_t ≤ log w_t ≤ log_high·h_t, else 0
    loss_t = −sg(M_t·w_t)·A·log π(t)                             sg = stop-gradient

A mean of few ratios is noisier than a mean of many, as 1/sqrt(t). So the band is wide for the first tokens and narrow
for the last. The weight depends on the prefix only: later tokens do not change it.

Acts on: E, prefix, mask and weight.
At lag: a token is left out where the mean log-ratio of its prefix has left the band. The others weigh the geometric
mean.

PNPO, after arXiv 2608.01418. Two texts about the paper have the weight, its use as the statistic of the mask, and the
factor h. The paper itself was not read. Three things are guesses. The band is one of log-ratios. It leaves tokens out
on both sides, whatever the sign of A. Its default bounds are ours, about as wide as PPO's clip.
Differs from the paper, as far as known: 1/length is a choice of `loss_aggregation`. Tokens of the environment are not
part of the prefix. Log w is clamped to ±20 nats.
MinPRO (minpro.py) takes the least ratio of the prefix in place of the mean, and truncates. GSPO (gspo.py) and MIS
(mis.py) with level "geometric" take the mean over the whole sequence.
"""

import torch

from algos.inputs import LossInputs, LossOutput, Positive
from algos.objectives import weighted_policy_gradient
from algos.ratio import importance_ratio, places, prefix_sum, sequence_sum


def loss(inputs: LossInputs, *, log_low: Positive = 0.2, log_high: Positive = 0.2) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (left out).

    `log_low` and `log_high` are in nats.
    """
    log_ratio, ids = inputs.log_ratio.detach(), inputs.sequence_ids
    counts = places(ids).to(log_ratio.dtype) + 1
    mean = prefix_sum(log_ratio, ids) / counts
    widening = (sequence_sum(torch.ones_like(counts), ids) / counts).sqrt()
    is_out = (mean < -log_low * widening) | (mean > log_high * widening)
    weight = torch.where(is_out, 0.0, importance_ratio(mean))
    return weighted_policy_gradient(inputs, weight, inputs.ratio, clipped=is_out)
