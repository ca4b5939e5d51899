import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import grouped_sequences, random_sequences, random_tree

from asyncrl.config import Config
from asyncrl.trainer.attention import dense_cost, dense_mask
from asyncrl.trainer.batch import choose_bundles, distribute
from asyncrl.trainer.packing import (
    TrainSequence,
    UpdateTotals,
    bundle,
    common_prefix,
    first_fit_decreasing,
    pack,
    token_weights,
)

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


def sequences_of_lengths(lengths):
    """Sequences of which only the lengths matter."""
    arrays = [np.arange(length) for length in lengths]
    return [TrainSequence(array, array > 0, array, array, 0.0, 0.0) for array in arrays]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(50, 200))
def test_a_split_holds_every_sequence_once_within_the_budget(lengths, ranks, budget):
    sequences = sequences_of_lengths(lengths)
    shares = distribute([sequences], ranks, budget)
    assert len(shares) == ranks
    microbatches = [microbatch for (rank,) in shares for microbatch in rank]
    held = [id(b.sequences[0]) for microbatch in microbatches for b in microbatch]
    assert sorted(held) == sorted(map(id, sequences))
    assert all(sum(b.num_tokens for b in microbatch) <= budget for microbatch in microbatches)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 5))
def test_ranks_differ_by_at_most_the_longest_sequence(lengths, ranks):
    shares = distribute([sequences_of_lengths(lengths)], ranks, 10_000)
    loads = [sum(b.num_tokens for microbatch in rank for b in microbatch) for (rank,) in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_first_fit_decreasing_fills_gaps_with_short_items():
    assert first_fit_decreasing([3, 7, 4, 6], 10) == [[1, 0], [3, 2]]


def test_distribute_keeps_updates_apart():
    sequences = random_sequences(10)
    shares = distribute([sequences[:4], sequences[4:]], num_ranks=2, max_tokens=48)
    for update, expected in enumerate([sequences[:4], sequences[4:]]):
        held = [
            id(s)
            for rank in shares
            for microbatch in rank[update]
            for b in microbatch
            for s in b.sequences
        ]
        assert sorted(held) == sorted(map(id, expected))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.booleans(), st.integers(0, 1000))
def test_packed_rows_hold_each_sequence_whole_and_point_at_the_token_before_each_target(
    num, one_row, seed
):
    sequences = random_sequences(num, seed)
    batch = pack(bundle(sequences), one_row)
    assert batch.input_ids.shape[0] == 1 or not one_row
    assert batch.input_ids.shape[1] == (sum if one_row else max)(len(s.tokens) for s in sequences)
    ids, positions = batch.input_ids.flatten().numpy(), batch.position_ids.flatten().numpy()
    for s, sequence in enumerate(sequences):
        places = np.flatnonzero(sequence.loss_mask)
        mine = batch.sequence_ids.numpy() == s
        source = batch.sources.numpy()[mine]
        start = source[0] - positions[source[0]]
        assert (ids[start : start + len(sequence.tokens)] == sequence.tokens).all()
        assert (
            positions[start : start + len(sequence.tokens)] == np.arange(len(sequence.tokens))
        ).all()
        assert (source == start + places - 1).all()
        assert (batch.targets.numpy()[mine] == sequence.tokens[places]).all()
        assert (batch.behavior_logprobs.numpy()[mine] == sequence.behavior_logprobs[places]).all()
        assert (batch.policy_versions.numpy()[mine] == sequence.policy_versions[places]).all()
        assert set(batch.lengths[batch.sequence_ids == s].tolist()) == {sequence.num_trained}


def test_short_rows_waste_little():
    sequences = random_sequences(200)
    batch = pack(bundle(sequences), one_row=False)
    assert sum(len(s.tokens) for s in sequences) / batch.input_ids.numel() > 0.9


def test_a_sequence_without_trained_tokens_is_read_but_not_numbered():
    a, b, c = random_sequences(3)
    silent = TrainSequence(
        b.tokens, np.zeros(len(b.tokens), bool), b.behavior_logprobs, b.policy_versions, 1.0, 1.0
    )
    batch = pack(bundle([a, silent, c]), one_row=False)
    assert batch.sequence_ids.bincount().tolist() == [a.num_trained, c.num_trained]
    assert batch.num_sequences == 2


