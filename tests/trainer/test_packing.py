"""Rows in which every token sees what precedes it in its sequence, and bundles that read as few tokens as they may."""

import functools
import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_trainer import columns_of, distinct_prefixes
from tiny_policy import VERSION, grouped_sequences, make_sequence, random_sequences, random_tree

from asyncrl.config import Sharing
from asyncrl.trainer.attention import dense_cost, dense_mask
from asyncrl.trainer.dealing import choose_bundles, distribute, fill_microbatches
from asyncrl.trainer.packing import (
    ATTENTION_BLOCK,
    Layout,
    bundle,
    first_fit_decreasing,
    pack,
)

LAYOUTS = get_args(Layout)
SHARING = st.sampled_from(("off", "prompt", "tree"))
BUDGETS = st.just(math.inf) | st.integers(20, 60)


def from_1(sequences):
    """The sequences with tokens from 1 on: 0 is what padding has."""
    return [replace(s, tokens=s.tokens + 1) for s in sequences]


TREES = st.builds(
    random_tree, st.integers(1, 14), st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 4)
)
GROUPS = st.builds(grouped_sequences, st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000))
SINGLES = st.builds(random_sequences, st.integers(1, 12), st.integers(0, 1000))
SEQUENCES = (TREES | GROUPS | SINGLES).map(from_1)


def sequences_in(bundles):
    """The sequences of bundles, in the order in which pack lists them."""
    return [s for b in bundles for s in b.sequences]


def visible_columns(batch):
    """Which columns each token of each row sees, [R, L, L] bool."""
    if batch.visible_until is not None:
        return dense_mask(batch.visible_until)[:, 0].numpy()
    columns = np.arange(batch.input_ids.shape[1])
    starts = columns - batch.position_ids.numpy()
    return (starts[:, :, None] <= columns) & (columns <= columns[:, None])


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.sampled_from(LAYOUTS), SHARING, BUDGETS)
def test_every_token_of_a_row_sees_the_tokens_before_it_in_its_sequence_and_no_other(
    sequences, layout, sharing, budget
):
    bundles = bundle(sequences, sharing, budget)
    batch = pack(bundles, layout)
    ids, positions = batch.input_ids.numpy(), batch.position_ids.numpy()
    is_visible = visible_columns(batch)
    prefixes = {}
    for row, column in np.ndindex(ids.shape):
        seen = np.flatnonzero(is_visible[row, column])
        assert seen[-1] == column and positions[row][seen].tolist() == list(range(len(seen)))
        prefixes[row, column] = tuple(ids[row][seen].tolist())
        assert ids[row, column] or len(seen) == 1, "padding sees itself alone"
    assert layout != "row_each" or len(ids) == len(bundles)
    if layout == "one_row":
        num_read = sum(b.num_tokens for b in bundles)
        block = ATTENTION_BLOCK if any(b.shared for b in bundles) else 1
        assert ids.shape == (1, math.ceil(num_read / block) * block)
    read = [prefix for prefix in prefixes.values() if prefix != (0,)]
    assert set(read) == distinct_prefixes(sequences)
    assert len(read) == sum(b.num_tokens for b in bundles)
    if sharing == "off":
        assert len(read) == sum(len(s.tokens) for s in sequences)
    if sharing == "tree" and budget == math.inf:
        assert len(read) == len(set(read)), "each is read once"
    if sharing == "prompt" and budget == math.inf:
        heads = [b.sequences[0] for b in bundles]
        firsts = [(s.group_id, s.tokens[0]) for s in heads]
        assert len(set(firsts)) == len(firsts), "what may be read together is"
    if sharing == "prompt":
        for b in bundles:
            assert len({s.group_id for s in b.sequences}) == 1, "of one group"
            shared = zip(b.sequences[1:], b.shared, strict=True)
            assert not any(s.loss_mask[:length].any() for s, length in shared), "prompts alone"
    assert sum(b.num_distinct for b in bundles) == len(set(read))
    limit = max(budget, *(len(s.tokens) for s in sequences))
    assert max(b.num_tokens for b in bundles) <= limit
    for first, second in itertools.combinations(bundles, 2):
        both = [*first.sequences, *second.sequences]
        begins_alike = both[0].tokens[0] == both[-1].tokens[0]
        if sharing == "tree" and begins_alike:
            assert len(distinct_prefixes(both)) > limit, "what fits together is read together"
    trained = [s for s in sequences_in(bundles) if s.num_trained]
    sources = iter(batch.sources.tolist())
    for sequence in trained:
        for t in np.flatnonzero(sequence.loss_mask):
            place = divmod(next(sources), ids.shape[1])
            assert prefixes[place] == tuple(sequence.tokens[:t].tolist())
    assert next(sources, None) is None
    assert_columns(batch, trained)


