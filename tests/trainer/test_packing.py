import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import grouped_sequences, random_sequences

from trainer.attention import dense_mask
from trainer.batch import choose_bundles, distribute, split_into_microbatches
from trainer.packing import (
    TrainSequence,
    bundle,
    common_prefix,
    first_fit_decreasing,
    pack,
    token_weights,
)

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 5), st.integers(50, 200))
def test_a_split_holds_every_sequence_once_within_the_budget_and_equal_counts_on_all_ranks(lengths, ranks, budget):
    split = split_into_microbatches(lengths, ranks, budget)
    assert len(split) == ranks
    assert len({len(microbatches) for microbatches in split}) == 1
    assert sorted(i for rank in split for members in rank for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget for rank in split for members in rank)


@settings(deadline=None)
@given(LENGTHS.filter(bool), st.integers(1, 5))
def test_ranks_differ_by_at_most_the_longest_sequence(lengths, ranks):
    loads = [sum(lengths[i] for m in rank for i in m) for rank in split_into_microbatches(lengths, ranks, 10_000)]
    assert max(loads) - min(loads) <= max(lengths)


def test_more_ranks_than_sequences_leaves_some_with_an_empty_microbatch():
    assert split_into_microbatches([5], 3, 10) == [[[0]], [[]], [[]]]
    assert split_into_microbatches([], 2, 10) == [[], []]


def test_first_fit_decreasing_fills_gaps_with_short_items():
    assert first_fit_decreasing([3, 7, 4, 6], 10) == [[1, 0], [3, 2]]


def test_a_sequence_above_the_budget_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="sequence 1 has 11 tokens, and a micro-batch at most 10"):
        split_into_microbatches([3, 11], 1, 10)


def test_distribute_keeps_updates_apart():
    sequences = random_sequences(10)
    shares = distribute([sequences[:4], sequences[4:]], num_ranks=2, max_tokens=48)
    for update, expected in enumerate([sequences[:4], sequences[4:]]):
        held = [id(s) for rank in shares for microbatch in rank[update] for b in microbatch for s in b.sequences]
        assert sorted(held) == sorted(map(id, expected))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.booleans(), st.integers(0, 1000))
def test_packed_rows_hold_each_sequence_whole_and_point_at_the_token_before_each_target(num, one_row, seed):
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
        assert (positions[start : start + len(sequence.tokens)] == np.arange(len(sequence.tokens))).all()
        assert (source == start + places - 1).all()
        assert (batch.targets.numpy()[mine] == sequence.tokens[places]).all()
        assert (batch.behavior_logprobs.numpy()[mine] == sequence.behavior_logprobs[places]).all()
        assert (batch.policy_versions.numpy()[mine] == sequence.policy_versions[places]).all()
        assert batch.num_trained[s] == len(places) == sequence.num_trained


def test_short_rows_waste_little():
    sequences = random_sequences(200)
    batch = pack(bundle(sequences), one_row=False)
    assert sum(len(s.tokens) for s in sequences) / batch.input_ids.numel() > 0.9


def test_a_sequence_without_trained_tokens_is_read_but_not_numbered():
    a, b, c = random_sequences(3)
    silent = TrainSequence(b.tokens, np.zeros(len(b.tokens), bool), b.behavior_logprobs, b.policy_versions, 1.0, 1.0)
    batch = pack(bundle([a, silent, c]), one_row=False)
    assert batch.num_trained == (a.num_trained, c.num_trained)
    assert batch.sequence_ids.unique().tolist() == [0, 1]


def test_nothing_packs_into_a_sequence_of_two_tokens_to_read_and_none_to_train():
    batch = pack([], one_row=True)
    assert batch.input_ids.tolist() == [[0, 0]] and batch.position_ids.tolist() == [[0, 1]]
    assert batch.targets.shape == batch.sources.shape == (0,) and batch.num_read == 0


def test_a_trained_first_token_is_refused():
    one = np.ones(2, bool)
    sequence = TrainSequence(np.zeros(2, np.int64), one, np.zeros(2, np.float32), np.zeros(2, np.int32), 0, 0)
    with pytest.raises(RuntimeError, match="nothing predicts it"):
        pack(bundle([sequence]), True)


def test_token_weights_are_those_of_each_aggregation():
    lengths = [4, 1]  # of an update that has 10 tokens in 5 sequences, elsewhere included
    assert token_weights(lengths, "token_mean", 10, 5, 8) == [1 / 10, 1 / 10]
    assert token_weights(lengths, "sequence_mean", 10, 5, 8) == [1 / 20, 1 / 5]
    assert token_weights(lengths, "constant", 10, 5, 8) == [1 / 40, 1 / 40]
    with pytest.raises(ValueError, match="got 'median'"):
        token_weights(lengths, "median", 10, 5, 8)


# Shared prompts


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


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 12))
def test_a_shared_prompt_is_read_once_which_saves_the_papers_bound(prompt, response, group_size):
    bundles = bundle(make_group(0, prompt, [response] * group_size), share_prefix=True)
    batch = pack(bundles, one_row=False, share_prefix=True)
    assert batch.num_unshared == group_size * (prompt + response)
    assert batch.num_read == prompt + group_size * response == batch.input_ids.numel()
    in_blocks = pack(bundles, one_row=True, share_prefix=True).input_ids.shape
    assert in_blocks == (1, math.ceil(batch.num_read / 128) * 128)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 1000))