def test_nothing_packs_into_a_sequence_of_two_tokens_to_read_and_none_to_train():
    batch = pack([], one_row=True)
    assert batch.input_ids.tolist() == [[0, 0]] and batch.position_ids.tolist() == [[0, 1]]
    assert batch.targets.shape == batch.sources.shape == (0,)


def test_a_trained_first_token_is_refused():
    one = np.ones(2, bool)
    sequence = TrainSequence(
        np.zeros(2, np.int64), one, np.zeros(2, np.float32), np.zeros(2, np.int32), 0, 0
    )
    with pytest.raises(RuntimeError, match="nothing predicts it"):
        pack(bundle([sequence]), True)


def test_token_weights_are_those_of_each_aggregation():
    lengths = torch.tensor(
        [4, 1]
    )  # of an update that has 10 tokens in 5 sequences, elsewhere included
    totals = UpdateTotals(tokens=10, sequences=5)
    expected = {
        "token_mean": [1 / 10, 1 / 10],
        "sequence_mean": [1 / 20, 1 / 5],
        "constant": [1 / 40, 1 / 40],
    }
    for aggregation, weights in expected.items():
        config = Config(loss_aggregation=aggregation, max_response_tokens=8)
        assert torch.equal(token_weights(lengths, totals, config), torch.tensor(weights))


# Shared prefixes

SHARING = ("prompt", "tree")


def from_1(sequences):
    """With tokens from 1 on."""
    return [replace(s, tokens=s.tokens + 1) for s in sequences]


TREES = st.builds(
    random_tree, st.integers(1, 14), st.integers(0, 10_000), st.integers(1, 3), st.integers(0, 4)
)
TREES = TREES.map(from_1)
GROUPS = st.builds(
    grouped_sequences, st.integers(1, 6), st.integers(1, 5), st.integers(0, 1000)
).map(from_1)


def make_group(group_id, prompt, responses):
    """A sequence per response, of the lengths given, all tokens trained, to one prompt of `prompt` tokens."""
    return [
        TrainSequence(
            tokens=np.concatenate([np.arange(prompt), np.full(length, 1000 + i)]),
            loss_mask=np.arange(prompt + length) >= prompt,
            behavior_logprobs=np.zeros(prompt + length, np.float32),
            policy_versions=np.zeros(prompt + length, np.int32),
            advantage=1.0,
            reward=1.0,
            group_id=group_id,
        )
        for i, length in enumerate(responses)
    ]


def of_text(text, group_id=0):
    """A sequence of a token per letter, capitals trained."""
    lower, num = text.lower(), len(text)
    tokens, mask = np.array([ord(c) for c in lower]), np.array([c.isupper() for c in text])
    return TrainSequence(
        tokens, mask, np.zeros(num, np.float32), np.zeros(num, np.int32), 1.0, 1.0, group_id
    )


def nodes_of(sequences):
    """The tokens of the trie of sequences, each named by all that leads to it."""
    return {tuple(s.tokens[: t + 1]) for s in sequences for t in range(len(s.tokens))}


def num_read(batch):
    """Tokens in the rows, of which none is 0 as padding is."""
    return int((batch.input_ids != 0).sum())


def sequences_of(bundles):
    """The sequences of bundles, in the order in which pack lists them."""
    return [s for b in bundles for s in b.sequences]


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 12), st.sampled_from(SHARING))
def test_a_shared_prompt_is_read_once_which_saves_the_papers_bound(
    prompt, response, group_size, sharing
):
    bundles = bundle(make_group(0, prompt, [response] * group_size), sharing)
    batch = pack(bundles, one_row=False, share_prefix=sharing)
    ((one,), read) = bundles, prompt + group_size * response
    assert one.num_tokens + sum(one.shared) == group_size * (prompt + response)
    assert one.num_tokens == one.num_distinct == read == batch.input_ids.numel()
    in_blocks = pack(bundles, one_row=True, share_prefix=sharing).input_ids.shape
    assert in_blocks == (1, math.ceil(read / 128) * 128)


