"""From sequences to rows: bundle them, pack bundles without waste, and weigh each token once for the whole update.

A *bundle* is one sequence, or, where prefixes are shared, a tree of several, depth first: each adds what follows the
tokens that it shares with the one before (Tree Training, arXiv 2511.00413; PrefixGrouper, 2506.05433, of prompts). Of G
responses of R tokens to a prompt of P, P + G·R tokens are read instead of G·(P + R).

There is no model here, so everything can be checked by hand.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config import Config, Sharing

ATTENTION_BLOCK = 128
"""Tokens of a block of FlexAttention's mask: rows of whole blocks are of one kind, for which one kernel is compiled."""
Layout = Literal["one_row", "short_rows", "row_each"]
"""How bundles lie in a micro-batch: all in one row, in rows as long as the longest, or each in a row of its own."""


@dataclass(frozen=True)
class TrainSequence:
    """One trajectory with its advantage, ready to be trained on. T tokens, prompt and everything after it."""

    tokens: np.ndarray
    """[T] int64, T ≥ 1."""
    loss_mask: np.ndarray
    """[T] bool, True where the policy wrote the token; the first token has no prediction and must be False."""
    behavior_logprobs: np.ndarray
    """[T] float32 nats; read where loss_mask is True."""
    policy_versions: np.ndarray
    """[T] int32, steps; read where loss_mask is True."""
    advantage: float = 0.0
    """Advantage of the sequence; with --advantage gae its reward, of which extras/gae.py makes those of tokens."""
    reward: float = 0.0
    """Reward that the task gave."""
    group_id: int = 0
    """Group whose sequences may share their prompt."""
    experts: np.ndarray | None = None
    """As in Trajectory."""

    @classmethod
    def to_score(cls, tokens: np.ndarray, loss_mask: np.ndarray) -> "TrainSequence":
        """Return a sequence of which tokens are scored, and none is trained on."""
        zeros = np.zeros_like(tokens)
        return cls(tokens, loss_mask, zeros, zeros)

    @property
    def num_trained(self) -> int:
        """Number of tokens that carry a loss."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True)
class Bundle:
    """Sequences that are read together in one row, depth first."""

    sequences: tuple[TrainSequence, ...]
    shared: tuple[int, ...]
    """[S − 1] tokens that each but the first begins with as the one before it, and that are read there."""
    num_distinct: int
    """Tokens that they add to one tree of the whole update, which has the sum over all bundles."""

    @property
    def num_tokens(self) -> int:
        """Tokens to read."""
        return sum(len(s.tokens) for s in self.sequences) - sum(self.shared)


Updates = list[list[list[Bundle]]]
"""A rank's share of a step: [update][micro-batch] → bundles."""
_NO_TOKENS = np.zeros(2, dtype=np.int64)
_NOTHING_TO_TRAIN = Bundle(
    (TrainSequence.to_score(_NO_TOKENS, _NO_TOKENS > 0),), shared=(), num_distinct=0
)
"""What a rank reads that only keeps the others company: of one token there would be a kernel of its own."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences: R rows of L tokens that the model reads, and N trained tokens that the loss sees."""

    input_ids: Tensor
    """[R, L] int64; 0 at the padding of a row's end."""
    position_ids: Tensor
    """[R, L] int64, from 0 in each sequence; all 0 at padding, so each padding token is a sequence of its own."""
    visible_until: Tensor | None
    """[R, L] int64, column after the token's subtree: those from the token to there see it. None where no bundle shares
    a prefix, and position_ids say where sequences begin."""
    sources: Tensor
    """[N] int64, flat index into R·L of the token whose hidden state predicts the trained token."""
    targets: Tensor
    """[N] int64, the trained tokens, sequence by sequence: one of several branches is there once for each."""
    sequence_ids: Tensor
    """[N] int64, non-decreasing; sequences that have a trained token, 0 … S−1."""
    behavior_logprobs: Tensor
    """[N] float32 nats."""
    policy_versions: Tensor
    """[N] int64, steps."""
    advantages: Tensor
    """[N] float32."""
    rewards: Tensor
    """[N] float32."""
    lengths: Tensor
    """[N] int64, trained tokens of the token's sequence."""
    num_sequences: int
    """Number of sequences that have a trained token, S."""
    lags: Tensor | None = None
    """[N] int64, the trainer's version − the token's, steps; None where nothing is trained."""
    proximal_logprobs: Tensor | None = None
    """[N] float32 nats, of the weights before the step's first update; None where the loss derives them."""
    values: Tensor | None = None
    """[N] float32, of the state before the token, by the same weights; None without a value head."""
    returns: Tensor | None = None
    """[N] float32, what the value head is to predict; None without one."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        columns = {
            name: column.to(device)
            for name, column in vars(self).items()
            if isinstance(column, Tensor)
        }
        return replace(self, **columns)


def first_fit_decreasing(lengths: list[int], capacity: float) -> list[list[int]]:
    """Pack items of at most `capacity`, longest first, each into the first bin with room; bins of item indices."""
    bins: list[list[int]] = []
    room = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        index = next((i for i, free in enumerate(room) if free >= lengths[item]), len(bins))
        if index == len(bins):
            bins.append([])
            room.append(capacity)
        bins[index].append(item)
        room[index] -= lengths[item]
    return bins


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
) -> list[Bundle]:
    """Join the sequences of an update that begin alike, and leave every other one by itself.

    A tree of more than `max_tokens`, or the longest sequence, is cut, and each part reads the shared prefix again. The
    cut is greedy and deepest first. Where branches part, they are packed into the room behind their prefix. If two
    parts do not fit together here, they do not fit together higher up: there they also need their shared prefix.
    """
    # By bytes, in which equal beginnings stand together: depth first, and a sequence before those that it begins.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tokens.tobytes())
    depths = _shared_with_next([sequences[i] for i in order], "tree")
    singles = {
        i: Bundle((sequences[i],), (), len(sequences[i].tokens) - depth)
        for i, depth in zip(order, depths, strict=True)
    }
    if share_prefix == "off":
        return [singles[i] for i in range(len(sequences))]
    if share_prefix == "prompt":
        order.sort(key=lambda i: sequences[i].group_id)
        depths = _shared_with_next([sequences[i] for i in order], "prompt")
    max_tokens = max([max_tokens, *(len(sequence.tokens) for sequence in sequences)])
    # The nodes of the path from the root: depth, and the bundles that ended below it.
    path: list[tuple[int, list[Bundle]]] = [(0, [])]
    for i, depth in zip(order, depths, strict=True):
        below = [singles[i]]
        while path[-1][0] > depth:
            prefix, bundles = path.pop()
            below = _joined([*bundles, *below], prefix, max_tokens)
        if path[-1][0] < depth:
            path.append((depth, []))
        path[-1][1].extend(below)
    return path[0][1]


def _shared_with_next(sequences: list[TrainSequence], share_prefix: Sharing) -> list[int]:
    """Count the tokens that each sequence shares with the next one; 0 for the last."""
    shared = [common_prefix(*pair, share_prefix) for pair in itertools.pairwise(sequences)]
    return [*shared, 0][: len(sequences)]


def _joined(parts: list[Bundle], prefix: int, max_tokens: float) -> list[Bundle]:
    """Read parts that begin with the same `prefix` tokens together, as many as fit."""
    bins = first_fit_decreasing([part.num_tokens - prefix for part in parts], max_tokens - prefix)
    bundles = []
    for members in bins:
        together = [parts[index] for index in sorted(members)]
        sequences = itertools.chain(*(part.sequences for part in together))
        shared = itertools.chain(*((prefix, *part.shared) for part in together))
        num_distinct = sum(part.num_distinct for part in together)
        bundles.append(Bundle(tuple(sequences), tuple(shared)[1:], num_distinct))
    return bundles


class UpdateTotals(NamedTuple):
    """What the sequences of one optimizer update add up to, on all ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences that have a trained token."""


def token_weights(lengths: Tensor, totals: UpdateTotals, config: Config) -> Tensor:
    """Return the weight [N] float32 of each trained token in the summed loss of one update.

    `lengths` [N] int64 as in MicroBatch. The totals are of the whole update, so micro-batches, packing and ranks cannot
    change the gradient.
    """
    divisors = {
        "token_mean": totals.tokens,
        "sequence_mean": totals.sequences * lengths.double(),
        "constant": totals.sequences * config.max_response_tokens,
    }
    weights = torch.ones_like(lengths, dtype=torch.float64) / divisors[config.loss_aggregation]
    return weights.float()


def tokens_read(updates: Updates, sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the tokens that a pass over the step reads on all ranks, and the shares that sharing prefixes saves.

    `saved_share` is what this step saved, `shareable` what one tree of each update would save, of all sequences' tokens
    (ERR and POR of Tree Training, arXiv 2511.00413).
    """
    bundles = [bundle for update in updates for microbatch in update for bundle in microbatch]
    counts = [(b.num_tokens, b.num_tokens + sum(b.shared), b.num_distinct) for b in bundles]
    sums = torch.tensor([(0, 0, 0), *counts], dtype=torch.float64).sum(0)
    num_read, num_all, num_distinct = sum_over_ranks(sums).tolist()
    return {
        "tokens/forward": num_read,
        "tokens/saved_share": 1 - num_read / num_all,
        "tokens/shareable": 1 - num_distinct / num_all,
    }