def test_what_predicts_a_token_of_a_shared_row_sees_exactly_the_tokens_before_it(groups, size, one_row, seed):
    sequences = grouped_sequences(groups, size, seed)
    batch = pack(bundle(sequences, True), one_row, share_prefix=True)
    mask = dense_mask(batch.segment_ids, batch.prefix_ids)[:, 0].numpy()
    found = 0
    for s, sequence in enumerate(sequences):
        for t in np.flatnonzero(sequence.loss_mask):
            row, column = divmod(int(batch.sources[found]), batch.input_ids.shape[1])
            seen = mask[row, column]
            assert batch.sequence_ids[found] == s and batch.targets[found] == sequence.tokens[t]
            assert batch.input_ids[row].numpy()[seen].tolist() == sequence.tokens[:t].tolist()
            assert batch.position_ids[row].numpy()[seen].tolist() == list(range(t))
            found += 1
    assert found == len(batch.targets)


def test_the_common_prefix_ends_where_members_differ_or_one_is_trained():
    a, b, c = make_group(0, 5, [2, 2, 2])
    other = TrainSequence(np.array([0, 1, 2, 9, 9, 9, 9]), *[getattr(a, f) for f in ("loss_mask", "behavior_logprobs")],
                          a.policy_versions, 1.0, 1.0, 0)  # fmt: skip
    silent = TrainSequence(b.tokens, np.zeros(7, bool), b.behavior_logprobs, b.policy_versions, 1.0, 1.0, 0)
    assert common_prefix([a, b, c]) == 5 and common_prefix([a, other]) == 3
    assert common_prefix([a, a]) == 5, "equal responses are two samples, not a prefix"
    assert common_prefix([silent, silent]) == 7


def test_sequences_without_a_group_or_a_common_first_token_pack_as_without_sharing():
    no_group = random_sequences(9)
    no_prefix = [TrainSequence(s.tokens, *list(vars(s).values())[1:6], group_id=0) for s in no_group]
    assert len({s.tokens[0] for s in no_prefix}) > 1
    plain = pack(bundle(no_group), one_row=False)
    for sequences in (no_group, no_prefix):
        shared = pack(bundle(sequences, share_prefix=True), one_row=False, share_prefix=True)
        for name in ("input_ids", "position_ids", "sources", "targets", "sequence_ids"):
            assert getattr(shared, name).equal(getattr(plain, name)), name


@settings(deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 5), st.integers(40, 120), st.booleans(), st.integers(0, 1000)
)
def test_shared_groups_are_dealt_whole_or_cut_and_packed_as_they_were_counted(groups, size, ranks, budget, rows, seed):
    sequences = grouped_sequences(groups, size, seed)
    shares = distribute([sequences], ranks, budget, share_prefix=True, one_row=rows)
    held = [id(s) for rank in shares for microbatch in rank[0] for b in microbatch for s in b.sequences]
    assert sorted(held) == sorted(map(id, sequences))
    assert len({len(rank[0]) for rank in shares}) == 1
    read = [sum(pack(m, rows, share_prefix=True).num_read for m in rank[0]) for rank in shares]
    bundles = choose_bundles(sequences, ranks, budget, True, rows)
    assert read == [sum(b.num_tokens for m in rank[0] for b in m) for rank in shares]
    assert sum(read) == sum(b.num_tokens for b in bundles)
    assert max(read) - min(read) <= max(b.num_tokens for b in bundles)
    assert all(pack(m, rows, share_prefix=True).num_read <= budget for rank in shares for m in rank[0])


def test_a_group_is_cut_only_as_far_as_the_budget_and_the_ranks_ask():
    two_groups = [*make_group(0, 10, [5] * 8), *make_group(1, 10, [5] * 8)]
    chosen = {ranks: choose_bundles(two_groups, ranks, 1000, True, one_row=True) for ranks in (1, 2, 4)}
    assert {ranks: [len(b.sequences) for b in bundles] for ranks, bundles in chosen.items()} == {
        1: [8, 8],
        2: [8, 8],
        4: [4, 4, 4, 4],
    }
    assert [len(b.sequences) for b in bundle(two_groups, True, max_tokens=26)] == [3, 3, 2] * 2
    assert [b.num_tokens for b in bundle(two_groups[:8], True, max_tokens=26)] == [25, 25, 20]
    assert [b.num_tokens for b in bundle(two_groups[:2], True, max_tokens=3)] == [15, 15]


def test_dense_attention_gets_whole_groups_of_long_prompts_and_single_sequences_of_long_responses():
    def members_in_a_row(prompt, response, one_row):
        bundles = choose_bundles(make_group(0, prompt, [response] * 8), 1, 16384, True, one_row)
        return max(len(b.sequences) for b in bundles)

    assert members_in_a_row(256, 32, one_row=False) == members_in_a_row(256, 32, one_row=True) == 8
    assert members_in_a_row(16, 256, one_row=False) == 1 and members_in_a_row(16, 256, one_row=True) == 8
