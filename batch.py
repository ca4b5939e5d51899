"""From the groups of a step to each rank's share of its optimizer updates."""

import torch
import torch.distributed as dist

from algos import ADVANTAGES
from config import Config
from data.records import Group
from packing import TrainSequence, distribute


def make_updates(groups: list[Group], config: Config) -> list[list[TrainSequence]]:
    """Give every trajectory its advantage and deal whole groups, in order, to the step's minibatches.

    Advantages are estimated over the whole step: [update][sequence]. Raises RuntimeError for a reward that is not a
    finite number.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    group_ids = torch.tensor([t.group_id for t in trajectories])
    advantages = ADVANTAGES[config.advantage](rewards, group_ids)
    sequences = [
        TrainSequence(
            t.tokens, t.loss_mask, t.behavior_logprobs, t.policy_versions, float(advantage), t.reward, t.group_id
        )
        for t, advantage in zip(trajectories, advantages, strict=True)
    ]
    size = len(sequences) // config.minibatches
    return [sequences[i * size : (i + 1) * size] for i in range(config.minibatches)]


def share(groups: list[Group] | None, config: Config, one_row: bool) -> list[list[list[TrainSequence]]]:
    """This rank's [update][micro-batch] → sequences, balanced over ranks by tokens; collective.

    `groups` is the batch on rank 0 and None on the others; `one_row` says how the model wants micro-batches packed.
    """
    num_ranks = dist.get_world_size()
    shares = [None] * num_ranks
    if dist.get_rank() == 0:
        updates = make_updates(groups, config)
        shares = distribute(updates, num_ranks, config.max_tokens_per_microbatch, config.share_prefix, one_row)
    mine: list = [None]
    dist.scatter_object_list(mine, shares, src=0)
    return mine[0]
