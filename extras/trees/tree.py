"""Trees of sequences that begin alike: each adds what follows the tokens that it shares with the one before.

A group has G responses of R tokens to a prompt of P. P + G·R tokens are read instead of G·(P + R) (Tree Training, arXiv
2511.00413; PrefixGrouper, 2506.05433, of prompts). There is no model here, so everything can be checked by hand.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncrl.config import Sharing
from asyncrl.trainer.packing import Bundle, TrainSequence, first_fit_decreasing
from asyncrl.trainer.splitting import split_evenly

WORTH_SHARING = 0.1
"""Least saved share of an update's cost that makes `auto` share prefixes. The cost is a rough estimate. On a GPU
sharing takes another kernel of attention, and its time has not been measured."""


@dataclass(frozen=True)
class Tree:
    """Sequences that are read together in one row, depth first; often it is only one."""

    sequences: tuple[TrainSequence, ...]
    shared: tuple[int, ...]
    """[S − 1] tokens that each but the first begins with as the one before it, and that are read there."""
    num_tokens: int
    """Tokens to read."""

    def row_indices(self, start: int) -> list[np.ndarray]:
        """Return the flat index, [T], of the place of each token of each sequence. The tree begins at `start`."""
        path = np.zeros(0, dtype=np.int64)
        paths = []
        for sequence, shared in zip(self.sequences, (0, *self.shared), strict=True):
            end = start + len(sequence.tokens) - shared
            path = np.concatenate([path[:shared], np.arange(start, end)])
            paths.append(path)
            start = end
        return paths


def common_prefix(first: TrainSequence, second: TrainSequence, share_prefix: Sharing) -> int:
    """Count the tokens that both begin with; of prompts alone, in one group and before a trained token of either."""
    length = min(len(first.tokens), len(second.tokens))
    if share_prefix == "prompt":
        untrained = [
            int(s.loss_mask.argmax()) if s.num_trained else length for s in (first, second)
        ]
        length = min(length, *untrained) if first.group_id == second.group_id else 0
    differs = first.tokens[:length] != second.tokens[:length]
    return int(differs.argmax()) if differs.any() else length


def bundle(
    sequences: list[TrainSequence], share_prefix: Sharing = "off", max_tokens: float = math.inf
) -> list[Tree]:
    """Join the sequences of an update that begin alike, and leave every other one by itself.

    A tree of more than `max_tokens`, or the longest sequence, is cut, and each part reads the shared prefix again. The
    cut is greedy and deepest first. Branches are packed into the room behind their prefix. If two parts do not fit
    together here, they do not fit together higher up. There they also need their shared prefix.
    """
    if share_prefix == "off":
        return as_trees(sequences)
    order = depth_first(sequences, share_prefix)
    return [order.tree(part) for part in order.join(max_tokens)]


def as_trees(sequences: list[TrainSequence]) -> list[Tree]:
    """Return a tree for each sequence."""
    return [Tree((sequence,), (), len(sequence.tokens)) for sequence in sequences]


class Part(NamedTuple):
    """Sequences that are read together, before they are a Tree: many ways to cut are tried, and few are taken."""

    members: list[int]
    """Their numbers in the order."""
    num_tokens: int
    """Tokens to read."""


@dataclass(frozen=True)
class Order:
    """Sequences in an order so that neighbours share the most."""

    sequences: list[TrainSequence]
    depths: list[int]
    """Tokens that each shares with the next one; 0 for the last."""

    def join(self, max_tokens: float) -> list[Part]:
        """Join sequences to trees; see bundle."""
        lengths = [len(sequence.tokens) for sequence in self.sequences]
        max_tokens = max([max_tokens, *lengths])
        # The nodes of the path from the root: depth, and the parts that ended below it.
        path: list[tuple[int, list[Part]]] = [(0, [])]
        for number, depth in enumerate(self.depths):
            below = [Part([number], lengths[number])]
            while path[-1][0] > depth:
                prefix, parts = path.pop()
                below = _joined(parts + below, prefix, max_tokens)
            if path[-1][0] < depth:
                path.append((depth, []))
            path[-1][1].extend(below)
        return path[0][1]

    def tree(self, part: Part) -> Tree:
        """Return the tree of a part. Two members share what all neighbours from one to the other share."""
        shared = [
            min(self.depths[first:second]) for first, second in itertools.pairwise(part.members)
        ]
        sequences = [self.sequences[number] for number in part.members]
        return Tree(tuple(sequences), tuple(shared), part.num_tokens)


def depth_first(sequences: list[TrainSequence], share_prefix: Sharing) -> Order:
    """Return sequences in the order of their tree.

    They are sorted by bytes. So equal beginnings are together, and a sequence is before the sequences that it begins.
    """
    ordered = sorted(sequences, key=lambda sequence: sequence.tokens.tobytes())
    if share_prefix == "prompt":
        ordered.sort(key=lambda sequence: sequence.group_id)
    shared = [common_prefix(*pair, share_prefix) for pair in itertools.pairwise(ordered)]
    return Order(ordered, [*shared, 0][: len(sequences)])


def _joined(parts: list[Part], prefix: int, max_tokens: float) -> list[Part]:
    """Read parts that begin with the same `prefix` tokens together, as many as fit."""
    lengths = [part.num_tokens - prefix for part in parts]
    if prefix + sum(lengths) <= max_tokens:
        return [_join(parts, prefix)]
    bins = first_fit_decreasing(lengths, max_tokens - prefix)
    return [_join([parts[index] for index in sorted(members)], prefix) for members in bins]


def _join(parts: list[Part], prefix: int) -> Part:
    """Return one part of parts that begin with the same `prefix` tokens."""
    if len(parts) == 1:
        return parts[0]
    members, num_tokens = [], prefix
    for part in parts:
        members += part.members
        num_tokens += part.num_tokens - prefix
    return Part(members, num_tokens)


def choose_bundles(
    sequences: list[TrainSequence],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing,
    cost: Callable[[list[int]], float],
) -> list[list[Bundle]]:
    """Bundle the sequences of an update so that the costliest rank computes as little as possible.

    The result is [rank] → bundles, with about equal tokens for each rank.
    Whole trees save the most tokens. But a few of them cannot be split evenly, and with dense attention a row pays for
    its square. So smaller trees are tried, too. `auto` takes prompts or trees, whichever costs less, if that saves
    WORTH_SHARING of the cost. `cost` is that of computing bundles of these lengths on one rank.
    """
    apart = split_evenly(as_trees(sequences), num_ranks)
    if share_prefix == "off":
        return apart

    def costliest(shares: list[list[Bundle]]) -> float:
        return max(cost([item.num_tokens for item in bundles]) for bundles in shares)

    kinds: tuple[Sharing, ...] = (share_prefix,)
    if share_prefix == "auto":
        kinds = ("prompt", "tree")
    orders = {kind: depth_first(sequences, kind) for kind in kinds}
    cuts = [(kind, parts) for kind in kinds for parts in cut_smaller(orders[kind], max_tokens)]
    choices = [split_evenly(parts, num_ranks) for _, parts in cuts]
    costs = [costliest(shares) for shares in choices]
    cheapest = costs.index(min(costs))
    if share_prefix == "auto" and costs[cheapest] >= (1 - WORTH_SHARING) * costliest(apart):
        return apart
    order = orders[cuts[cheapest][0]]
    return [[order.tree(part) for part in parts] for parts in choices[cheapest]]


def cut_smaller(order: Order, max_tokens: int) -> Iterator[list[Part]]:
    """Yield parts of at most `max_tokens`, then smaller ones: each time the largest part before is halved.

    Both halves read the prefix that all sequences of that part share.
    """
    longest = max((len(sequence.tokens) for sequence in order.sequences), default=0)
    limit = max_tokens
    while True:
        parts = order.join(limit)
        yield parts
        if limit <= longest:
            return
        largest = max(parts, key=lambda part: part.num_tokens, default=Part([], 0))
        limit = (largest.num_tokens + min(order.tree(largest).shared, default=0)) // 2


def count_tokens(sequences: list[TrainSequence], shares: list[list[Bundle]]) -> np.ndarray:
    """Count tokens of an update that is split: all tokens, tokens to read, and tokens of one tree of all."""
    num_all = sum(sequence.num_tokens for sequence in sequences)
    num_read = sum(bundle.num_tokens for bundles in shares for bundle in bundles)
    num_shareable = sum(depth_first(sequences, "tree").depths)
    return np.array([num_all, num_read, num_all - num_shareable])
