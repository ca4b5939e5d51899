"""From sequences to rows: bundle them, pack bundles without waste, and weigh each token once for the whole update.

A *bundle* is one sequence, or, where prefixes are shared, a tree of several, depth first: each adds what follows the
tokens that it shares with the one before (Tree Training, arXiv 2511.00413; PrefixGrouper, 2506.05433, of prompts). Of G
responses of R tokens to a prompt of P, P + G·R tokens are read instead of G·(P + R).

Numpy and torch only, no model and no process group: everything here can be checked by hand.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

ATTENTION_BLOCK = 128
"""Tokens of a block of FlexAttention's mask: rows of whole blocks are of one kind, for which one kernel is compiled."""
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Sharing = Literal["off", "prompt", "tree"]


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
    advantage: float
    """Advantage of the whole sequence; with --advantage gae the reward, of which algos/gae.py makes those of tokens."""
    reward: float
    """Reward that the task gave."""
    group_id: int | None = None
    """Group whose sequences may share their prompt; None shares none."""

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


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences: R rows of L tokens that the model reads, and N trained tokens that the loss sees."""

    input_ids: Tensor
    """[R, L] int64; 0 at the padding of a row's end."""
    position_ids: Tensor
    """[R, L] int64, from 0 in each sequence; all 0 at padding, so each padding token is a sequence of its own."""
    visible_until: Tensor | None
    """[R, L] int64, column after the token's subtree: those from the token to there see it. None where no prefix is
    shared, and position_ids say where sequences begin."""
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
    num_trained: tuple[int, ...] = field(default=())
    """Trained tokens of each of the S sequences."""
    proximal_logprobs: Tensor | None = None
    """[N] float32 nats, of the weights before the step's first update; None where the loss derives them."""
    returns: Tensor | None = None
    """[N] float32, what the value head is to predict; None without one."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(
            **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        )


def first_fit_decreasing(lengths: list[int], capacity: float) -> list[list[int]]:
    """Pack items, none above `capacity`, longest first, each into the first bin with room; bins of item indices."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        chosen = next((b for b, free in enumerate(room) if free >= lengths[item]), len(bins))
        if chosen == len(bins):
            bins.append([])
            room.append(capacity)
        bins[chosen].append(item)
        room[chosen] -= lengths[item]
    return bins


def common_prefix(
    first: TrainSequence, second: TrainSequence, share_prefix: Sharing = "tree"
) -> int:
    """Count the tokens that both begin with; of prompts alone, in one group and before a trained token of either."""
    length = min(len(first.tokens), len(second.tokens))
    if share_prefix == "prompt":
        untrained = [
            int(s.loss_mask.argmax()) if s.num_trained else length for s in (first, second)
        ]
        length = min(length, *untrained) if first.group_id == second.group_id is not None else 0
    differs = first.tokens[:length] != second.tokens[:length]
    return int(differs.argmax()) if differs.any() else length


def bundle(
    sequences: list[TrainSequence], share_prefix: Sharing = "off", max_tokens: float = math.inf
) -> list[Bundle]:
    """Join the sequences of an update that begin alike, and leave every other one by itself.

    A tree of more than `max_tokens`, or the longest sequence, is cut, and what its parts share is read in each of them:
    greedily, deepest first. Where branches part, they are packed into the room behind their prefix. Parts that do not
    fit there fit together nowhere above, as they would take their own prefix along.
    """
    return next(bundle_within([max_tokens], sequences, share_prefix))


def bundle_within(
    limits: Sequence[float], sequences: list[TrainSequence], share_prefix: Sharing
) -> Iterator[list[Bundle]]:
    """Yield what `bundle` makes within each limit of tokens; what sequences share is found once."""

    def shared_with_next(order: list[int], sharing: Sharing) -> list[int]:
        return [
            *(
                common_prefix(sequences[i], sequences[j], sharing)
                for i, j in itertools.pairwise(order)
            ),
            0,
        ]

    # By bytes, in which equal beginnings stand together: depth first, and a sequence before those that it begins.
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tokens.tobytes())
    depths = shared_with_next(order, "tree")
    alone = {
        i: Bundle((sequences[i],), (), len(sequences[i].tokens) - d)
        for i, d in zip(order, depths, strict=False)
    }
    if share_prefix == "prompt":
        order.sort(key=lambda i: -1 if sequences[i].group_id is None else sequences[i].group_id)
        depths = shared_with_next(order, "prompt")
    elif share_prefix == "off":
        order, depths = list(range(len(sequences))), [0] * len(sequences)
    for limit in limits:
        most = max([limit, *(one.num_tokens for one in alone.values())])
        # of the path from the root: depth, and what ended below it
        nodes: list[tuple[int, list[Bundle]]] = [(0, [])]
        for i, depth in zip(order, depths, strict=False):
            below = [alone[i]]
            while nodes[-1][0] > depth:
                prefix, others = nodes.pop()
                below = _joined([*others, *below], prefix, most)
            if nodes[-1][0] < depth:
                nodes.append((depth, []))
            nodes[-1][1].extend(below)
        yield nodes[0][1]


def _joined(parts: list[Bundle], prefix: int, max_tokens: float) -> list[Bundle]:
    """Read parts that begin with the same `prefix` tokens together, as many as fit."""
    bins = first_fit_decreasing([part.num_tokens - prefix for part in parts], max_tokens - prefix)
    bundles = []
    for chosen in ([parts[p] for p in sorted(of)] for of in bins):
        members = itertools.chain(*(part.sequences for part in chosen))
        shared = itertools.chain(*((prefix, *part.shared) for part in chosen))
        bundles.append(
            Bundle(tuple(members), tuple(shared)[1:], sum(part.num_distinct for part in chosen))
        )
    return bundles


