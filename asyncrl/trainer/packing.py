"""Packs sequences into rows without waste. No model is needed.

The completions of an episode make a trajectory, in one or more segments. A segment becomes a TrainSequence. A bundle is
a sequence, or several with a shared prefix. Bundles fill a micro-batch, and micro-batches make a
minibatch. Each epoch makes one optimizer update of each minibatch.
The calls from the buffer to the loss are in asyncrl/records.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from asyncrl.cluster.cluster import max_over_ranks
from asyncrl.records import TokenColumns, slice_columns, spread_columns

ATTENTION_BLOCK = 128
"""Tokens in a block of FlexAttention's mask. Rows of whole blocks need one compiled kernel only."""
Layout = Literal["one_row", "short_rows", "row_each"]
"""Form of a micro-batch: all bundles in one row, rows of the longest bundle's length, or a bundle a row."""


@dataclass(frozen=True)
class TrainSequence(TokenColumns):
    """A trajectory, or one segment of it: T tokens with its advantage."""

    tokens: np.ndarray
    """[T] int64, T ≥ 1."""
    loss_mask: np.ndarray
    """[T] bool, True for a token that the policy sampled. The first token has no prediction and must be False."""
    advantage: float = 0.0
    """Advantage of the sequence. With --advantage gae it is the reward, and gae.py makes advantages of tokens."""
    reward: float = 0.0
    """Reward that the task gave."""
    group_id: int = 0
    """Group whose sequences may share their prompt."""
    oldest_version: int | None = None
    """Oldest version in its trajectory, steps; None on later segments, because a trajectory counts once."""
    experts: np.ndarray | None = None
    """See Trajectory."""
    trained_in_trajectory: int | None = None
    """Trained tokens of all segments of its trajectory; None if the sequence is the whole trajectory."""

    @classmethod
    def to_score(cls, tokens: np.ndarray, loss_mask: np.ndarray) -> "TrainSequence":
        """Return a sequence whose tokens are scored but not trained on."""
        return cls(tokens, loss_mask, **spread_columns([], len(tokens)))

    @property
    def num_trained(self) -> int:
        """Number of tokens that carry a loss."""
        return int(np.count_nonzero(self.loss_mask))

    # A sequence is the simplest bundle.

    @property
    def sequences(self) -> tuple["TrainSequence", ...]:
        return (self,)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def row_indices(self, start: int) -> list[np.ndarray]:
        return [np.arange(start, start + self.num_tokens)]


class Bundle(Protocol):
    """One piece of a row: a sequence, or several with a shared prefix (extras/trees)."""

    sequences: tuple[TrainSequence, ...]
    num_tokens: int
    """Tokens to read."""

    def row_indices(self, start: int) -> list[np.ndarray]:
        """Return the flat index in the rows, [T], of each token of each sequence. The bundle begins at `start`."""
        ...


