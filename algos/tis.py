"""TIS: truncated importance sampling. The weight is clipped, and every token keeps its gradient.

    r_t    = exp(log π(t) − log π_behavior(t))
    loss_t = −sg(clip(r_t, clip_low, clip_high)) · A · log π(t)          sg = stop-gradient

Acts on: E, token, weight.
At lag: a token weighs its ratio, cut into the range of the clip. None is left out.

ROLL Flash, arXiv 2510.11345, «Truncated IS»; the clipped weight is that of IMPALA, arXiv 1802.01561, section 4.1.
Differs from the paper: nothing known. The defaults [0, 1] are those of its code.
The TIS of verl, NeMo RL, SkyRL and slime is a PPO clip times a truncated weight: tis_ppo.py.
"""

from algos.inputs import Cap, LossInputs, LossOutput, Share
from algos.objectives import weighted_policy_gradient


def loss(inputs: LossInputs, *, clip_low: Share = 0.0, clip_high: Cap = 1.0) -> LossOutput:
    """Return the per-token loss [N], and the detached stats [N]: weight, clipped (1 if weight ≠ ratio)."""
    ratio = inputs.ratio
    return weighted_policy_gradient(inputs, ratio.clamp(clip_low, clip_high), ratio)
