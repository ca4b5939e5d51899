"""From the groups of a step to each rank's share of its optimizer updates.

Every node shares its own groups among its own ranks. What must be known of the others' are rewards, for advantages over
the whole step, and the number of micro-batches.
"""

import numpy as np
import torch

from algos import ADVANTAGES
from cluster.cluster import Cluster
from config import Config
from data.records import Group
from trainer.packing import TrainSequence, distribute
from trainer.policy import Policy


def make_updates(
    groups: list[Group], config: Config, cluster: Cluster | None = None, *, step: int
) -> list[list[TrainSequence]]:
    """Give every trajectory its advantage and deal whole groups to the step's minibatches.

    Groups come sorted by age, and so by length: several minibatches get them in a random order of seed and step.

    Advantages are estimated over the whole step, on all nodes; what is returned is this node's: [update][sequence].
    Collective over the leaders of nodes that train. Raises RuntimeError for a reward that is not a finite number.
    """
    if config.minibatches > 1:
        groups = [groups[i] for i in np.random.default_rng((config.seed, step)).permutation(len(groups))]
    trajectories = [t for group in groups for t in group.trajectories]
    advantages = _advantages([(t.reward, t.group_id) for t in trajectories], config, cluster or Cluster())
    sequences = [
        TrainSequence(t.tokens, t.loss_mask, t.behavior_logprobs, t.policy_versions, advantage, t.reward, t.group_id)
        for t, advantage in zip(trajectories, advantages, strict=True)
    ]
    size = len(sequences) // config.minibatches
    return [sequences[i * size : (i + 1) * size] for i in range(config.minibatches)]


def _advantages(mine: list[tuple[float, int]], config: Config, cluster: Cluster) -> list[float]:
    """Advantages of this node's (reward, group_id) pairs, estimated from those of all nodes."""
    of_nodes = cluster.gather_over_trainers(mine)
    rewards, group_ids = zip(*(pair for pairs in of_nodes for pair in pairs), strict=True)
    advantages = ADVANTAGES[config.advantage](torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids))
    start = sum(map(len, of_nodes[: cluster.trainers.index(cluster.node)]))
    return advantages[start : start + len(mine)].tolist()


def deal(groups: list[Group] | None, step: int, policy: Policy, cluster: Cluster) -> list[list[list[TrainSequence]]]:
    """Deal a step's groups to the node's ranks: this rank's [update][micro-batch] → sequences; collective.

    `groups` is the node's batch on its leader and None on the others; ranks get about equal tokens.
    """
    policy.clock.enter("gather")
    config, shares = policy.config, None
    if groups is not None:
        updates = make_updates(groups, config, cluster, step=step)
        num_ranks, max_tokens = len(cluster.local_ranks), config.max_tokens_per_microbatch
        shares = distribute(updates, num_ranks, max_tokens, config.share_prefix, policy.one_row)
    mine = cluster.scatter_on_node(shares)
    return mine if len(cluster.trainers) == 1 else _pad(mine, cluster)


def _pad(mine: list[list[list[TrainSequence]]], cluster: Cluster) -> list[list[list[TrainSequence]]]:
    """Add empty micro-batches, as FSDP's collectives need the same number of them on all ranks of all nodes."""
    largest = cluster.max_over_ranks([len(update) for update in mine])
    return [update + [[] for _ in range(num - len(update))] for update, num in zip(mine, largest, strict=True)]
