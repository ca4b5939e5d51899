"""Turns the groups of a step into each rank's micro-batches: advantages, optimizer updates, ranks, micro-batches.

Every node deals its own groups to its own ranks. Nodes exchange two things only: rewards, as advantages are estimated
over the whole step, and the number of micro-batches.
"""

import itertools

import numpy as np
import torch

from algos import ADVANTAGES
from algos.advantages import overlong_penalty
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.records import Group
from asyncrl.trainer.attention import dense_cost
from asyncrl.trainer.packing import (
    Bundle,
    Sharing,
    TrainSequence,
    bundle_within,
    first_fit_decreasing,
)
from asyncrl.trainer.policy import Policy


def deal(
    groups: list[Group] | None, step: int, policy: Policy, cluster: Cluster
) -> list[list[list[Bundle]]]:
    """Deal a step's groups to the node's ranks: this rank's [update][micro-batch] → bundles; collective.

    `groups` is the node's batch on its leader and None on the others; ranks get about equal tokens.
    """
    policy.clock.enter("gather")
    config = policy.config
    shares = None
    if groups is not None:
        shares = distribute(
            make_updates(groups, config, cluster, step=step),
            len(cluster.local_ranks),
            config.max_tokens_per_microbatch,
            config.share_prefix,
            policy.one_row,
            policy.module.model.config.get_text_config().hidden_size,
        )
    share = cluster.scatter_on_node(shares)
    return share if cluster.num_nodes == 1 else pad(share, cluster)


def pad(share: list[list[list[Bundle]]], cluster: Cluster) -> list[list[list[Bundle]]]:
    """Add empty micro-batches until every rank of every node has as many of them; collective over ranks.

    FSDP's collectives need the same number on all ranks.
    """
    counts = cluster.max_over_ranks([len(update) for update in share])
    return [
        _with_empty_microbatches(update, count) for update, count in zip(share, counts, strict=True)
    ]


def _with_empty_microbatches(microbatches: list[list], count: int) -> list[list]:
    return microbatches + [[] for _ in range(count - len(microbatches))]


def make_updates(
    groups: list[Group], config: Config, cluster: Cluster | None = None, *, step: int
) -> list[list[TrainSequence]]:
    """Give every trajectory its advantage and deal whole groups to the step's minibatches.

    Groups come sorted by age, and so by length: several minibatches get them in a random order of seed and step.
    Advantages are estimated over the whole step, on all nodes; what is returned is this node's: [update][sequence].
    Collective over leaders. Raises RuntimeError for a reward that is not a finite number.
    """
    if config.minibatches > 1:
        groups = [
            groups[i] for i in np.random.default_rng((config.seed, step)).permutation(len(groups))
        ]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    max_tokens = config.max_response_tokens
    overlong = config.advantage_options.overlong
    rewards = [
        (t.reward - overlong_penalty(t.num_beyond_prompt, max_tokens, overlong), t.group_id)
        for t in trajectories
    ]
    advantages = _advantages(rewards, config, cluster or Cluster())
    sequences = [
        TrainSequence(
            t.tokens,
            t.loss_mask,
            t.behavior_logprobs,
            t.policy_versions,
            advantage,
            t.reward,
            t.group_id,
        )
        for t, advantage in zip(trajectories, advantages, strict=True)
    ]
    size = len(sequences) // config.minibatches
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def _advantages(rewards: list[tuple[float, int]], config: Config, cluster: Cluster) -> list[float]:
    """Return the advantages of this node's (reward, group_id) pairs, estimated from those of all nodes."""
    rewards_of_nodes = cluster.gather(rewards)
    values, group_ids = zip(*itertools.chain(*rewards_of_nodes), strict=True)
    advantages = ADVANTAGES[config.advantage](
        torch.tensor(values, dtype=torch.float64), torch.tensor(group_ids)
    )
    start = sum(len(rewards_of_node) for rewards_of_node in rewards_of_nodes[: cluster.node])
    return advantages[start : start + len(rewards)].tolist()


def distribute(
    updates: list[list[TrainSequence]],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing = "off",
    one_row: bool = False,
    hidden_size: int = 64,
) -> list[list[list[list[Bundle]]]]:
    """Split the sequences of each optimizer update over ranks: [rank][update][micro-batch] → bundles.

    `share_prefix` as in bundle, `one_row` as in pack; `hidden_size` of the model, by default the tiny one.
    """
    shares: list[list[list[list[Bundle]]]] = [[] for _ in range(num_ranks)]
    for update in updates:
        bundles = choose_bundles(update, num_ranks, max_tokens, share_prefix, one_row, hidden_size)
        plan = split_into_microbatches([b.num_tokens for b in bundles], num_ranks, max_tokens)
        for share, microbatches in zip(shares, plan, strict=True):
            share.append([[bundles[b] for b in chosen] for chosen in microbatches])
    return shares


def choose_bundles(
    sequences: list[TrainSequence],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing,
    one_row: bool,
    hidden_size: int = 64,
) -> list[Bundle]:
    """Bundle the sequences of an update so that the rank with the most to compute has as little as may be.

    Whole trees save the most tokens. But a few of them cannot be dealt evenly, and where attention is dense a row pays
    for its square; so trees are cut at half the limit, and half of that, while this helps.
    """
    longest = max((len(sequence.tokens) for sequence in sequences), default=1)
    limits = [max_tokens]
    while share_prefix != "off" and limits[-1] > longest:
        limits.append(max(limits[-1] // 2, longest))

    def cost(bundles: list[Bundle]) -> float:
        lengths = [bundle.num_tokens for bundle in bundles]
        lengths_of_ranks = [
            [lengths[item] for item in items] for items in balance(lengths, num_ranks)
        ]
        return max(
            sum(of_rank) if one_row else dense_cost(of_rank, hidden_size)
            for of_rank in lengths_of_ranks
        )

    return min(bundle_within(limits, sequences, share_prefix), key=cost)


def split_into_microbatches(
    lengths: list[int], num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Assign items of `lengths` tokens to ranks and micro-batches: [rank][micro-batch] → item indices.

    Ranks get about equal tokens, each micro-batch at most `max_tokens`, and all ranks the same number of micro-batches,
    because FSDP's collectives must match; so some may be empty. Raises ValueError for an item above `max_tokens`.
    """
    for item, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {item} has {length} tokens, and a micro-batch at most {max_tokens}: "
                "raise --max-tokens-per-microbatch"
            )
    microbatches_of_ranks = []
    for items in balance(lengths, num_ranks):
        bins = first_fit_decreasing([lengths[item] for item in items], max_tokens)
        microbatches_of_ranks.append([[items[place] for place in places] for places in bins])
    count = max(map(len, microbatches_of_ranks), default=0)
    return [_with_empty_microbatches(microbatches, count) for microbatches in microbatches_of_ranks]


def balance(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Deal items to ranks, longest first, each to the rank with the fewest tokens; item indices of each rank."""
    items_of_ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        rank = loads.index(min(loads))
        items_of_ranks[rank].append(item)
        loads[rank] += lengths[item]
    return items_of_ranks