@settings(max_examples=60, deadline=None)
@given(
    GROUPS | TREES, st.booleans(), st.sampled_from(SHARING), st.just(math.inf) | st.integers(20, 60)
)
def test_what_predicts_a_token_of_a_shared_row_sees_exactly_the_tokens_before_it(
    given_, one_row, sharing, budget
):
    bundles = bundle(given_, sharing, budget)
    batch, sequences = (
        pack(bundles, one_row, sharing),
        [s for s in sequences_of(bundles) if s.num_trained],
    )
    mask = dense_mask(batch.visible_until)[:, 0].numpy()
    found = 0
    for s, sequence in enumerate(sequences):
        for t in np.flatnonzero(sequence.loss_mask):
            row, column = divmod(int(batch.sources[found]), batch.input_ids.shape[1])
            seen = mask[row, column]
            assert batch.sequence_ids[found] == s and batch.targets[found] == sequence.tokens[t]
            assert batch.behavior_logprobs[found] == sequence.behavior_logprobs[t]
            assert batch.input_ids[row].numpy()[seen].tolist() == sequence.tokens[:t].tolist()
            assert batch.position_ids[row].numpy()[seen].tolist() == list(range(t))
            found += 1
    assert found == len(batch.targets)


@settings(max_examples=60, deadline=None)
@given(TREES, st.just(math.inf) | st.integers(20, 60))
def test_in_a_tree_every_token_sees_its_ancestors_and_no_other(sequences, budget):
    """Each column's path is found by itself, from parents: the nearest column to the left that is one less deep."""
    bundles = bundle(sequences, "tree", budget)
    assert sorted(map(id, sequences_of(bundles))) == sorted(map(id, sequences))
    for chosen in bundles:
        batch = pack([chosen], one_row=False, share_prefix="tree")
        mask, depths = dense_mask(batch.visible_until)[0, 0].numpy(), batch.position_ids[0].tolist()
        paths = []
        for column, depth in enumerate(depths):
            above = next((c for c in reversed(range(column)) if depths[c] == depth - 1), None)
            paths.append([*([] if above is None else paths[above]), column])
            assert (
                np.flatnonzero(mask[column]).tolist() == paths[-1] and len(paths[-1]) == depth + 1
            )
        read = [tuple(batch.input_ids[0, path].tolist()) for path in paths]
        assert len(set(read)) == len(read) and set(read) == nodes_of(chosen.sequences), (
            "each is read once"
        )


@settings(deadline=None)
@given(GROUPS | TREES, st.integers(20, 60))
def test_a_whole_tree_has_the_tokens_that_are_distinct_which_every_way_to_read_it_counts(
    sequences, budget
):
    distinct = len(nodes_of(sequences))
    assert sum(b.num_tokens for b in bundle(sequences, "tree")) == distinct
    lengths = []
    for sharing, limit in itertools.product(("off", *SHARING), (math.inf, budget)):
        bundles = bundle(sequences, sharing, limit)
        batch = pack(bundles, one_row=True, share_prefix=sharing)
        assert sum(b.num_distinct for b in bundles) == distinct
        assert (batch.visible_until is None) == (sharing == "off")
        lengths.append(num_read(batch))
        assert lengths[-1] == sum(b.num_tokens for b in bundles)
    off, off_again, prompt, prompt_cut, tree, tree_cut = lengths
    assert (
        tree <= prompt <= off == off_again == sum(len(s.tokens) for s in sequences)
        and tree <= tree_cut
        and prompt <= prompt_cut <= off
    )