def with_equal_counts(updates: Updates) -> Updates:
    """Add empty micro-batches to [update][micro-batch] → bundles until all ranks have as many; collective.

    FSDP's collectives need the same number on all ranks.
    """
    counts = torch.tensor([len(update) for update in updates])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    empty = [[] for _ in range(int(counts.max()))]
    return [(update + empty)[:count] for update, count in zip(updates, counts, strict=True)]


def pack(bundles: list[Bundle], layout: Layout) -> MicroBatch:
    """Pack bundles into rows.

    One row is for attention kernels that skip what is masked, in blocks of ATTENTION_BLOCK where prefixes are shared.
    Others pay for the square of the row, so short rows cost less. A row each is for layers that read from left to right
    and know no bounds. Without any bundle there is something to read, and N = 0.
    Raises RuntimeError for a sequence whose first token is marked as trained.
    """
    bundles = bundles or [_NOTHING_TO_TRAIN]
    lengths = [bundle.num_tokens for bundle in bundles]
    width = sum(lengths) if layout == "one_row" else max(lengths)
    is_shared = any(bundle.shared for bundle in bundles)
    if layout == "one_row" and is_shared:
        width = math.ceil(width / ATTENTION_BLOCK) * ATTENTION_BLOCK
    rows = [[member] for member in range(len(bundles))]
    if layout != "row_each":
        rows = first_fit_decreasing(lengths, width)
    starts = {}
    for row, members in enumerate(rows):
        start = row * width
        for member in members:
            starts[member] = start
            start += lengths[member]
    # input_ids, position_ids and visible_until, flat
    places = np.zeros((3, len(rows) * width), dtype=np.int64)
    places[2] = np.arange(len(rows) * width) + 1
    sources = []
    for member, tree in enumerate(bundles):
        sources += _place(tree, starts[member], *places)
    input_ids, position_ids, visible_until = torch.from_numpy(places).view(3, -1, width)
    visible_until -= width * torch.arange(len(rows))[:, None]
    sequences = [sequence for tree in bundles for sequence in tree.sequences]
    return MicroBatch(
        input_ids,
        position_ids,
        visible_until if is_shared else None,
        torch.from_numpy(np.concatenate(sources)),
        **_trained_columns(sequences),
    )


