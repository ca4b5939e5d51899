"""From sequences to rows: bundle them, pack bundles without waste, and weigh each token once for the whole update.

A *bundle* is one sequence, or, where prompts are shared, several of one group: their common prompt once, and then the
rest of each, which sees the prompt and itself (PrefixGrouper, arXiv 2506.05433; Tree Training, arXiv 2511.00413). Of G
responses of R tokens to a prompt of P, P + G·R tokens are read instead of G·(P + R).

Numpy and torch only, no model and no process group: everything here can be checked by hand.
"""

import itertools
from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

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
    """Advantage of the whole sequence; with --advantage gae the reward, of which algos/gae.py makes those of tokens."""
    reward: float
    """Reward that the task gave."""
    group_id: int | None = None
    """Group whose sequences may share the tokens that they begin with; None shares with none."""

    @property
    def num_trained(self) -> int:
        """Number of tokens that carry a loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class Bundle:
    """Sequences that are read together in one row."""

    sequences: tuple[TrainSequence, ...]
    prefix: int = 0
    """Tokens that all of them begin with, none of them trained, read once."""

    @property
    def num_tokens(self) -> int:
        """Tokens to read: the prefix, and what follows it in each sequence."""
        return self.prefix + sum(len(s.tokens) - self.prefix for s in self.sequences)


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
    returns: Tensor | None = None
    """[N] float32, what the value head is to foretell; None without one."""

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


def bundle(sequences: list[TrainSequence], share_prefix: bool = False, max_tokens: int | None = None) -> list[Bundle]:
    """Join the sequences of each group, where prefixes are shared, and leave every other one by itself.

    A group that is longer than `max_tokens` is cut into several bundles, and its prefix read in each of them; a
    bundle is above the limit only where it is one sequence.
    """
    members: dict[tuple, list[TrainSequence]] = {}
    for i, sequence in enumerate(sequences):
        alone = not share_prefix or sequence.group_id is None
        members.setdefault(("alone", i) if alone else ("group", sequence.group_id), []).append(sequence)
    return list(itertools.chain.from_iterable(_cut(of, max_tokens) for of in members.values()))


def _cut(members: list[TrainSequence], max_tokens: int | None) -> list[Bundle]:
    """Bundles of the sequences of one group."""
    prefix = common_prefix(members) if len(members) > 1 else 0
    if not prefix:
        return [Bundle((s,)) for s in members]
    rests = [len(s.tokens) - prefix for s in members]
    room = sum(rests) if max_tokens is None else max(max_tokens - prefix, *rests)
    return [Bundle(tuple(members[j] for j in sorted(part)), prefix) for part in first_fit_decreasing(rests, room)]


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


def pack(bundles: list[Bundle], one_row: bool, share_prefix: bool = False) -> MicroBatch:
    """Pack bundles into rows as long as the longest of them, or all into one row.

    One row is for attention kernels that skip what is masked, in blocks of ATTENTION_BLOCK where prompts are shared.
    Others pay for the square of the row, so short rows cost less. Without any bundle: one sequence of two tokens to
    read, as of one each there would be a kernel of its own, and N = 0, for a rank that only keeps the others company.
    Raises RuntimeError for a sequence whose first token is marked as trained.
    """
    lengths = [b.num_tokens for b in bundles] or [2]
    width = sum(lengths) if one_row else max(lengths)
    if one_row and share_prefix:
        width = -(-width // ATTENTION_BLOCK) * ATTENTION_BLOCK
    bins = first_fit_decreasing(lengths, width)
    rows = _Rows(len(bins), width)
    if not bundles:
        rows.position_ids[0, 1] = 1
    placed = {b: _place(rows, row, bundles[b]) for row, of in enumerate(bins if bundles else ()) for b in of}
    sequences = [s for b in bundles for s in b.sequences]
    sources = [source for b in range(len(bundles)) for source in placed[b]]
    return MicroBatch(
        input_ids=torch.from_numpy(rows.input_ids),
        position_ids=torch.from_numpy(rows.position_ids),
        segment_ids=torch.from_numpy(rows.segment_ids) if share_prefix else None,
        prefix_ids=torch.from_numpy(rows.prefix_ids) if share_prefix else None,
        num_read=sum(rows.filled),
        num_unshared=sum(len(s.tokens) for s in sequences),
        **_trained_tokens([(s, found) for s, found in zip(sequences, sources, strict=True) if s.num_trained]),
    )


def _place(rows: _Rows, row: int, chosen: Bundle) -> list[np.ndarray]:
    """Append a bundle to a row; returns flat indices of the tokens that predict each member's trained ones."""
    width, prefix = rows.input_ids.shape[1], chosen.prefix
    start = rows.append(row, chosen.sequences[0].tokens[:prefix], 0)
    sources = []
    for sequence in chosen.sequences:
        rest = rows.append(row, sequence.tokens[prefix:], prefix, start if prefix else None)
        before = np.flatnonzero(sequence.loss_mask) - 1
        sources.append(row * width + np.where(before < prefix, start + before, rest - prefix + before))
    return sources


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
