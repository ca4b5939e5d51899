"""Shares of ranks that are about equal, in micro-batches within the budget."""

import functools
import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import GROUPS, TREES, make_group, sequences_in
from tiny_policy import make_sequence

from asyncrl.trainer.attention import dense_cost
from asyncrl.trainer.dealing import choose_bundles, distribute, fill_microbatches
from asyncrl.trainer.packing import Layout, bundle

dense_of_64 = functools.partial(dense_cost, hidden_size=64)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(GROUPS | TREES, max_size=2),
    st.integers(1, 5),
    st.integers(75, 160),
    st.sampled_from(get_args(Layout)),
    st.sampled_from(("off", "prompt", "tree", "auto")),
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


@pytest.mark.parametrize("layout", get_args(Layout))
def test_a_sequence_above_the_budget_is_refused(layout):
    with pytest.raises(RuntimeError, match=r"^11 tokens are put into micro-batches of 10$"):
        fill_microbatches(bundle(make_group(6, [5])), 10, layout)


@pytest.mark.parametrize("lengths", [(4, 4, 8), (9, 3, 3, 3)])
def test_the_longest_are_dealt_first_each_to_the_rank_with_the_fewest_tokens(lengths):
    rng = np.random.default_rng(0)
    sequences = [make_sequence(rng, np.arange(num), np.arange(num) > 0) for num in lengths]
    bundles_of_ranks = choose_bundles(sequences, 2, 100, "off", cost=sum)
    loads = [sum(b.num_tokens for b in bundles) for bundles in bundles_of_ranks]
    assert loads == [sum(lengths) / 2] * 2


def sizes_of(bundles_of_ranks):
    return [[len(b.sequences) for b in bundles] for bundles in bundles_of_ranks]


@pytest.mark.parametrize(("ranks", "sizes"), [(1, [[8, 8]]), (2, [[8]] * 2), (4, [[4]] * 4)])
def test_groups_are_cut_only_as_far_as_the_ranks_ask(ranks, sizes):
    groups = [*make_group(10, [5] * 8, 0), *make_group(10, [5] * 8, 1)]
    assert sizes_of(choose_bundles(groups, ranks, 1000, "prompt", cost=sum)) == sizes


def test_dense_attention_gets_whole_groups_of_long_prompts_and_single_sequences_of_long_responses():
    sizes = {}
    for prompt, response in ((256, 32), (16, 256)):
        for cost in (dense_of_64, sum):
            group = make_group(prompt, [response] * 8)
            sizes[prompt, cost] = sizes_of(choose_bundles(group, 1, 16384, "prompt", cost))
    assert sizes == {
        (256, dense_of_64): [[8]],
        (256, sum): [[8]],
        (16, dense_of_64): [[1] * 8],
        (16, sum): [[8]],
    }


@pytest.mark.parametrize(
    ("prompt", "response", "cost", "sizes"),
    [
        (256, 32, dense_of_64, [8]),
        (16, 256, dense_of_64, [1] * 8),
        (16, 256, sum, [1] * 8),
        (16, 64, sum, [8]),
    ],
)
def test_auto_shares_what_costs_less_by_a_tenth_and_else_deals_as_off_does(
    prompt, response, cost, sizes
):
    """A shared prompt of 16 tokens saves 5 % of 8 responses of 256 tokens, and 18 % of 8 of 64."""
    group = make_group(prompt, [response] * 8)
    chosen = choose_bundles(group, 1, 16384, "auto", cost)
    assert sizes_of(chosen) == [sizes]
    if len(sizes) > 1:
        assert repr(chosen) == repr(choose_bundles(group, 1, 16384, "off", cost))
