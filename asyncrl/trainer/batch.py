"""Turns the groups of a step into each rank's micro-batches: advantages, optimizer updates, ranks, micro-batches.

Every node deals its own groups to its own ranks. Nodes exchange only rewards, as advantages are estimated over the
whole step.
"""

import itertools
from collections.abc import Callable

import numpy as np
import torch

from algos.advantages import overlong_penalty
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.records import Group, Trajectory
from asyncrl.trainer.advantage import choose_estimator
from asyncrl.trainer.packing import (
    Bundle,
    Sharing,
    TrainSequence,
    Updates,
    bundle,
    first_fit_decreasing,
)
from asyncrl.trainer.policy import Policy


def deal(groups: list[Group] | None, step: int, policy: Policy, cluster: Cluster) -> Updates:
    """Deal a step's groups to the node's ranks: this rank's [update][micro-batch] → bundles; collective.

    `groups` is the node's batch on its leader and None on the others; ranks get about equal tokens.
    """
    policy.clock.enter("gather")
    shares = None
    if groups is not None:
        shares = distribute(
            make_updates(groups, policy.config, cluster, step),
            len(cluster.local_ranks),
            policy.config.max_tokens_per_microbatch,
            policy.config.share_prefix,
            policy.module.cost,
        )
    return cluster.scatter_on_node(shares)


def make_updates(
    groups: list[Group], config: Config, cluster: Cluster, step: int
) -> list[list[TrainSequence]]:
    """Give every trajectory its advantage and deal whole groups to the step's minibatches.

    Groups come sorted by age, and so by length: several minibatches get them in a random order of seed and step.
    Advantages are estimated over the whole step, on all nodes; what is returned is this node's: [update][sequence].
    Collective over leaders. Raises RuntimeError for a reward that is not a finite number.
    """
    if config.minibatches > 1:
        order = np.random.default_rng((config.seed, step)).permutation(len(groups))
        groups = [groups[index] for index in order]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    advantages = _advantages(trajectories, config, cluster, step)
    sequences = [
        TrainSequence(
            trajectory.tokens,
            trajectory.loss_mask,
            trajectory.behavior_logprobs,
            trajectory.policy_versions,
            advantage,
            trajectory.reward,
            trajectory.group_id,
        )
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    size = len(sequences) // config.minibatches
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def _advantages(
    trajectories: list[Trajectory], config: Config, cluster: Cluster, step: int
) -> list[float]:
    """Return the advantages of this node's trajectories, estimated from the rewards of all nodes."""
    max_tokens = config.max_response_tokens
    overlong = config.advantage_options.overlong
    rows = [
        (
            trajectory.reward
            - overlong_penalty(trajectory.num_beyond_prompt, max_tokens, overlong),
            trajectory.group_id,
            step - 1 - trajectory.min_version,
        )
        for trajectory in trajectories
    ]
    rows_of_nodes = cluster.gather(rows)
    rewards, group_ids, lags = zip(*itertools.chain(*rows_of_nodes), strict=True)
    advantages = choose_estimator(config)(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids), torch.tensor(lags)
    )
    return advantages.split([len(rows) for rows in rows_of_nodes])[cluster.node].tolist()


def distribute(
    updates: list[list[TrainSequence]],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing = "off",
    cost: Callable[[list[int]], float] = sum,
) -> list[Updates]:
    """Split the sequences of each optimizer update over ranks: [rank][update][micro-batch] → bundles.

    `share_prefix` as in bundle; `cost` as in choose_bundles. A micro-batch has at most `max_tokens`, which no sequence
    exceeds. Ranks may get different numbers of micro-batches.
    """
    shares: list[Updates] = [[] for _ in range(num_ranks)]
    for update in updates:
        bundles_of_ranks = choose_bundles(update, num_ranks, max_tokens, share_prefix, cost)
        for share, bundles in zip(shares, bundles_of_ranks, strict=True):
            bins = first_fit_decreasing(_lengths(bundles), max_tokens)
            share.append([[bundles[item] for item in items] for items in bins])
    return shares


def choose_bundles(
    sequences: list[TrainSequence],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing,
    cost: Callable[[list[int]], float],
) -> list[list[Bundle]]:
    """Bundle the sequences of an update so that the rank with the most to compute has as little as may be: [rank] →
    bundles, about equal tokens each.

    Whole trees save the most tokens. But a few of them cannot be dealt evenly, and where attention is dense a row pays
    for its square; so trees are cut at half the limit, and half of that, while this helps. `cost` is that of computing
    bundles of these lengths on one rank.
    """
    longest = max((len(sequence.tokens) for sequence in sequences), default=1)
    limits = [max_tokens]
    while share_prefix != "off" and limits[-1] > longest:
        limits.append(max(limits[-1] // 2, longest))
    deals = (balance(bundle(sequences, share_prefix, limit), num_ranks) for limit in limits)
    return min(deals, key=lambda deal: max(cost(_lengths(bundles)) for bundles in deal))


def balance(bundles: list[Bundle], num_ranks: int) -> list[list[Bundle]]:
    """Deal bundles to ranks, longest first, each to the rank with the fewest tokens."""
    bundles_of_ranks: list[list[Bundle]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(bundles, key=lambda item: -item.num_tokens):
        rank = loads.index(min(loads))
        bundles_of_ranks[rank].append(item)
        loads[rank] += item.num_tokens
    return bundles_of_ranks


def _lengths(bundles: list[Bundle]) -> list[int]:
    return [item.num_tokens for item in bundles]