RankShare = list[list[list[Bundle]]]
"""A rank's share of a step: [minibatch][micro-batch] → bundles. Each epoch makes an update of each minibatch."""
_TWO_PADS = np.zeros(2, dtype=np.int64)
_NOTHING_TO_TRAIN = TrainSequence.to_score(_TWO_PADS, _TWO_PADS > 0)
"""Dummy for a rank without data. The rank must still join FSDP's collectives. One token would need another kernel."""


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences: R rows of L tokens that the model reads, and N trained tokens that the loss sees."""

    input_ids: Tensor
    """[R, L] int64; 0 at the padding of a row's end."""
    position_ids: Tensor
    """[R, L] int64, from 0 in each sequence. Padding is all 0, so each padding token is its own sequence."""
    visible_until: Tensor | None
    """[R, L] int64. The columns from the token's own up to but without this one attend to the token. It ends the last
    sequence that contains the token. None if no bundle shares a prefix; then position_ids show the sequences."""
    bounds: Tensor | None
    """[sequences + 1] int32, each sequence's first column, and L; None for several rows and shared prefixes."""
    longest: int
    """Tokens of the longest bundle. With bounds that is a sequence."""
    sources: Tensor
    """[N] int64, flat index in R·L of the token whose hidden state predicts the trained token."""
    targets: Tensor
    """[N] int64, the trained tokens, sequence by sequence. A token of a shared prefix comes once for each sequence."""
    sequence_ids: Tensor
    """[N] int64, non-decreasing, 0 … S−1; only sequences with a trained token are numbered."""
    columns: dict[str, Tensor]
    """[N] or [N, K], by name: fields of TokenColumns, and columns that the trainer adds before the step's first update.
    These are `proximal_logprobs`, float32 nats, if they are recomputed. With a value head there are also `values` of
    the state before the token, and `returns`, its targets, float32."""
    advantages: Tensor
    """[N] float32."""
    rewards: Tensor
    """[N] float32."""
    trained_in_trajectory: Tensor
    """[N] int64, number of trained tokens in the token's trajectory, all its segments included."""
    num_sequences: int
    """S, sequences with a trained token."""
    num_trajectories: float
    """Their trajectories. A segment counts as its share of the trajectory's trained tokens."""
    lags: Tensor
    """[N] int64, the policy's version at the step's start − the token's, steps."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        return replace(self, **tree_map_only(Tensor, lambda tensor: tensor.to(device), vars(self)))


def first_fit_decreasing(lengths: list[int], capacity: float) -> list[list[int]]:
    """Put items, longest first, each into the first bin with room; return the item indices of each bin."""
    bins: list[list[int]] = []
    room: list[float] = []
    shortest = min(lengths, default=0)
    num_full = 0
    for item in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        length = lengths[item]
        while num_full < len(bins) and room[num_full] < shortest:
            num_full += 1  # no item fits into these bins any more
        for index in range(num_full, len(bins)):
            if room[index] >= length:
                break
        else:
            index = len(bins)
            bins.append([])
            room.append(capacity)
        bins[index].append(item)
        room[index] -= length
    return bins


def with_equal_counts(share: RankShare) -> RankShare:
    """Add empty micro-batches to [minibatch][micro-batch] → bundles, so that all ranks have equally many; collective.

    FSDP's collectives need the same number on all ranks.
    """
    counts = max_over_ranks([len(minibatch) for minibatch in share])
    empty = [[] for _ in range(max(counts))]
    return [(minibatch + empty)[:count] for minibatch, count in zip(share, counts, strict=True)]


def pack(bundles: list[Bundle], layout: Layout, policy_version: int = 0) -> MicroBatch:
    """Pack bundles into rows. Lags are counted from `policy_version`, the policy's at the step's start.

    Without `policy_version` the lags have no meaning: such tokens are scored, not trained on.

    `one_row` suits attention kernels that skip masked tokens; with shared prefixes its length is a multiple of
    ATTENTION_BLOCK. Other kernels pay for the square of a row, so `short_rows` cost less. `row_each` suits recurrent
    layers. They know no bounds. Without bundles a dummy is packed, and N = 0.
    """
    bundles = bundles or [_NOTHING_TO_TRAIN]
    bundle_lengths = [bundle.num_tokens for bundle in bundles]
    width = sum(bundle_lengths) if layout == "one_row" else max(bundle_lengths)
    is_shared = any(len(bundle.sequences) > 1 for bundle in bundles)
    if layout == "one_row" and is_shared:
        width = math.ceil(width / ATTENTION_BLOCK) * ATTENTION_BLOCK
    num_rows, starts = _place_bundles(bundle_lengths, width, layout)
    # of all rows one after the other; padding sees itself only
    input_ids = np.zeros(num_rows * width, dtype=np.int64)
    position_ids = np.zeros_like(input_ids)
    visible_until = np.arange(num_rows * width) + 1
    sources = []
    has_bounds = layout == "one_row" and not is_shared
    bounds = torch.tensor([*sorted(starts), width], dtype=torch.int32) if has_bounds else None
    for bundle, start in zip(bundles, starts, strict=True):
        for sequence, indices in zip(bundle.sequences, bundle.row_indices(start), strict=True):
            input_ids[indices] = sequence.tokens
            position_ids[indices] = np.arange(len(indices))
            # A shared prefix is visible until the last sequence that begins with it.
            visible_until[indices] = indices[-1] + 1
            # The token before a trained token predicts it.
            sources.append(indices[:-1][sequence.loss_mask[1:]])
    # Columns are counted within their row.
    visible_until = visible_until.reshape(num_rows, width) - width * np.arange(num_rows)[:, None]
    trained = _trained_columns([sequence for bundle in bundles for sequence in bundle.sequences])
    return MicroBatch(
        torch.from_numpy(input_ids).view(num_rows, width),
        torch.from_numpy(position_ids).view(num_rows, width),
        torch.from_numpy(visible_until) if is_shared else None,
        bounds,
        max(bundle_lengths),
        torch.from_numpy(np.concatenate(sources)),
        **trained,  # targets, sequence_ids, columns, …: _trained_columns
        lags=policy_version - trained["columns"]["policy_versions"].long(),
    )


def _place_bundles(bundle_lengths: list[int], width: int, layout: Layout) -> tuple[int, list[int]]:
    """Return the number of rows of `width` tokens, and the flat index of each bundle's start."""
    rows = [[index] for index in range(len(bundle_lengths))]
    if layout != "row_each":
        rows = first_fit_decreasing(bundle_lengths, width)
    starts = [0] * len(bundle_lengths)
    for row, indices in enumerate(rows):
        start = row * width
        for index in indices:
            starts[index] = start
            start += bundle_lengths[index]
    return len(rows), starts


def _trained_columns(sequences: list[TrainSequence]) -> dict[str, Any]:
    """Return the fields of a MicroBatch that describe the N trained tokens."""
    targets = [sequence.tokens[sequence.loss_mask] for sequence in sequences]
    columns = [slice_columns(sequence, sequence.loss_mask) for sequence in sequences]
    num_trained = torch.tensor([sequence.num_trained for sequence in sequences])
    trained_in_trajectory = [
        sequence.trained_in_trajectory or sequence.num_trained for sequence in sequences
    ]

    def of_sequences(values: list | Tensor) -> Tensor:
        return torch.as_tensor(values).repeat_interleave(num_trained)

    return {
        "targets": torch.from_numpy(np.concatenate(targets)),
        "sequence_ids": of_sequences((num_trained > 0).cumsum(0) - 1),
        "columns": {
            name: torch.from_numpy(np.concatenate([values[name] for values in columns]))
            for name in columns[0]
        },
        "advantages": of_sequences([sequence.advantage for sequence in sequences]).float(),
        "rewards": of_sequences([sequence.reward for sequence in sequences]).float(),
        "trained_in_trajectory": of_sequences(trained_in_trajectory),
        "num_sequences": int((num_trained > 0).sum()),
        "num_trajectories": sum(
            sequence.num_trained / num_tokens
            for sequence, num_tokens in zip(sequences, trained_in_trajectory, strict=True)
            if num_tokens
        ),
    }
