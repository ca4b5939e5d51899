"""Splits the sequences of a minibatch over ranks and micro-batches, with about equal work for each rank."""

from collections.abc import Callable

from asyncrl.trainer.packing import (
    Bundle,
    Layout,
    RankShare,
    TrainSequence,
    first_fit_decreasing,
)


def split_evenly(bundles: list[Bundle], num_ranks: int) -> list[list[Bundle]]:
    """Split bundles over ranks: longest first, each to the rank with the fewest tokens."""
    bundles_of_ranks: list[list[Bundle]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for item in sorted(bundles, key=lambda item: -item.num_tokens):
        rank = loads.index(min(loads))
        bundles_of_ranks[rank].append(item)
        loads[rank] += item.num_tokens
    return bundles_of_ranks


def distribute(
    minibatches: list[list[TrainSequence]],
    num_ranks: int,
    max_tokens: int,
    layout: Layout = "short_rows",
    split_over_ranks: Callable[[list[TrainSequence], int], list[list[Bundle]]] = split_evenly,
) -> list[RankShare]:
    """Split the sequences of each minibatch over ranks: [rank][minibatch][micro-batch] → bundles.

    `split_over_ranks` is that of Policy, and `layout` that of pack. A micro-batch has at most `max_tokens`. Ranks may
    get different numbers of micro-batches.
    """
    shares: list[RankShare] = [[] for _ in range(num_ranks)]
    for minibatch in minibatches:
        for share, bundles in zip(shares, split_over_ranks(minibatch, num_ranks), strict=True):
            share.append(fill_microbatches(bundles, max_tokens, layout))
    return shares


def fill_microbatches(bundles: list[Bundle], max_tokens: int, layout: Layout) -> list[list[Bundle]]:
    """Split bundles into micro-batches of at most `max_tokens`.

    With `row_each` padding counts, so a micro-batch gets bundles of about equal length.
    Raises RuntimeError for a longer bundle.
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