def _place(
    tree: Bundle,
    start: int,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    visible_until: np.ndarray,
) -> list[np.ndarray]:
    """Place a bundle in rows, flat [R·L], from `start` on.

    Returns the places of what predicts the trained tokens of each of its sequences.
    """
    path = np.zeros(0, dtype=np.int64)  # places of the tokens of one sequence
    sources = []
    for sequence, shared in zip(tree.sequences, (0, *tree.shared), strict=True):
        end = start + len(sequence.tokens) - shared
        visible_until[path[shared:]] = start
        input_ids[start:end] = sequence.tokens[shared:]
        position_ids[start:end] = np.arange(shared, len(sequence.tokens))
        path = np.concatenate([path[:shared], np.arange(start, end)])
        sources.append(path[:-1][sequence.loss_mask[1:]])
        start = end
    visible_until[path] = start
    return sources


def _trained_columns(sequences: list[TrainSequence]) -> dict[str, Any]:
    """Return what MicroBatch has of the N trained tokens of sequences, by field."""
    for sequence in sequences:
        if sequence.loss_mask[0]:
            raise RuntimeError(
                f"the first of {len(sequence.tokens)} tokens is marked as trained; nothing predicts it"
            )

    def of_tokens(name: str, dtype: type) -> Tensor:
        values = [getattr(sequence, name)[sequence.loss_mask] for sequence in sequences]
        return torch.from_numpy(np.concatenate(values, dtype=dtype))

    lengths = torch.tensor([sequence.num_trained for sequence in sequences])

    def of_sequences(values: list | Tensor) -> Tensor:
        return torch.as_tensor(values).repeat_interleave(lengths)

    return {
        "targets": of_tokens("tokens", np.int64),
        "sequence_ids": of_sequences((lengths > 0).cumsum(0) - 1),
        "behavior_logprobs": of_tokens("behavior_logprobs", np.float32),
        "policy_versions": of_tokens("policy_versions", np.int64),
        "advantages": of_sequences([sequence.advantage for sequence in sequences]).float(),
        "rewards": of_sequences([sequence.reward for sequence in sequences]).float(),
        "lengths": of_sequences(lengths),
        "num_sequences": int((lengths > 0).sum()),
    }
