"""From sequences to micro-batches: split by tokens, pack without waste, and weigh each token once for the whole update.

The unit of both is the *bundle*: one sequence, or, where prompts are shared, several of one group: their common prompt
once, and then the rest of each, which sees the prompt and itself (PrefixGrouper, arXiv 2506.05433; Tree Training,
arXiv 2511.00413). Of G responses of R tokens to a prompt of P, P + G·R tokens are read instead of G·(P + R).

Numpy and torch only, no model and no process group: everything here can be checked by hand.
"""

import itertools
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

COLUMNS_PER_TOKEN = 256
"""What all else costs for a token, in columns of a dense attention mask: 235 and 329 in the tiny model on a CPU, from
steps with short and long rows. By operations it is 6 times the hidden size, so a larger model could share more."""
ATTENTION_BLOCK = 128
"""Tokens of a block of FlexAttention's mask: rows of whole blocks are of one kind, for which one kernel is compiled."""
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


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
    """Of the whole sequence."""
    reward: float
    """Task reward."""
    prefix_group: int | None = None
    """Sequences of one update with the same one share the tokens they begin with; None shares with none."""

    @property
    def num_trained(self) -> int:
        """Tokens that carry a loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Bundle:
    """Sequences that are read together in one row."""

    members: tuple[int, ...]
    """Indices of the sequences."""
    prefix: int
    """Tokens that all of them begin with, none of them trained, read once."""
    num_tokens: int
    """Tokens to read: the prefix, and what follows it in each."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences: R rows of L tokens that the model reads, and N trained tokens that the loss sees."""

    input_ids: Tensor
    """[R, L] int64; 0 at the padding of a row's end."""
    position_ids: Tensor
    """[R, L] int64, from 0 in each sequence; all 0 at padding, so each padding token is a sequence of its own."""
    segment_ids: Tensor | None
    """[R, L] int64, column where the token's segment (a shared prefix, the rest of a sequence, a padding token)
    begins; None where no prompt is shared, and position_ids say where sequences begin."""
    prefix_ids: Tensor | None
    """[R, L] int64, segment that the token sees besides its own, up to itself; its own again where there is none."""
    sources: Tensor
    """[N] int64, flat index into R·L of the token whose hidden state predicts the trained token."""
    targets: Tensor
    """[N] int64, the trained tokens, sequence by sequence."""
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
    num_read: int = 0
    """Tokens in the rows, without padding."""
    num_unshared: int = 0
    """Tokens of all sequences: what num_read would be if no prompt were shared."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return MicroBatch(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()})


def first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
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


def common_prefix(sequences: list[TrainSequence]) -> int:
    """Count the tokens that all sequences begin with, before the first trained token of any."""
    untrained = min(int(s.loss_mask.argmax()) if s.num_trained else len(s.tokens) for s in sequences)
    heads = np.stack([s.tokens[:untrained] for s in sequences])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else untrained


def bundle(sequences: list[TrainSequence], share_prefix: bool, max_tokens: int | None = None) -> list[Bundle]:
    """Join the sequences of each prefix_group, where prefixes are shared, and leave every other one by itself.

    A group that is longer than `max_tokens` is cut into several bundles, and its prefix read in each of them; a
    bundle is above the limit only where it is one sequence.
    """
    members: dict[tuple, list[int]] = {}
    for i, sequence in enumerate(sequences):
        alone = not share_prefix or sequence.prefix_group is None
        members.setdefault(("alone", i) if alone else ("group", sequence.prefix_group), []).append(i)
    return list(itertools.chain.from_iterable(_cut(sequences, of, max_tokens) for of in members.values()))


def _cut(sequences: list[TrainSequence], members: list[int], max_tokens: int | None) -> list[Bundle]:
    """Bundles of the sequences of one group."""
    prefix = common_prefix([sequences[i] for i in members]) if len(members) > 1 else 0
    if not prefix:
        return [Bundle((i,), 0, len(sequences[i].tokens)) for i in members]
    rests = [len(sequences[i].tokens) - prefix for i in members]
    room = sum(rests) if max_tokens is None else max(max_tokens - prefix, *rests)
    parts = [sorted(part) for part in first_fit_decreasing(rests, room)]
    return [Bundle(tuple(members[j] for j in part), prefix, prefix + sum(rests[j] for j in part)) for part in parts]


def balance(lengths: list[int], num_ranks: int) -> list[list[int]]:
    """Deal items to ranks, longest first, each to the rank with the fewest tokens; item indices of each rank."""
    of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = load.index(min(load))
        of_rank[rank].append(item)
        load[rank] += lengths[item]
    return of_rank


def split_into_microbatches(lengths: list[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
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
    packed = [
        [[items[i] for i in members] for members in first_fit_decreasing([lengths[i] for i in items], max_tokens)]
        for items in balance(lengths, num_ranks)
    ]
    num_microbatches = max(map(len, packed), default=0)
    return [microbatches + [[] for _ in range(num_microbatches - len(microbatches))] for microbatches in packed]


def choose_bundles(
    sequences: list[TrainSequence], num_ranks: int, max_tokens: int, share_prefix: bool, one_row: bool
) -> list[Bundle]:
    """Bundle the sequences of an update so that the rank with the most to compute has as little as may be.

    Whole groups save the most tokens. But a few of them cannot be dealt evenly, and where attention is dense a row pays
    for its square; so groups are cut at half the limit, and half of that, while this helps.
    """
    longest, limits = max((len(s.tokens) for s in sequences), default=1), [max_tokens]
    while share_prefix and limits[-1] > longest:
        limits.append(max(limits[-1] // 2, longest))

    def cost(bundles: list[Bundle]) -> float:
        lengths = [b.num_tokens for b in bundles]
        return max(row_cost([lengths[i] for i in items], one_row) for items in balance(lengths, num_ranks))

    return min((bundle(sequences, share_prefix, limit) for limit in limits), key=cost)


def row_cost(lengths: list[int], one_row: bool) -> int:
    """What a rank's bundles cost to compute, relative to other ways to pack the same sequences."""
    if one_row or not lengths:
        return sum(lengths)
    width = max(lengths)
    return len(first_fit_decreasing(lengths, width)) * width * (COLUMNS_PER_TOKEN + width)


