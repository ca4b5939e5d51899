"""From the groups of a step to each rank's micro-batches: advantages, optimizer updates, ranks, micro-batches.

Every node shares its own groups among its own ranks. What must be known of the others' are rewards, for advantages over
the whole step, and the number of micro-batches.
"""

import numpy as np
import torch

from algos import ADVANTAGES
from algos.advantages import overlong_penalty
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.records import Group
from asyncrl.trainer.attention import dense_cost
from asyncrl.trainer.packing import Bundle, Sharing, TrainSequence, bundle_within, first_fit_decreasing
from asyncrl.trainer.policy import Policy


def deal(groups: list[Group] | None, step: int, policy: Policy, cluster: Cluster) -> list[list[list[Bundle]]]:
    """Deal a step's groups to the node's ranks: this rank's [update][micro-batch] → bundles; collective.

    `groups` is the node's batch on its leader and None on the others; ranks get about equal tokens.
    """
    policy.clock.enter("gather")
    config, shares = policy.config, None
    if groups is not None:
        updates = make_updates(groups, config, cluster, step=step)
        num_ranks, max_tokens = len(cluster.local_ranks), config.max_tokens_per_microbatch
        hidden_size = policy.module.model.config.get_text_config().hidden_size
        shares = distribute(updates, num_ranks, max_tokens, config.share_prefix, policy.one_row, hidden_size)
    mine = cluster.scatter_on_node(shares)
    return mine if cluster.num_nodes == 1 else pad(mine, cluster)


def pad(mine: list[list[list[Bundle]]], cluster: Cluster) -> list[list[list[Bundle]]]:
    """Add empty micro-batches, as FSDP's collectives need the same number of them on all ranks of all nodes; collective
    over ranks."""
    largest = cluster.max_over_ranks([len(update) for update in mine])
    return [update + [[] for _ in range(num - len(update))] for update, num in zip(mine, largest, strict=True)]


def make_updates(
    groups: list[Group], config: Config, cluster: Cluster | None = None, *, step: int
) -> list[list[TrainSequence]]:
    """Give every trajectory its advantage and deal whole groups to the step's minibatches.

    Groups come sorted by age, and so by length: several minibatches get them in a random order of seed and step.
    Advantages are estimated over the whole step, on all nodes; what is returned is this node's: [update][sequence].
    Collective over leaders. Raises RuntimeError for a reward that is not a finite number.
    """
    if config.minibatches > 1:
        groups = [groups[i] for i in np.random.default_rng((config.seed, step)).permutation(len(groups))]
    trajectories = [t for group in groups for t in group.trajectories]
    max_tokens = config.max_response_tokens
    overlong = config.advantage_options.overlong
    rewards = [
        (t.reward - overlong_penalty(t.num_beyond_prompt, max_tokens, overlong), t.group_id) for t in trajectories
    ]
    advantages = _advantages(rewards, config, cluster or Cluster())
    sequences = [
        TrainSequence(t.tokens, t.loss_mask, t.behavior_logprobs, t.policy_versions, advantage, t.reward, t.group_id)
        for t, advantage in zip(trajectories, advantages, strict=True)
    ]
    size = len(sequences) // config.minibatches
    return [sequences[i * size : (i + 1) * size] for i in range(config.minibatches)]


def _advantages(mine: list[tuple[float, int]], config: Config, cluster: Cluster) -> list[float]:
    """Advantages of this node's (reward, group_id) pairs, estimated from those of all nodes."""
    of_nodes = cluster.gather(mine)
    rewards, group_ids = zip(*(pair for pairs in of_nodes for pair in pairs), strict=True)
    advantages = ADVANTAGES[config.advantage](torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids))
    start = sum(map(len, of_nodes[: cluster.node]))
    return advantages[start : start + len(mine)].tolist()


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
    longest, limits = max((len(s.tokens) for s in sequences), default=1), [max_tokens]
    while share_prefix != "off" and limits[-1] > longest:
        limits.append(max(limits[-1] // 2, longest))

    def cost(bundles: list[Bundle]) -> float:
        lengths = [b.num_tokens for b in bundles]
        of_ranks = ([lengths[i] for i in items] for items in balance(lengths, num_ranks))
        return max(sum(of) if one_row else dense_cost(of, hidden_size) for of in of_ranks)

    return min(bundle_within(limits, sequences, share_prefix), key=cost)


def split_into_microbatches(lengths: list[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Assign items of `lengths` tokens to ranks and micro-batches: [rank][micro-batch] → item indices.

    Ranks get about equal tokens, each micro-batch at most `max_tokens`, and all ranks the same number of micro-batches,
    because FSDP's collectives must match; so some may be empty. Raises ValueError for an item above `max_tokens`.
    """
    for item, length in enumerate(lengths):
        if length > max_tokens:
            at_most = f"a micro-batch at most {max_tokens}: raise --max-tokens-per-microbatch"
            raise ValueError(f"sequence {item} has {length} tokens, and {at_most}")
    packed = [
        [[items[i] for i in members] for members in first_fit_decreasing([lengths[i] for i in items], max_tokens)]
        for items in balance(lengths, num_ranks)
    ]
    num_microbatches = max(map(len, packed), default=0)
    return [microbatches + [[] for _ in range(num_microbatches - len(microbatches))] for microbatches in packed]


def balance(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Deal items to ranks, longest first, each to the rank with the fewest tokens; item indices of each rank."""
    of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = load.index(min(load))
        of_rank[rank].append(item)
        load[rank] += lengths[item]
    return of_rank
