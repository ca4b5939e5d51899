"""Rows in which every token sees what precedes it in its sequence, and shares of ranks that are about equal.

extras/trees/tests has what is true where sequences share what they begin with.
"""

import pytest
from hypothesis import given, settings
from packed_rows import (
    LAYOUTS,
    MOST_TOKENS,
    NUM_RANKS,
    SEQUENCES,
    UPDATES,
    check_columns,
    check_rows,
    check_shares,
)
from tiny_policy import random_sequences

from asyncrl.trainer.packing import first_fit_decreasing, pack
from asyncrl.trainer.splitting import distribute, fill_microbatches


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, LAYOUTS)
def test_every_token_of_a_row_sees_the_tokens_before_it_in_its_sequence_and_no_other(
    sequences, layout
):
    batch = pack(sequences, layout)
    num_tokens = len(check_rows(batch, sequences))
    assert num_tokens == sum(len(s.tokens) for s in sequences)
    num_rows, width = batch.input_ids.shape
    if layout == "one_row":
        assert (num_rows, width) == (1, num_tokens)
    else:
        assert width == max(len(s.tokens) for s in sequences)
    assert layout != "row_each" or num_rows == len(sequences)


def test_first_fit_decreasing_fills_gaps_with_short_items():
    assert first_fit_decreasing([3, 7, 4, 6], 10) == [[1, 0], [3, 2]]


def test_nothing_packs_into_a_sequence_of_two_tokens_to_read_and_none_to_train():
    batch = pack([], "short_rows")
    assert batch.input_ids.tolist() == [[0, 0]] and batch.position_ids.tolist() == [[0, 1]]
    check_columns(batch, [])


@settings(max_examples=80, deadline=None)
@given(UPDATES, NUM_RANKS, MOST_TOKENS, LAYOUTS)
def test_ranks_get_every_sequence_once_in_micro_batches_within_the_budget_and_about_equal_tokens(
    updates, ranks, budget, layout
):
    shares = distribute(updates, ranks, budget, layout)
    assert len(shares) == ranks and all(len(share) == len(updates) for share in shares)
    check_shares(shares, updates, budget, layout)
    for number, sequences in enumerate(updates):
        # the longest first, each to the rank with the fewest tokens
        expected = [0] * ranks
        for sequence in sorted(sequences, key=lambda s: -len(s.tokens)):
            expected[expected.index(min(expected))] += len(sequence.tokens)
        assert [sum(s.num_tokens for m in share[number] for s in m) for share in shares] == expected


def test_a_sequence_above_the_budget_is_refused():
    bundles = random_sequences(1, min_tokens=11, max_tokens=11)
    with pytest.raises(RuntimeError, match=r"^11 tokens are put into micro-batches of 10$"):
        fill_microbatches(bundles, 10, "one_row")
