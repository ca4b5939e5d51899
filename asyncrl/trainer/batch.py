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
from asyncrl.trainer.advantage import choose_estimator
from asyncrl.trainer.loss import reads_sequences
from asyncrl.trainer.packing import TrainSequence, Updates
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.splitting import distribute


def share_batch(groups: list[Group] | None, step: int, policy: Policy, cluster: Cluster) -> Updates:
    """Give each trajectory its advantage, and share the step's groups among the node's ranks; collective.

    Returns this rank's part, [update][micro-batch] → bundles.

    `groups` is the node's batch on its leader, and None on other ranks. Ranks get about equal tokens.
    """
    policy.clock.enter("gather")
    shares = None
    if groups is not None:
        check_segments(groups, policy.config, policy.loss)
        shares = distribute(
            make_updates(groups, policy.config, cluster, step),
            len(cluster.local_ranks),
            policy.config.max_tokens_per_microbatch,
            policy.module.layout,
            policy.split_over_ranks,
        )
    return cluster.scatter_on_node(shares)


def check_segments(groups: list[Group], config: Config, loss: Callable) -> None:
    """Raise ValueError for a trajectory of several segments, if the loss or the values need whole trajectories."""
    num_segments = max(len(t.segments) for group in groups for t in group.trajectories)
    needy = f"--algo {config.algo}" if num_segments > 1 and reads_sequences(loss) else None
    if num_segments > 1 and config.advantage == "gae":
        needy = "--advantage gae"
    if needy is not None:
        raise ValueError(
            f"a trajectory of --task {config.task} has {num_segments} segments, as its agent's messages branch, and "
            f"{needy} needs whole responses; take a loss that weighs tokens one by one, as grpo or tis, and another "
            "advantage than gae, or let each call of the agent extend the one before"
        )


def make_updates(
    groups: list[Group], config: Config, cluster: Cluster, step: int
) -> list[list[TrainSequence]]:
    """Give every trajectory its advantage, and split whole groups over the step's minibatches; collective over leaders.

    Groups come sorted by age, and so by length. Several minibatches get them in a random order, drawn from seed and
    step. The numbers of groups in minibatches differ by at most one.
    Advantages are estimated over the step of all nodes. Returns this node's part, [update][sequence].
    Raises RuntimeError for a reward that is not finite.
    """
    if config.minibatches > 1:
        order = np.random.default_rng((config.seed, step)).permutation(len(groups))
        groups = [groups[index] for index in order]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = iter(_advantages(trajectories, config, cluster, step))
    updates: list[list[TrainSequence]] = [[] for _ in range(config.minibatches)]
    for index, group in enumerate(groups):
        update = updates[index * config.minibatches // len(groups)]
        for trajectory in group.trajectories:
            update += _segments(trajectory, next(advantages))
    return updates


def _segments(trajectory: Trajectory, advantage: float) -> list[TrainSequence]:
    """Return each segment of a trajectory as a sequence with the trajectory's advantage."""
    num_trained = trajectory.num_generated if len(trajectory.segments) > 1 else None
    return [
        TrainSequence(
            tokens=trajectory.tokens[segment],
            loss_mask=trajectory.loss_mask[segment],
            advantage=advantage,
            reward=trajectory.reward,
            group_id=trajectory.group_id,
            oldest_version=trajectory.oldest_version if segment.start == 0 else None,
            experts=trajectory.experts,
            trained_in_trajectory=num_trained,
            **slice_columns(trajectory, segment),
        )
        for segment in trajectory.segments
    ]


def _advantages(
    trajectories: list[Trajectory], config: Config, cluster: Cluster, step: int
) -> list[float]:
    """Return the advantages of this node's trajectories, estimated from the rewards of all nodes."""
    max_tokens = config.max_response_tokens
    overlong = config.advantage_options.overlong_tokens
    rows = [
        (
            trajectory.reward
            - overlong_penalty(trajectory.num_beyond_prompt, max_tokens, overlong),
            trajectory.group_id,
            step - 1 - trajectory.oldest_version,
        )
        for trajectory in trajectories
    ]
    rows_of_nodes = cluster.gather(rows)
    rewards, group_ids, lags = zip(*itertools.chain(*rows_of_nodes), strict=True)
    advantages = choose_estimator(config)(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids), torch.tensor(lags)
    )
    nums_of_nodes = [len(node_rows) for node_rows in rows_of_nodes]
    return advantages.split(nums_of_nodes)[cluster.node].tolist()
