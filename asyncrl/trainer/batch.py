"""Turns the groups of a step into each rank's micro-batches, and gives each trajectory its advantage.

Every node shares its own groups among its own ranks. Nodes exchange only rewards, because advantages are estimated
over the whole step.
"""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from algos.advantages import overlong_penalty
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.records import Group, Trajectory, slice_columns
from asyncrl.trainer.advantage_choice import estimate
from asyncrl.trainer.loss_choice import reads_sequences
from asyncrl.trainer.packing import RankShare, TrainSequence
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.splitting import distribute


def share_batch(
    groups: list[Group] | None, step: int, policy: Policy, cluster: Cluster
) -> RankShare:
    """Give each trajectory its advantage, and share the step's groups among the node's ranks; collective.

    Returns this rank's part, [minibatch][micro-batch] → bundles.

    `groups` is the node's batch on its leader, and None on other ranks. Ranks get about equal tokens.
    """
    policy.clock.enter("gather")
    shares = None
    if groups is not None:
        check_segments(groups, policy.config, policy.loss)
        shares = distribute(
            sequences_by_minibatch(groups, policy.config, cluster, step),
            len(cluster.local_ranks),
            policy.config.max_tokens_per_microbatch,
            policy.module.layout,
            policy.split_over_ranks,
        )
    return cluster.scatter_on_node(shares)


def check_segments(groups: list[Group], config: Config, loss: Callable) -> None:
    """Raise ValueError for a trajectory of several segments, if the loss or the values need whole trajectories."""
    num_segments = max(len(t.segments) for group in groups for t in group.trajectories)
    if num_segments == 1:
        return
    needy = f"--algo {config.algo}" if reads_sequences(loss) else ""
    if config.advantage == "gae":
        needy = "--advantage gae"
    if needy:
        raise ValueError(
            f"a trajectory of --task {config.task} has {num_segments} segments, as its agent's messages branch, and "
            f"{needy} needs whole responses; take a loss that weighs tokens one by one, as grpo or tis, and another "
            "advantage than gae, or let each call of the agent extend the one before"
        )


def sequences_by_minibatch(
    groups: list[Group], config: Config, cluster: Cluster, step: int
) -> list[list[TrainSequence]]:
    """Shuffle groups, estimate advantages, and split the groups over minibatches; collective over leaders.

    Returns this node's part, [minibatch][sequence]. The numbers of groups of minibatches differ by at most one.
    Raises ValueError for a reward or an advantage that is not finite.
    """
    num_minibatches = config.minibatches
    if num_minibatches > 1:
        # Groups come sorted by age, and so by length.
        order = np.random.default_rng((config.seed, step)).permutation(len(groups))
        groups = [groups[index] for index in order]
    advantages = iter(estimate_advantages(groups, config, cluster, step))
    minibatches: list[list[TrainSequence]] = [[] for _ in range(num_minibatches)]
    for index, group in enumerate(groups):
        minibatch = minibatches[index * num_minibatches // len(groups)]
        for trajectory in group.trajectories:
            minibatch += _segments(trajectory, next(advantages))
    return minibatches


def estimate_advantages(
    groups: list[Group], config: Config, cluster: Cluster, step: int
) -> list[float]:
    """Return the advantage of each trajectory of this node's groups, estimated from the rewards of all nodes."""
    max_tokens = config.max_response_tokens
    overlong = config.advantage_options.overlong_tokens
    rows = [
        (
            trajectory.reward
            - overlong_penalty(trajectory.num_beyond_prompt, max_tokens, overlong),
            trajectory.group_id,
            step - 1 - trajectory.oldest_version,
        )
        for group in groups
        for trajectory in group.trajectories
    ]
    rows_of_nodes = cluster.gather(rows)
    rewards, group_ids, staleness = zip(*itertools.chain(*rows_of_nodes), strict=True)
    advantages = estimate(
        config,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(group_ids),
        torch.tensor(staleness),
    )
    nums_of_nodes = [len(node_rows) for node_rows in rows_of_nodes]
    return advantages.split(nums_of_nodes)[cluster.node].tolist()


def _segments(trajectory: Trajectory, advantage: float) -> list[TrainSequence]:
    """Return each segment of a trajectory as a sequence with the trajectory's advantage."""
    return [
        TrainSequence(
            tokens=trajectory.tokens[segment],
            loss_mask=trajectory.loss_mask[segment],
            advantage=advantage,
            reward=trajectory.reward,
            group_id=trajectory.group_id,
            # once a trajectory, because staleness/mean counts trajectories
            oldest_version=trajectory.oldest_version if segment.start == 0 else None,
            # whole, because --router-replay refuses agents, whose trajectories have several segments
            experts=trajectory.experts,
            trained_in_trajectory=trajectory.num_generated,
            # behavior_logprobs, policy_versions, …: the fields of TokenColumns
            **slice_columns(trajectory, segment),
        )
        for segment in trajectory.segments
    ]