def distribute(
    updates: list[list[TrainSequence]],
    num_ranks: int,
    max_tokens: int,
    share_prefix: bool = False,
    one_row: bool = False,
) -> list[list[list[list[TrainSequence]]]]:
    """Split the sequences of each optimizer update over ranks: [rank][update][micro-batch] → sequences.

    With `share_prefix` the prefix_group of what is returned is the bundle, so that it is packed as it was counted here;
    `one_row` as in pack.
    """
    shares: list[list[list[list[TrainSequence]]]] = [[] for _ in range(num_ranks)]
    for update in updates:
        bundles = choose_bundles(update, num_ranks, max_tokens, share_prefix, one_row)
        members = [[update[i] for i in b.members] for b in bundles]
        if share_prefix:
            members = [[replace(s, prefix_group=b) for s in of] for b, of in enumerate(members)]
        plan = split_into_microbatches([b.num_tokens for b in bundles], num_ranks, max_tokens)
        for share, microbatches in zip(shares, plan, strict=True):
            share.append([[s for b in chosen for s in members[b]] for chosen in microbatches])
    return shares


def token_weights(
    num_trained: list[int], aggregation: Aggregation, total_tokens: int, total_sequences: int, max_response_tokens: int
) -> list[float]:
    """Weight of every trained token of each sequence in the summed loss of one optimizer update.

    `num_trained`: trained tokens (≥ 1) of the sequences at hand. The totals are over all sequences of the update that
    have a trained token, on all ranks: so micro-batches, packing and ranks cannot change the gradient.
    """
    if aggregation == "token_mean":
        return [1 / total_tokens for _ in num_trained]
    if aggregation == "sequence_mean":
        return [1 / (total_sequences * tokens) for tokens in num_trained]
    if aggregation == "constant":
        return [1 / (total_sequences * max_response_tokens) for _ in num_trained]
    raise ValueError(f"loss aggregation must be token_mean, sequence_mean or constant, got {aggregation!r}")


