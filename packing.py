"""From sequences to micro-batches: split by tokens, pack without waste, and weigh each token once for the whole update.

Numpy and torch only, no model and no process group: everything here can be checked by hand.
"""

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

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

    @property
    def num_trained(self) -> int:
        """Tokens that carry a loss."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences: R rows of L tokens that the model reads, and N trained tokens that the loss sees."""

    input_ids: Tensor
    """[R, L] int64; 0 at the padding of a row's end."""
    position_ids: Tensor
    """[R, L] int64, from 0 in each sequence; all 0 at padding, so each padding token is a sequence of its own."""
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


def split_into_microbatches(lengths: list[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Assign sequences of `lengths` tokens to ranks and micro-batches: [rank][micro-batch] → sequence indices.

    Ranks get about equal tokens, each micro-batch at most `max_tokens`, and all ranks the same number of micro-batches,
    because FSDP's collectives must match; so some may be empty. Raises ValueError for a sequence above `max_tokens`.
    """
    for item, length in enumerate(lengths):
        if length > max_tokens:
            raise ValueError(
                f"sequence {item} has {length} tokens, and a micro-batch at most {max_tokens}: "
                "raise --max-tokens-per-microbatch"
            )
    of_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = load.index(min(load))
        of_rank[rank].append(item)
        load[rank] += lengths[item]
    packed = [
        [[items[i] for i in members] for members in first_fit_decreasing([lengths[i] for i in items], max_tokens)]
        for items in of_rank
    ]
    num_microbatches = max(map(len, packed), default=0)
    return [microbatches + [[] for _ in range(num_microbatches - len(microbatches))] for microbatches in packed]


def distribute(
    updates: list[list[TrainSequence]], num_ranks: int, max_tokens: int
) -> list[list[list[list[TrainSequence]]]]:
    """Split the sequences of each optimizer update over ranks: [rank][update][micro-batch] → sequences."""
    plans = [split_into_microbatches([len(s.tokens) for s in update], num_ranks, max_tokens) for update in updates]
    return [
        [[[update[i] for i in members] for members in plan[rank]] for update, plan in zip(updates, plans, strict=True)]
        for rank in range(num_ranks)
    ]


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


def pack(sequences: list[TrainSequence], one_row: bool) -> MicroBatch:
    """Pack sequences into rows as long as the longest of them, or all into one row.

    One row is for variable-length attention kernels. Others pay for the square of the row, so short rows cost less.
    Without any sequence: one token to read and N = 0, for a rank that only keeps the others company.
    Raises RuntimeError for a sequence whose first token is marked as trained.
    """
    lengths = [len(s.tokens) for s in sequences] or [1]
    width = sum(lengths) if one_row else max(lengths)
    rows = first_fit_decreasing(lengths, width)
    input_ids = np.zeros((len(rows), width), dtype=np.int64)
    position_ids = np.zeros((len(rows), width), dtype=np.int64)
    first = np.zeros(len(lengths), dtype=np.int64)
    for row, members in enumerate(rows):
        column = 0
        for i in members if sequences else ():
            first[i] = row * width + column
            input_ids[row, column : column + lengths[i]] = sequences[i].tokens
            position_ids[row, column : column + lengths[i]] = np.arange(lengths[i])
            column += lengths[i]
    trained = [(s, int(start)) for s, start in zip(sequences, first, strict=False) if s.num_trained]
    return MicroBatch(torch.from_numpy(input_ids), torch.from_numpy(position_ids), **_trained_tokens(trained))


def _trained_tokens(trained: list[tuple[TrainSequence, int]]) -> dict:
    """Fields of MicroBatch over the N trained tokens of (sequence, flat index of its first token) pairs."""
    for sequence, _ in trained:
        if sequence.loss_mask[0]:
            raise RuntimeError(f"the first of {len(sequence.tokens)} tokens is marked as trained; nothing predicts it")
    num_trained = [s.num_trained for s, _ in trained]

    def per_token(values: list, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(num_trained, dtype=torch.int64))

    def joined(arrays: list[np.ndarray], dtype: type) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype))

    return {
        "sources": joined([start - 1 + np.flatnonzero(s.loss_mask) for s, start in trained], np.int64),
        "targets": joined([s.tokens[s.loss_mask] for s, _ in trained], np.int64),
        "sequence_ids": per_token(list(range(len(trained))), torch.int64),
        "behavior_logprobs": joined([s.behavior_logprobs[s.loss_mask] for s, _ in trained], np.float32),
        "policy_versions": joined([s.policy_versions[s.loss_mask] for s, _ in trained], np.int64),
        "advantages": per_token([s.advantage for s, _ in trained], torch.float32),
        "rewards": per_token([s.reward for s, _ in trained], torch.float32),
        "num_trained": tuple(num_trained),
    }