def test_turns_equal_beginnings_repetitions_and_groups_share_in_a_tree_and_prompts_alone_by_group():
    """`system` before two prompts; a game of two turns that parts in the second; a response that another goes on from;
    two equal ones."""
    texts = ["sysaONEobsTWO", "sysaONEobsTEN", "sysaONE", "sysaXY", "sysaXY"]
    sequences = [
        *(of_text(text, 0) for text in texts),
        *(of_text("sysb" + text, 1) for text in ("ONE", "OFF")),
    ]
    ((tree,), prompts) = bundle(sequences, "tree"), bundle(sequences, "prompt")
    assert tree.num_tokens == len("sysa" + "ONEobsTWO" + "EN" + "XY" + "b" + "ONE" + "FF")
    assert ["".join(map(chr, s.tokens)) for s in tree.sequences[:3]] == [
        "sysaone",
        "sysaoneobsten",
        "sysaoneobstwo",
    ]
    assert [len(b.sequences) for b in prompts] == [5, 2]
    assert [b.num_tokens for b in prompts] == [
        len("sysa" + "ONEobsTWO" + "ONEobsTEN" + "ONE" + "XY" + "XY"),
        10,
    ]
    batch = pack([tree], one_row=False, share_prefix="tree")
    assert len(batch.targets) == sum(s.num_trained for s in sequences), (
        "listed once for each branch"
    )
    pairs = {(int(a), int(b)) for a, b in zip(batch.sources, batch.targets, strict=True)}
    assert len(pairs) == len("ONE" + "TWO" + "EN" + "XY" + "ONE" + "FF"), "and computed once"


def test_the_common_prefix_of_prompts_ends_where_members_differ_or_one_is_trained():
    a, b, c = make_group(0, 5, [2, 2, 2])
    other = TrainSequence(np.array([0, 1, 2, 9, 9, 9, 9]), *[getattr(a, f) for f in ("loss_mask", "behavior_logprobs")],
                          a.policy_versions, 1.0, 1.0, 0)  # fmt: skip
    silent = TrainSequence(
        b.tokens, np.zeros(7, bool), b.behavior_logprobs, b.policy_versions, 1.0, 1.0, 0
    )
    of_another = make_group(1, 5, [2])[0]
    assert common_prefix(a, b, "prompt") == 5 and common_prefix(a, other, "prompt") == 3
    assert common_prefix(a, a, "prompt") == 5, "equal responses are two samples, not a prefix"
    assert (
        common_prefix(silent, silent, "prompt") == 7 and common_prefix(a, of_another, "prompt") == 0
    )
    assert (common_prefix(b, c), common_prefix(a, a), common_prefix(a, of_another)) == (5, 7, 7)


def test_sequences_without_a_group_or_a_common_first_token_pack_as_without_sharing():
    no_group = random_sequences(9)
    firsts = np.arange(9) + 100
    no_prefix = [
        TrainSequence(
            np.concatenate([[first], s.tokens[1:]]), *list(vars(s).values())[1:6], group_id=0
        )
        for first, s in zip(firsts, no_group, strict=True)
    ]
    for sequences, sharing in ((no_group, "prompt"), (no_prefix, "prompt"), (no_prefix, "tree")):
        bundles = bundle(sequences, sharing)
        shared, plain = pack(bundles, False, sharing), pack(bundle(sequences_of(bundles)), False)
        assert all(len(b.sequences) == 1 for b in bundles)
        for name in ("input_ids", "position_ids", "sources", "targets", "sequence_ids"):
            assert getattr(shared, name).equal(getattr(plain, name)), name


@settings(deadline=None)
@given(
    GROUPS | TREES, st.integers(1, 5), st.integers(75, 160), st.booleans(), st.sampled_from(SHARING)
)
def test_trees_are_dealt_whole_or_cut_and_packed_as_they_were_counted(
    sequences, ranks, budget, rows, sharing
):
    cost = sum if rows else functools.partial(dense_cost, hidden_size=64)
    shares = distribute([sequences], ranks, budget, sharing, cost)
    held = [id(s) for rank in shares for microbatch in rank[0] for s in sequences_of(microbatch)]
    assert sorted(held) == sorted(map(id, sequences))
    read = [sum(num_read(pack(m, rows, sharing)) for m in rank[0]) for rank in shares]
    bundles = sum(choose_bundles(sequences, ranks, budget, sharing, cost), [])
    assert read == [sum(b.num_tokens for m in rank[0] for b in m) for rank in shares]
    assert sum(read) == sum(b.num_tokens for b in bundles)
    assert max(read) - min(read) <= max(b.num_tokens for b in bundles)
    assert all(num_read(pack(m, rows, sharing)) <= budget for rank in shares for m in rank[0])