def assert_columns(batch, trained):
    """What a loss sees of the trained tokens is what their sequences have, one after the other."""
    columns = {
        "token": batch.targets,
        "behavior": batch.behavior_logprobs,
        "advantage": batch.advantages,
        "reward": batch.rewards,
        "length": batch.lengths,
        "lag": VERSION - batch.policy_versions,
        "id": batch.sequence_ids,
    }
    torch.testing.assert_close(columns, columns_of(trained), rtol=1e-6, atol=0, check_dtype=False)
    assert batch.num_sequences == len(trained)
    assert batch.advantages.dtype == batch.rewards.dtype == torch.float32
    assert batch.behavior_logprobs.dtype == torch.float32


def test_first_fit_decreasing_fills_gaps_with_short_items():
    assert first_fit_decreasing([3, 7, 4, 6], 10) == [[1, 0], [3, 2]]


def test_nothing_packs_into_a_sequence_of_two_tokens_to_read_and_none_to_train():
    batch = pack([], "short_rows")
    assert batch.input_ids.tolist() == [[0, 0]] and batch.position_ids.tolist() == [[0, 1]]
    assert_columns(batch, [])


def test_a_trained_first_token_is_refused():
    sequence = make_sequence(np.random.default_rng(0), np.zeros(2, np.int64), np.ones(2, bool))
    with pytest.raises(RuntimeError, match=r"the first of 2 tokens .*nothing predicts it"):
        pack(bundle([sequence]), "one_row")


# Dealing: shares of ranks that are about equal, in micro-batches within the budget


dense_of_64 = functools.partial(dense_cost, hidden_size=64)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(GROUPS | TREES, max_size=2),
    st.integers(1, 5),
    st.integers(75, 160),
    st.sampled_from(LAYOUTS),
    st.sampled_from(get_args(Sharing)),
)
def test_ranks_get_every_sequence_once_in_micro_batches_within_the_budget_and_about_equal_tokens(
    updates, ranks, budget, layout, sharing
):
    cost = sum if layout == "one_row" else dense_of_64
    shares = distribute(updates, ranks, budget, sharing, cost, layout)
    assert len(shares) == ranks and all(len(share) == len(updates) for share in shares)
    for number, sequences in enumerate(updates):
        microbatches_of_ranks = [share[number] for share in shares]
        microbatches = list(itertools.chain(*microbatches_of_ranks))
        held = [id(s) for microbatch in microbatches for s in sequences_in(microbatch)]
        assert sorted(held) == sorted(map(id, sequences))
        num_tokens = [
            [sum(b.num_tokens for b in m) for m in of_rank] for of_rank in microbatches_of_ranks
        ]
        assert all(0 < padded(m, layout) <= budget for m in microbatches)
        loads = [sum(of_rank) for of_rank in num_tokens]
        assert max(loads) - min(loads) <= max(b.num_tokens for m in microbatches for b in m)
        if sharing == "off":
            # the longest first, each to the rank with the fewest tokens
            expected = [0] * ranks
            for sequence in sorted(sequences, key=lambda s: -len(s.tokens)):
                expected[expected.index(min(expected))] += len(sequence.tokens)
            assert loads == expected
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


def test_a_sequence_above_the_budget_is_refused():
    bundles = bundle(random_sequences(1, min_tokens=11, max_tokens=11))
    with pytest.raises(RuntimeError, match=r"^11 tokens are put into micro-batches of 10$"):
        fill_microbatches(bundles, 10, "one_row")


@pytest.mark.parametrize(
    ("sharing", "cost", "ranks", "prompt", "response", "sizes"),
    [
        # groups are cut only as far as the ranks ask
        ("prompt", sum, 1, 10, 5, [8, 8]),
        ("prompt", sum, 4, 10, 5, [4]),
        # a dense mask costs less for single sequences of long responses
        ("prompt", dense_of_64, 1, 16, 256, [1] * 16),
        # one row of all is wider than two
        ("auto", dense_of_64, 1, 128, 32, [8, 8]),
        ("auto", sum, 1, 128, 32, [16]),
        # a shared prompt saves 6 % of 16 responses of 256 tokens, and 19 % of 16 of 64
        ("auto", sum, 1, 16, 256, [1] * 16),
        ("auto", sum, 1, 16, 64, [16]),
    ],
)
def test_groups_are_read_together_as_far_as_it_costs_less(
    sharing, cost, ranks, prompt, response, sizes
):
    """`auto` shares what saves a tenth, and else deals as off does. All groups have one prompt."""
    rng, groups = np.random.default_rng(0), []
    for number in range(16):
        tokens = np.repeat([0, 1 + number], [prompt, response])
        groups.append(make_sequence(rng, tokens, tokens > 0, group_id=number // 8))
    chosen = choose_bundles(groups, ranks, 16384, sharing, cost)
    assert [[len(b.sequences) for b in bundles] for bundles in chosen] == [sizes] * ranks
    if sharing == "auto" and len(sizes) > 2:
        assert repr(chosen) == repr(choose_bundles(groups, ranks, 16384, "off", cost))
