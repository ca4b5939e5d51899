"""Trees of sequences that begin alike: each adds what follows the tokens that it shares with the one before.

Of G responses of R tokens to a prompt of P, P + G·R tokens are read instead of G·(P + R) (Tree Training, arXiv
2511.00413; PrefixGrouper, 2506.05433, of prompts). There is no model here, so everything can be checked by hand.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from asyncrl.config import Sharing
from asyncrl.trainer.packing import Bundle, TrainSequence, first_fit_decreasing
from asyncrl.trainer.splitting import split_evenly

WORTH_SHARING = 0.1
"""Least share of an update's cost for which `auto` shares prefixes. The cost is a rough estimate. On a GPU sharing
takes another kernel of attention, which nobody has timed."""


@dataclass(frozen=True)
class Tree:
    """Sequences that are read together in one row, depth first; often it is only one."""

    sequences: tuple[TrainSequence, ...]
    shared: tuple[int, ...]
    """[S − 1] tokens that each but the first begins with as the one before it, and that are read there."""
    num_tokens: int
    """Tokens to read."""

    def row_indices(self, start: int) -> list[np.ndarray]:
        """Return the flat index, [T], at which each token of each sequence is read. The tree begins at `start`."""
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
    cut is greedy and deepest first. Where branches part, they are packed into the room behind their prefix. If two
    parts do not fit together here, they do not fit together higher up: there they also need their shared prefix.
    """
    if share_prefix == "off":
        return as_trees(sequences)
    return join_trees(*order(sequences, share_prefix), max_tokens)


def as_trees(sequences: list[TrainSequence]) -> list[Tree]:
    """Return a tree for each sequence."""
    return [Tree((sequence,), (), len(sequence.tokens)) for sequence in sequences]


def order(sequences: list[TrainSequence], share_prefix: Sharing) -> tuple[list[Tree], list[int]]:
    """Return sequences, each a tree, so that neighbours share the most, and the tokens that each shares with the next
    one."""
    ordered = depth_first(sequences)
    if share_prefix == "prompt":
        ordered.sort(key=lambda sequence: sequence.group_id)
    return as_trees(ordered), shared_with_next(ordered, share_prefix)


def join_trees(ordered: list[Tree], depths: list[int], max_tokens: float) -> list[Tree]:
    """Join sequences in the order of `order` to trees; see bundle."""
    max_tokens = max([max_tokens, *(tree.num_tokens for tree in ordered)])
    # The nodes of the path from the root: depth, and the bundles that ended below it.
    path: list[tuple[int, list[Tree]]] = [(0, [])]
    for tree, depth in zip(ordered, depths, strict=True):
        below = [tree]
        while path[-1][0] > depth:
            prefix, bundles = path.pop()
            below = _joined([*bundles, *below], prefix, max_tokens)
        if path[-1][0] < depth:
            path.append((depth, []))
        path[-1][1].extend(below)
    return path[0][1]


def depth_first(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Return sequences as the tree of them has them: by bytes, in which equal beginnings stand together, and a sequence
    before those that it begins."""
    return sorted(sequences, key=lambda sequence: sequence.tokens.tobytes())


def shared_with_next(sequences: list[TrainSequence], share_prefix: Sharing) -> list[int]:
    """Count the tokens that each sequence shares with the next one; 0 for the last."""
    shared = [common_prefix(*pair, share_prefix) for pair in itertools.pairwise(sequences)]
    return [*shared, 0][: len(sequences)]


def _joined(parts: list[Tree], prefix: int, max_tokens: float) -> list[Tree]:
    """Read parts that begin with the same `prefix` tokens together, as many as fit."""
    lengths = [part.num_tokens - prefix for part in parts]
    if prefix + sum(lengths) <= max_tokens:
        return [_join(parts, prefix)]
    bins = first_fit_decreasing(lengths, max_tokens - prefix)
    return [_join([parts[index] for index in sorted(members)], prefix) for members in bins]


def _join(parts: list[Tree], prefix: int) -> Tree:
    """Return one tree of parts that begin with the same `prefix` tokens."""
    sequences = [sequence for part in parts for sequence in part.sequences]
    shared = [depth for part in parts for depth in (prefix, *part.shared)]
    num_tokens = sum(part.num_tokens for part in parts) - prefix * (len(parts) - 1)
    return Tree(tuple(sequences), tuple(shared[1:]), num_tokens)


def choose_bundles(
    sequences: list[TrainSequence],
    num_ranks: int,
    max_tokens: int,
    share_prefix: Sharing,
    cost: Callable[[list[int]], float],
) -> list[list[Bundle]]:
    """Bundle the sequences of an update so that the costliest rank has as little to compute as possible: [rank] →
    bundles, about equal tokens each.

    Whole trees save the most tokens. But a few of them cannot be split evenly, and where attention is dense a row pays
    for its square. So smaller trees are tried, too. `auto` takes prompts or trees, whichever costs less, if that saves
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
    cuts = itertools.chain(*(cut_smaller(sequences, kind, max_tokens) for kind in kinds))
    choices = [split_evenly(trees, num_ranks) for trees in cuts]
    costs = [costliest(shares) for shares in choices]
    if share_prefix == "auto" and min(costs) >= (1 - WORTH_SHARING) * costliest(apart):
        return apart
    return choices[costs.index(min(costs))]


def cut_smaller(
    sequences: list[TrainSequence], share_prefix: Sharing, max_tokens: int
) -> Iterator[list[Tree]]:
    """Yield trees of at most `max_tokens`, then smaller ones: each time the largest tree before is halved.

    Both halves read the prefix that all sequences of that tree share.
    """
    ordered, depths = order(sequences, share_prefix)
    longest = max((tree.num_tokens for tree in ordered), default=0)
    limit = max_tokens
    while True:
        trees = join_trees(ordered, depths, limit)
        yield trees
        if limit <= longest:
            return
        largest = max(trees, key=lambda tree: tree.num_tokens, default=Tree((), (), 0))
        limit = (largest.num_tokens + min(largest.shared, default=0)) // 2


def count_tokens(sequences: list[TrainSequence], shares: list[list[Bundle]]) -> np.ndarray:
    """Count tokens of an update that is split: of all its sequences, those to read, and those of one tree of all."""
    num_all = sum(sequence.num_tokens for sequence in sequences)
    num_read = sum(bundle.num_tokens for bundles in shares for bundle in bundles)
    num_shareable = sum(shared_with_next(depth_first(sequences), "tree"))
    return np.array([num_all, num_read, num_all - num_shareable])
