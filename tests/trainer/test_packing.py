"""Rows in which every token sees what precedes it in its sequence, and bundles that read as few tokens as they may."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_trainer import distinct_prefixes
from tiny_policy import grouped_sequences, make_sequence, random_sequences, random_tree

from asyncrl.trainer.attention import dense_mask
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
    fields = {
        "targets": "tokens",
        "behavior_logprobs": "behavior_logprobs",
        "policy_versions": "policy_versions",
        "advantages": "advantage",
        "rewards": "reward",
        "lengths": "num_trained",
    }
    columns = {
        name: [np.broadcast_to(getattr(s, field), s.tokens.shape)[s.loss_mask] for s in trained]
        for name, field in fields.items()
    }
    columns["sequence_ids"] = [np.full(s.num_trained, number) for number, s in enumerate(trained)]
    for name, rows in columns.items():
        expected = np.concatenate([np.zeros(0), *rows])
        np.testing.assert_allclose(getattr(batch, name).numpy(), expected, rtol=1e-6)
    assert batch.num_sequences == len(trained)
    assert batch.advantages.dtype == batch.rewards.dtype == torch.float32
    assert batch.behavior_logprobs.dtype == torch.float32


def make_group(prompt, responses, group_id=0):
    """A sequence for each response, of the lengths given, to the prompt of a group, of `prompt` tokens."""
    rng = np.random.default_rng(0)
    sequences = []
    for number, length in enumerate(responses):
        tokens = np.concatenate([np.arange(prompt), np.full(length, 1000 + number)])
        tokens += 10_000 * group_id
        mask = np.arange(len(tokens)) >= prompt
        sequences.append(make_sequence(rng, tokens, mask, group_id))
    return sequences


def test_first_fit_decreasing_fills_gaps_with_short_items():
    assert first_fit_decreasing([3, 7, 4, 6], 10) == [[1, 0], [3, 2]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_packs_into_a_sequence_of_two_tokens_to_read_and_none_to_train(layout):
    batch = pack([], layout)
    assert batch.input_ids.tolist() == [[0, 0]] and batch.position_ids.tolist() == [[0, 1]]
    assert_columns(batch, [])


def test_a_trained_first_token_is_refused():
    sequence = make_sequence(np.random.default_rng(0), np.zeros(2, np.int64), np.ones(2, bool))
    with pytest.raises(RuntimeError, match=r"the first of 2 tokens .*nothing predicts it"):
        pack(bundle([sequence]), "one_row")
