"""What must be true of rows into which sequences are packed, and what random sequences to pack look like."""

from dataclasses import replace
from typing import get_args

import numpy as np
import torch
from hypothesis import strategies as st
from plain_trainer import columns_of, distinct_prefixes
from tiny_policy import VERSION, grouped_sequences, random_sequences, random_tree

from asyncrl.trainer.packing import Layout

LAYOUTS = st.sampled_from(get_args(Layout))
TREES = st.builds(
    random_tree, st.integers(1, 14), st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 4)
)
GROUPS = st.builds(grouped_sequences, st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000))
SINGLES = st.builds(random_sequences, st.integers(1, 12), st.integers(0, 1000))


def from_1(sequences):
    """The sequences with tokens from 1 on: 0 is what padding has."""
    return [replace(s, tokens=s.tokens + 1) for s in sequences]


UPDATES = st.lists(GROUPS | TREES, max_size=2)
NUM_RANKS = st.integers(1, 5)
MOST_TOKENS = st.integers(75, 160)
"""Of a micro-batch; no sequence has more."""
SEQUENCES = (TREES | GROUPS | SINGLES).map(from_1)


def sequences_in(bundles):
    """The sequences of bundles, in the order in which pack lists them."""
    return [s for b in bundles for s in b.sequences]


def visible_columns(batch):
    """Which columns each token of each row sees, [R, L, L] bool."""
    columns = np.arange(batch.input_ids.shape[1])
    is_before = columns <= columns[:, None]
    if batch.visible_until is not None:
        return is_before & (columns[:, None] < batch.visible_until.numpy()[:, None])
    starts = columns - batch.position_ids.numpy()
    return is_before & (starts[:, :, None] <= columns)


def check_rows(batch, bundles):
    """Check that each token sees the tokens before it in its sequence alone. Return the prefixes that are read."""
    sequences = sequences_in(bundles)
    ids, positions = batch.input_ids.numpy(), batch.position_ids.numpy()
    is_visible = visible_columns(batch)
    prefixes = {}
    for row, column in np.ndindex(ids.shape):
        seen = np.flatnonzero(is_visible[row, column])
        assert seen[-1] == column and positions[row][seen].tolist() == list(range(len(seen)))
        prefixes[row, column] = tuple(ids[row][seen].tolist())
        assert ids[row, column] or len(seen) == 1, "padding sees itself alone"
    read = [prefix for prefix in prefixes.values() if prefix != (0,)]
    assert set(read) == distinct_prefixes(sequences)
    assert len(read) == sum(b.num_tokens for b in bundles)
    trained = [s for s in sequences if s.num_trained]
    sources = iter(batch.sources.tolist())
    for sequence in trained:
        for t in np.flatnonzero(sequence.loss_mask):
            place = divmod(next(sources), ids.shape[1])
            assert prefixes[place] == tuple(sequence.tokens[:t].tolist())
    assert next(sources, None) is None
    check_columns(batch, trained)
    return read


def check_columns(batch, trained):
    """Check that a loss sees of the trained tokens what their sequences have, one after the other."""
    columns = {
        "token": batch.targets,
        "behavior": batch.columns["behavior_logprobs"],
        "advantage": batch.advantages,
        "reward": batch.rewards,
        "length": batch.trained_in_trajectory,
        "lag": VERSION - batch.columns["policy_versions"].long(),
        "id": batch.sequence_ids,
    }
    torch.testing.assert_close(columns, columns_of(trained), rtol=1e-6, atol=0, check_dtype=False)
    assert batch.num_sequences == len(trained)
    assert batch.advantages.dtype == batch.rewards.dtype == torch.float32
    assert batch.columns["behavior_logprobs"].dtype == torch.float32


def check_shares(shares, updates, budget, layout):
    """Check that ranks get every sequence once, in micro-batches within the budget, and about equal tokens."""
    for number, sequences in enumerate(updates):
        microbatches_of_ranks = [share[number] for share in shares]
        microbatches = [m for of_rank in microbatches_of_ranks for m in of_rank]
        held = [id(s) for microbatch in microbatches for s in sequences_in(microbatch)]
        assert sorted(held) == sorted(map(id, sequences))
        assert all(0 < padded(m, layout) <= budget for m in microbatches)
        num_tokens = [
            [sum(b.num_tokens for b in m) for m in of_rank] for of_rank in microbatches_of_ranks
        ]
        loads = [sum(of_rank) for of_rank in num_tokens]
        assert max(loads) - min(loads) <= max(b.num_tokens for m in microbatches for b in m)
        if layout == "row_each":
            for of_rank in microbatches_of_ranks:
                lengths = [b.num_tokens for m in of_rank for b in m]
                assert lengths == sorted(lengths, reverse=True)
                assert all((len(m) + 1) * m[0].num_tokens > budget for m in of_rank[:-1])
            continue
        for of_rank in num_tokens:
            # of two micro-batches that fit into one, first fit would have made one
            assert len(of_rank) < 2 or sum(sorted(of_rank)[:2]) > budget


def padded(bundles, layout):
    """Tokens of a micro-batch, with those of padding where each bundle has a row of its own."""
    lengths = [b.num_tokens for b in bundles]
    return max(lengths) * len(lengths) if layout == "row_each" else sum(lengths)
