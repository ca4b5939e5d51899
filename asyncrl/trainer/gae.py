"""Generalised advantage estimation: advantages of single tokens, from values of the states before and after them.

    δ_t = r_t + γ·V_{t+1} − V_t        A_t = δ_t + γλ·A_{t+1}        G_t = V_t + A_t, with value_lam for λ

over the trained tokens t = 1 … n of a sequence. Schulman et al., arXiv 1506.02438, equation 16; PPO, arXiv 1707.06347,
equations 11 and 12. V_t is the value of all tokens before token t. r_n is the reward, and every other r_t is 0. V_{n+1}
is 0, also if the response was cut. Tokens of an environment make no step: a turn's first token follows the last
token of the turn before.

The values are fitted to G_t, returns of the policy that sampled; with stale data that is an older policy. With λ = 1
they are its true returns, without bias, and V is only a baseline. Correcting for the distance to the trained policy, as
V-trace does (arXiv 1802.01561), is left to the loss. A loss that needs equal advantages within a sequence is refused
(algos/inputs.py).
"""

import itertools
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from algos.advantages import EPS
from algos.ratio import places
from asyncrl.cluster.cluster import gather_from_ranks
from asyncrl.config import AdvantageOptions
from asyncrl.trainer.packing import MicroBatch


class ValueHead(nn.Module):
    """Linear map in float32 from the last hidden state of a state to its value.

    It starts at zero. The trained model is its trunk and learns from both losses, because a separate value model would
    double the memory. Engines do not get it.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=torch.float32, device="meta"))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [N] float32 of hidden states [N, H]; the backward pass keeps no float32 copy of them."""
        return checkpoint(
            lambda hidden, weight: hidden.float() @ weight,
            hidden,
            self.weight,
            use_reentrant=False,
            preserve_rng_state=False,
        )


def gae(rewards: Tensor, values: Tensor, sequence_ids: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantage of each trained token, [N] float64.

    `rewards` [N] of the token's sequence, `values` [N] before the token, `sequence_ids` [N] int64 as in LossInputs.
    """
    if not len(values):
        return values.double()
    token_places = places(sequence_ids)
    is_last = token_places.roll(-1) == 0
    targets = torch.where(is_last, rewards.double(), gamma * values.double().roll(-1))
    # [place, sequence], so that all sequences go one step back at a time
    advantages = targets.new_zeros(int(token_places.max()) + 1, int(sequence_ids.max()) + 1)
    advantages[token_places, sequence_ids] = targets - values.double()
    for place in reversed(range(len(advantages) - 1)):
        advantages[place] += gamma * lam * advantages[place + 1]
    return advantages[token_places, sequence_ids]


def estimate_step(
    minibatches: list[list[MicroBatch]], options: AdvantageOptions
) -> tuple[list[list[MicroBatch]], dict[str, float]]:
    """Give each token of a step, [minibatch][micro-batch], an advantage and a return; collective.

    On entry, the advantages of a micro-batch are the rewards of its sequences.
    Also returns the share of the returns' variance that the values explain: 1 for right values, 0 for a constant. It is
    absent if all returns are equal.
    """
    estimates = [_estimate(batch, options) for batch in itertools.chain(*minibatches)]
    all_tokens = torch.cat(gather_from_ranks(torch.cat(estimates, dim=1)), dim=1)
    # The variance is unbiased, and 0 of a single token.
    variance, mean = torch.var_mean(all_tokens, 1, correction=min(1, all_tokens.shape[1] - 1))
    if options.whiten:
        for estimate in estimates:
            estimate[0] = (estimate[0] - mean[0]) / (variance[0].sqrt() + EPS)
    metrics = {}
    if variance[1] > EPS**2:
        metrics["value/explained_variance"] = float(1 - variance[2] / variance[1])
    remaining = iter(estimates)
    return [
        [_with_estimate(batch, next(remaining)) for batch in minibatch] for minibatch in minibatches
    ], metrics


def _estimate(batch: MicroBatch, options: AdvantageOptions) -> Tensor:
    """Return advantages, returns and the values' errors, [3, N] float64, on the CPU."""
    rewards = batch.advantages.cpu()
    values = batch.columns["values"].cpu()
    sequence_ids = batch.sequence_ids.cpu()
    advantages = gae(rewards, values, sequence_ids, options.gamma, options.lam)
    errors = gae(rewards, values, sequence_ids, options.gamma, options.value_lam)
    return torch.stack([advantages, values + errors, errors])


def _with_estimate(batch: MicroBatch, estimate: Tensor) -> MicroBatch:
    """Return the micro-batch with the advantages and returns of an estimate [3, N], as float32 on its device."""
    advantages, returns = (row.to(batch.advantages) for row in estimate[:2])
    return replace(batch, advantages=advantages, columns=batch.columns | {"returns": returns})