class _Rows:
    """Rows while they are filled from the left; arrays [R, L] int64 as in MicroBatch."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.input_ids = np.zeros((num_rows, width), dtype=np.int64)
        self.position_ids = np.zeros((num_rows, width), dtype=np.int64)
        self.segment_ids = np.tile(np.arange(width), (num_rows, 1))
        self.prefix_ids = self.segment_ids.copy()
        self.filled = [0] * num_rows

    def append(self, row: int, tokens: np.ndarray, position: int, prefix: int | None = None) -> int:
        """Append a segment whose first token has `position` and which sees the segment at column `prefix`, if any.

        Returns the column where it begins.
        """
        start, end = self.filled[row], self.filled[row] + len(tokens)
        self.input_ids[row, start:end] = tokens
        self.position_ids[row, start:end] = np.arange(position, position + len(tokens))
        self.segment_ids[row, start:end] = start
        self.prefix_ids[row, start:end] = start if prefix is None else prefix
        self.filled[row] = end
        return start


def pack(sequences: list[TrainSequence], one_row: bool, share_prefix: bool = False) -> MicroBatch:
    """Pack sequences into rows as long as the longest bundle of them, or all into one row.

    One row is for attention kernels that skip what is masked, in blocks of ATTENTION_BLOCK where prompts are shared.
    Others pay for the square of the row, so short rows cost less. Without any sequence: one token to read and N = 0,
    for a rank that only keeps the others company.
    Raises RuntimeError for a sequence whose first token is marked as trained.
    """
    bundles = bundle(sequences, share_prefix)
    lengths = [b.num_tokens for b in bundles] or [1]
    width = sum(lengths) if one_row else max(lengths)
    if one_row and share_prefix:
        width = -(-width // ATTENTION_BLOCK) * ATTENTION_BLOCK
    bins = first_fit_decreasing(lengths, width)
    rows = _Rows(len(bins), width)
    sources: list[np.ndarray] = [np.zeros(0, np.int64)] * len(sequences)
    for row, members in enumerate(bins if sequences else ()):
        for b in members:
            _place(rows, row, sequences, bundles[b], sources)
    trained = [(s, found) for s, found in zip(sequences, sources, strict=True) if s.num_trained]
    return MicroBatch(
        input_ids=torch.from_numpy(rows.input_ids),
        position_ids=torch.from_numpy(rows.position_ids),
        segment_ids=torch.from_numpy(rows.segment_ids) if share_prefix else None,
        prefix_ids=torch.from_numpy(rows.prefix_ids) if share_prefix else None,
        num_read=sum(rows.filled),
        num_unshared=sum(len(s.tokens) for s in sequences),
        **_trained_tokens(trained),
    )


def _place(rows: _Rows, row: int, sequences: list[TrainSequence], chosen: Bundle, sources: list[np.ndarray]) -> None:
    """Append a bundle to a row, and note in `sources` where each member's trained tokens are predicted."""
    width = rows.input_ids.shape[1]
    prefix = chosen.prefix
    start = rows.append(row, sequences[chosen.members[0]].tokens[:prefix], 0)
    for i in chosen.members:
        rest = rows.append(row, sequences[i].tokens[prefix:], prefix, start if prefix else None)
        before = np.flatnonzero(sequences[i].loss_mask) - 1
        sources[i] = row * width + np.where(before < prefix, start + before, rest - prefix + before)


def _trained_tokens(trained: list[tuple[TrainSequence, np.ndarray]]) -> dict:
    """Fields of MicroBatch over the N trained tokens of (sequence, flat indices of what predicts them) pairs."""
    for sequence, _ in trained:
        if sequence.loss_mask[0]:
            raise RuntimeError(f"the first of {len(sequence.tokens)} tokens is marked as trained; nothing predicts it")
    num_trained = [s.num_trained for s, _ in trained]

    def per_token(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(num_trained, dtype=torch.int64))

    def joined(arrays: list[np.ndarray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype))

    return {
        "sources": joined([sources for _, sources in trained], np.int64),
        "targets": joined([s.tokens[s.loss_mask] for s, _ in trained], np.int64),
        "sequence_ids": per_token(list(range(len(trained))), torch.int64),
        "behavior_logprobs": joined([s.behavior_logprobs[s.loss_mask] for s, _ in trained], np.float32),
        "policy_versions": joined([s.policy_versions[s.loss_mask] for s, _ in trained], np.int64),
        "advantages": per_token([s.advantage for s, _ in trained], torch.float32),
        "rewards": per_token([s.reward for s, _ in trained], torch.float32),
        "num_trained": tuple(num_trained),
    }
