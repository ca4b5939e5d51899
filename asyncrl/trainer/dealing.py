"""Deals the sequences of an update to ranks and micro-batches, so that all ranks compute for about equally long."""

from collections.abc import Callable

from asyncrl.config import Sharing
from asyncrl.trainer.packing import (
    Bundle,
    Layout,
    TrainSequence,
    Updates,
    bundle,
    first_fit_decreasing,
)

WORTH_SHARING = 0.1
"""Least share of an update's cost for which `auto` shares prefixes. The cost is a rough estimate. On a GPU sharing
takes another kernel of attention, which nobody has timed."""


def distribute(
    updates: list[list[TrainSequence]],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing = "off",
    cost: Callable[[list[int]], float] = sum,
    layout: Layout = "short_rows",
) -> list[Updates]:
    """Split the sequences of each optimizer update over ranks: [rank][update][micro-batch] → bundles.

    `share_prefix` as in bundle, `cost` as in choose_bundles, `layout` as in pack. A micro-batch has at most
    `max_tokens`, which no sequence exceeds. Ranks may get different numbers of micro-batches.
    """
    shares: list[Updates] = [[] for _ in range(num_ranks)]
    for update in updates:
        bundles_of_ranks = choose_bundles(update, num_ranks, max_tokens, share_prefix, cost)
        for share, bundles in zip(shares, bundles_of_ranks, strict=True):
            share.append(fill_microbatches(bundles, max_tokens, layout))
    return shares


def fill_microbatches(bundles: list[Bundle], max_tokens: int, layout: Layout) -> list[list[Bundle]]:
    """Split bundles into micro-batches of at most `max_tokens`.

    Where each has a row of its own, padding counts, so those of a micro-batch are about equally long.
    Raises RuntimeError for a bundle that exceeds them.
    """
    waiting = sorted(bundles, key=lambda item: -item.num_tokens)
    lengths = [item.num_tokens for item in waiting]
    if waiting and lengths[0] > max_tokens:
        raise RuntimeError(f"{lengths[0]} tokens are put into micro-batches of {max_tokens}")
    if layout != "row_each":
        bins = first_fit_decreasing(lengths, max_tokens)
        return [[waiting[index] for index in members] for members in bins]
    microbatches = []
    while waiting:
        num_rows = max_tokens // waiting[0].num_tokens
        microbatches.append(waiting[:num_rows])
        waiting = waiting[num_rows:]
    return microbatches


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
    for its square; so trees are cut at half the limit, and half of that, while this helps. `auto` takes prompts or
    trees, whichever costs less, if that saves WORTH_SHARING of the cost. `cost` is that of computing bundles of these
    lengths on one rank.
    """

    def costliest(deal: list[list[Bundle]]) -> float:
        return max(cost([item.num_tokens for item in bundles]) for bundles in deal)

    if share_prefix == "auto":
        apart, *shared = (
            choose_bundles(sequences, num_ranks, max_tokens, kind, cost)
            for kind in ("off", "prompt", "tree")
        )
        best = min(shared, key=costliest)
        return best if costliest(best) < (1 - WORTH_SHARING) * costliest(apart) else apart
    longest = max((len(sequence.tokens) for sequence in sequences), default=1)
    limits = [max_tokens]
    while share_prefix != "off" and limits[-1] > longest:
        limits.append(limits[-1] // 2)
    deals = (balance(bundle(sequences, share_prefix, limit), num_ranks) for limit in limits)
    return min(deals, key=costliest)


def balance(bundles: list[Bundle], num_ranks: int) -> list[list[Bundle]]:
    """Deal bundles to ranks, longest first, each to the rank with the fewest tokens."""
    bundles_of_ranks: list[list[Bundle]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(bundles, key=lambda item: -item.num_tokens):
        rank = loads.index(min(loads))
        bundles_of_ranks[rank].append(item)
        loads[rank] += item.num_tokens
    return bundles_of_ranks