def test_a_group_is_cut_only_as_far_as_the_budget_and_the_ranks_ask():
    two_groups = [*make_group(0, 10, [5] * 8), *make_group(1, 10, [5] * 8)]
    chosen = {
        ranks: sum(choose_bundles(two_groups, ranks, 1000, "prompt", cost=sum), [])
        for ranks in (1, 2, 4)
    }
    assert {ranks: [len(b.sequences) for b in bundles] for ranks, bundles in chosen.items()} == {
        1: [8, 8],
        2: [8, 8],
        4: [4, 4, 4, 4],
    }
    assert [len(b.sequences) for b in bundle(two_groups, "prompt", max_tokens=26)] == [3, 3, 2] * 2
    assert [b.num_tokens for b in bundle(two_groups[:8], "prompt", max_tokens=26)] == [25, 25, 20]
    assert [b.num_tokens for b in bundle(two_groups[:2], "prompt", max_tokens=3)] == [15, 15]


def test_a_tree_is_cut_at_its_trunk_before_its_twigs():
    """Of `trunk` and three branches with two twigs each, twigs stay together, as what they share is deepest."""
    sequences = [of_text(f"trunk{branch * 4}{twig}") for branch in "xyz" for twig in "AB"]
    bundles = bundle(sequences, "tree", max_tokens=17)  # 5 of the trunk, and two branches of 6
    assert [b.num_tokens for b in bundles] == [17, 11]
    assert [["".join(map(chr, s.tokens[5:])) for s in b.sequences] for b in bundles] == [
        ["xxxxa", "xxxxb", "yyyya", "yyyyb"],
        ["zzzza", "zzzzb"],
    ]


def fewest_tokens(sequences, budget):
    """The least that any partition into parts within the budget reads, by trying them all."""

    def partitions(items):
        if not items:
            yield []
            return
        for rest in partitions(items[1:]):
            yield [[items[0]], *rest]
            for i in range(len(rest)):
                yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]

    nodes = [nodes_of([s]) for s in sequences]
    sizes = {}

    def size(part):
        key = tuple(part)
        if key not in sizes:
            sizes[key] = len(set().union(*(nodes[i] for i in part)))
        return sizes[key]

    return min(
        sum(map(size, parts))
        for parts in partitions(list(range(len(sequences))))
        if all(size(part) <= budget for part in parts)
    )


def random_branches(rng):
    """3 to 8 sequences of which most leave an earlier one at a random depth, with up to 19 tokens of their own."""
    sequences = []
    for i in range(rng.integers(3, 9)):
        tokens = np.full(rng.integers(1, 20), i)
        if sequences and rng.random() < 0.85:
            earlier = sequences[rng.integers(len(sequences))].tokens
            tokens = np.concatenate([earlier[: rng.integers(1, len(earlier) + 1)], tokens])
        sequences.append(replace(of_text("a"), tokens=tokens))
    return sequences


def test_a_greedy_cut_reads_at_most_a_tenth_more_than_the_best_partition_and_mostly_as_much():
    rng, ratios = np.random.default_rng(0), []
    for _ in range(300):
        sequences = random_branches(rng)
        longest, whole = max(len(s.tokens) for s in sequences), len(nodes_of(sequences))
        budget = int(rng.integers(longest, max(longest + 1, whole)))
        bundles = bundle(sequences, "tree", budget)
        assert max(b.num_tokens for b in bundles) <= budget
        ratios.append(sum(b.num_tokens for b in bundles) / fewest_tokens(sequences, budget))
    assert min(ratios) == 1 and max(ratios) < 1.1 and np.mean(np.array(ratios) == 1) > 0.98


def test_dense_attention_gets_whole_groups_of_long_prompts_and_single_sequences_of_long_responses():
    def members_in_a_row(prompt, response, cost):
        (bundles,) = choose_bundles(make_group(0, prompt, [response] * 8), 1, 16384, "prompt", cost)
        return max(len(b.sequences) for b in bundles)

    dense = functools.partial(dense_cost, hidden_size=64)
    assert members_in_a_row(256, 32, dense) == members_in_a_row(256, 32, sum) == 8
    assert members_in_a_row(16, 256, dense) == 1 and members_in_a_row(16, 256, sum) == 8
