"""Shares of ranks that are about equal, in micro-batches within the budget."""

import functools
import itertools
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packing import GROUPS, LAYOUTS, TREES, make_group, sequences_in

from asyncrl.config import Sharing
from asyncrl.trainer.attention import dense_cost
from asyncrl.trainer.dealing import choose_bundles, distribute, fill_microbatches
from asyncrl.trainer.packing import bundle

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
    with pytest.raises(RuntimeError, match=r"^11 tokens are put into micro-batches of 10$"):
        fill_microbatches(bundle(make_group(6, [5])), 10, "one_row")


@pytest.mark.parametrize("responses", [(3, 3, 7), (8, 2, 2, 2)])
def test_the_longest_are_dealt_first_each_to_the_rank_with_the_fewest_tokens(responses):
    bundles_of_ranks = choose_bundles(make_group(1, responses), 2, 100, "off", cost=sum)
    loads = [sum(b.num_tokens for b in bundles) for bundles in bundles_of_ranks]
    assert loads == [(sum(responses) + len(responses)) / 2] * 2


@pytest.mark.parametrize(
    ("sharing", "cost", "ranks", "prompt", "response", "sizes"),
    [
        # groups are cut only as far as the ranks ask
        ("prompt", sum, 1, 10, 5, [8, 8]),
        ("prompt", sum, 2, 10, 5, [8]),
        ("prompt", sum, 4, 10, 5, [4]),
        # a dense mask costs less for whole groups of long prompts and for single sequences of long responses
        ("prompt", dense_of_64, 1, 256, 32, [8, 8]),
        ("prompt", dense_of_64, 1, 16, 256, [1] * 16),
        ("prompt", sum, 1, 16, 256, [8, 8]),
        # a shared prompt saves 5 % of 8 responses of 256 tokens, and 18 % of 8 of 64
        ("auto", dense_of_64, 1, 256, 32, [8, 8]),
        ("auto", dense_of_64, 1, 16, 256, [1] * 16),
        ("auto", sum, 1, 16, 256, [1] * 16),
        ("auto", sum, 1, 16, 64, [8, 8]),
    ],
)
def test_groups_are_read_together_as_far_as_it_costs_less(
    sharing, cost, ranks, prompt, response, sizes
):
    """`auto` shares what saves a tenth, and else deals as off does."""
    groups = [*make_group(prompt, [response] * 8, 0), *make_group(prompt, [response] * 8, 1)]
    chosen = choose_bundles(groups, ranks, 16384, sharing, cost)
    assert [[len(b.sequences) for b in bundles] for bundles in chosen] == [sizes] * ranks
    if sharing == "auto" and len(sizes) > 2:
        assert repr(chosen) == repr(choose_bundles(groups, ranks, 16384, "off", cost))