class UpdateTotals(NamedTuple):
    """What the sequences of one optimizer update add up to, on all ranks."""

    tokens: float
    """Trained tokens."""
    sequences: float
    """Sequences that have a trained token."""
    max_response_tokens: int
    """Longest response, tokens."""


def token_weights(num_trained: list[int], aggregation: Aggregation, totals: UpdateTotals) -> Tensor:
    """Return the weight [S] float32 of every trained token of each sequence in the summed loss of one update.

    `num_trained` are the trained tokens (≥ 1) of the sequences at hand. The totals are of the whole update, so
    micro-batches, packing and ranks cannot change the gradient.
    """
    if aggregation == "token_mean":
        weights = [1 / totals.tokens for _ in num_trained]
    elif aggregation == "sequence_mean":
        weights = [1 / (totals.sequences * tokens) for tokens in num_trained]
    else:
        weights = [1 / (totals.sequences * totals.max_response_tokens) for _ in num_trained]
    return torch.tensor(weights, dtype=torch.float32)


def tokens_read(
    updates: list[list[list[Bundle]]], sum_over_ranks: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Return the tokens that a pass over the step reads on all ranks, and the shares that sharing prefixes saves.

    `saved_share` is what this step saved, `shareable` what one tree of each update would save, of all sequences' tokens
    (ERR and POR of Tree Training, arXiv 2511.00413).
    """
    counts = torch.zeros(3, dtype=torch.float64)
    for bundle in (bundle for update in updates for microbatch in update for bundle in microbatch):
        counts += torch.tensor(
            [bundle.num_tokens, bundle.num_tokens + sum(bundle.shared), bundle.num_distinct]
        )
    num_read, num_all, num_distinct = sum_over_ranks(counts).tolist()
    return {
        "tokens/forward": num_read,
        "tokens/saved_share": 1 - num_read / num_all,
        "tokens/shareable": 1 - num_distinct / num_all,
    }


def pack(bundles: list[Bundle], one_row: bool, share_prefix: Sharing = "off") -> MicroBatch:
    """Pack bundles into rows as long as the longest of them, or all into one row.

    One row is for attention kernels that skip what is masked, in blocks of ATTENTION_BLOCK where prefixes are shared.
    Others pay for the square of the row, so short rows cost less. Without any bundle: one sequence of two tokens to
    read, as of one each there would be a kernel of its own, and N = 0, for a rank that only keeps the others company.
    Raises RuntimeError for a sequence whose first token is marked as trained.
    """
    lengths = [b.num_tokens for b in bundles] or [2]
    width = sum(lengths) if one_row else max(lengths)
    if one_row and share_prefix != "off":
        width = -(-width // ATTENTION_BLOCK) * ATTENTION_BLOCK
    bins = first_fit_decreasing(lengths, width)
    rows, sources = np.zeros((3, len(bins), width), dtype=np.int64), {}
    rows[2] = np.arange(width) + 1
    if not bundles:
        rows[1, 0, 1] = 1
    for row, of in enumerate(bins if bundles else ()):
        for b, start in zip(of, np.cumsum([0, *(lengths[b] for b in of)]), strict=False):
            sources[b] = [
                row * width + columns for columns in _place(bundles[b], start, *rows[:, row])
            ]
    found = [
        (s, at)
        for b, chosen in enumerate(bundles)
        for s, at in zip(chosen.sequences, sources[b], strict=True)
    ]
    input_ids, position_ids, visible_until = torch.from_numpy(rows)
    return MicroBatch(
        input_ids,
        position_ids,
        None if share_prefix == "off" else visible_until,
        **_trained_tokens([(s, at) for s, at in found if s.num_trained]),
    )


def _place(
    chosen: Bundle,
    column: int,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    visible_until: np.ndarray,
) -> list[np.ndarray]:
    """Place a bundle in a row [L] from a column on; returns columns of what predicts each member's trained tokens."""
    path, sources = np.zeros(0, dtype=np.int64), []  # columns of the tokens of one sequence
    for sequence, shared in zip(chosen.sequences, (0, *chosen.shared), strict=True):
        visible_until[path[shared:]] = column
        start, column = column, column + len(sequence.tokens) - shared
        input_ids[start:column] = sequence.tokens[shared:]
        position_ids[start:column] = np.arange(shared, len(sequence.tokens))
        path = np.concatenate([path[:shared], np.arange(start, column)])
        sources.append(path[:-1][sequence.loss_mask[1:]])
    visible_until[path] = column
    return sources


def _trained_tokens(trained: list[tuple[TrainSequence, np.ndarray]]) -> dict:
    """Fields of MicroBatch over the N trained tokens of (sequence, flat indices of what predicts them) pairs."""
    for sequence, _ in trained:
        if sequence.loss_mask[0]:
            raise RuntimeError(
                f"the first of {len(sequence.tokens)} tokens is marked as trained; nothing predicts it"
            )
    num_trained = [s.num_trained for s, _ in trained]

    def per_token(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(
            torch.tensor(num_trained, dtype=torch.int64)
        )

    def joined(arrays: list[np.ndarray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype))

    return {
        "sources": joined([sources for _, sources in trained], np.int64),
        "targets": joined([s.tokens[s.loss_mask] for s, _ in trained], np.int64),
        "sequence_ids": per_token(list(range(len(trained))), torch.int64),
        "behavior_logprobs": joined(
            [s.behavior_logprobs[s.loss_mask] for s, _ in trained], np.float32
        ),
        "policy_versions": joined([s.policy_versions[s.loss_mask] for s, _ in trained], np.int64),
        "advantages": per_token([s.advantage for s, _ in trained], torch.float32),
        "rewards": per_token([s.reward for s, _ in trained], torch.float32),
        "num_trained": tuple(num_trained),
    }
