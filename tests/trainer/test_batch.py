"""Advantages of a whole step, its updates, and shares of ranks that are about equal."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from trajectories import make_trajectory

from algos import ADVANTAGES, LOSSES
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import AdvantageOptions, Config
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TimeLedger
from asyncrl.trainer.aggregation import UpdateTotals, token_weights
from asyncrl.trainer.batch import check_segments, sequences_by_minibatch, share_batch
from asyncrl.trainer.lag_stats import staleness_metrics
from asyncrl.trainer.packing import pack
from asyncrl.trainer.splitting import distribute, split_evenly

STEP = 6
OTHER_NODE = [(50.0, 100, 0), (10.0, 100, 0), (7.0, 101, 0), (3.0, 101, 0)]
"""Rewards, group ids and staleness of another node."""
RESPONSES = ((4, 2), (3, 3, 5, 3), (1,) * 6)
"""Versions of the tokens of each response of a group."""
LOST = (0.0, 0.5, 1.0)
"""What they lose where at most 6 tokens are allowed, and all above 2 lose."""


class SecondOfTwoNodes(Cluster):
    """Node 1; nothing is sent."""

    def gather(self, value):
        return [OTHER_NODE, value]


def make_groups():
    """Groups of which two have an agent's trajectory of several segments."""
    groups = []
    for group_id in (3, 1, 2, 0):
        members = [make_trajectory(group_id, i, versions) for i, versions in enumerate(RESPONSES)]
        members = [replace(t, reward=float(group_id**2 + t.member)) for t in members]
        members[1] = replace(members[1], segment_lengths=((), (2, 3), (2, 2, 1), ())[group_id])
        groups.append(Group(group_id, tuple(members)))
    return groups


def updates_of(groups, step=STEP, cluster=None, **options):
    config = Config(groups_per_step=len(groups), group_size=3, max_response_tokens=6, **options)
    return sequences_by_minibatch(groups, config, cluster or Cluster(), step)


def by_all(rewards, group_ids, staleness):
    return rewards - rewards.mean() + 100 * group_ids + 1000 * staleness


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_every_segment_has_the_advantage_of_its_trajectory_by_the_step_of_all_nodes(
    monkeypatch, minibatches
):
    """What a reward loses by length is in the advantage alone. A lag is that of the oldest token."""
    monkeypatch.setitem(ADVANTAGES, "by all", by_all)
    cluster, groups = SecondOfTwoNodes(node=1, ranks_of_nodes=((0,), (1,))), make_groups()
    options = {"advantage": "by all", "advantage_options": AdvantageOptions(overlong_tokens=4)}
    updates = updates_of(groups, cluster=cluster, minibatches=minibatches, **options)
    by_id = {group.group_id: group.trajectories for group in groups}
    rewards = [t.reward - LOST[t.member] for members in by_id.values() for t in members]
    mean = np.mean([*rewards, *(reward for reward, *_ in OTHER_NODE)])
    for update in updates:
        order = list(dict.fromkeys(sequence.group_id for sequence in update))
        assert len(order) == 4 // minibatches
        assert minibatches > 1 or order == list(by_id)
        members = [t for group_id in order for t in by_id.pop(group_id)]
        segments = [(t, place) for t in members for place in t.segments]
        for sequence, (t, place) in zip(update, segments, strict=True):
            lag = STEP - 1 - min(RESPONSES[t.member])
            advantage = t.reward - LOST[t.member] - mean + 100 * t.group_id + 1000 * lag
            assert sequence.advantage == pytest.approx(advantage)
            assert sequence.reward == t.reward
            for name in ("tokens", "loss_mask", "behavior_logprobs", "policy_versions"):
                assert np.array_equal(getattr(sequence, name), getattr(t, name)[place])
    assert not by_id


def test_seed_and_step_decide_which_groups_a_minibatch_gets():
    def dealt(step, seed=0):
        updates = updates_of(make_groups() * 4, step, minibatches=2, seed=seed)
        return str([[sequence.group_id for sequence in update] for update in updates])

    assert dealt(step=1) == dealt(step=1)
    assert len({dealt(step, seed) for step in (1, 2, 3) for seed in (0, 1)}) == 6


class UnsentShares(Cluster):
    """The leader of a node of two ranks, which keeps all shares."""

    def scatter_on_node(self, shares):
        return shares


def test_a_leader_deals_its_updates_to_its_ranks_and_a_follower_has_nothing_to_deal():
    config = Config(
        groups_per_step=8, group_size=3, minibatches=2, max_prompt_tokens=2, max_response_tokens=10,
        max_tokens_per_microbatch=12,
    )  # fmt: skip
    groups = make_groups() * 2

    def split_over_ranks(sequences, num_ranks):
        return split_evenly(sequences[::-1], num_ranks)

    policy = SimpleNamespace(
        config=config,
        clock=TimeLedger(),
        module=SimpleNamespace(layout="row_each"),
        split_over_ranks=split_over_ranks,
        loss=LOSSES["grpo"],
    )
    cluster = UnsentShares(ranks_of_nodes=((0, 1),))
    shares = share_batch(groups, 3, policy, cluster)
    updates = sequences_by_minibatch(groups, config, cluster, 3)
    assert repr(shares) == repr(distribute(updates, 2, 12, "row_each", split_over_ranks))
    assert repr(shares) != repr(distribute(updates, 2, 12, "row_each"))
    assert policy.clock.take().spans[-1][0] == "gather"
    assert share_batch(None, 3, policy, cluster) is None


def test_a_users_advantage_that_is_not_finite_ends_in_a_line(tmp_path):
    (tmp_path / "mine.py").write_text("def f(rewards):\n    return rewards / 0.0")
    with pytest.raises(
        ValueError, match=r"mine\.py: .* finite tensor \[12\] .* it gave tensor\(\[inf, "
    ):
        updates_of(make_groups(), advantage=f"{tmp_path}/mine.py:f")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_a_trajectory_weighs_as_much_in_several_segments_as_in_one(aggregation):
    config = Config(loss_aggregation=aggregation, max_response_tokens=100)
    whole = replace(make_trajectory(0, 0, (0,) * 9), tokens=np.arange(10))
    loss_mask = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1, 1], dtype=bool)
    whole = replace(whole, loss_mask=loss_mask, reward=1.0)
    parts = replace(whole, segment_lengths=(3, 4, 3))
    (sequences,) = updates_of([Group(0, (whole, parts, whole))], advantage="reinforce")
    assert len(sequences) == 5
    # a micro-batch for each sequence, as their order is not that of trajectories
    batches = [pack([sequence], "short_rows") for sequence in sequences]
    counts = [(len(b.targets), b.num_sequences, b.num_trajectories) for b in batches]
    totals = UpdateTotals(*map(sum, zip(*counts, strict=True)))
    assert totals == pytest.approx((21, 5, 3))
    sums = [
        float(token_weights(batch.trained_in_trajectory, totals, config).sum()) for batch in batches
    ]
    each = 7 / 300 if aggregation == "constant" else 1 / 3
    assert [sums[0], sum(sums[1:4]), sums[4]] == pytest.approx([each] * 3)


def test_branches_of_an_agent_are_refused_by_what_needs_whole_responses():
    groups = make_groups()
    for config, name, refused in (
        (Config(), "grpo", ""),
        (Config(algo="gspo"), "gspo", "--algo gspo"),
        (Config(advantage="gae"), "grpo", "--advantage gae"),
    ):
        check_segments(groups[-1:], config, LOSSES[name])
        line = f"of --task addition has 3 segments, .* {refused} needs whole responses; take a loss"
        with pytest.raises(ValueError, match=line) if refused else nullcontext():
            check_segments(groups, config, LOSSES[name])


@pytest.mark.parametrize(("num_groups", "minibatches"), [(10, 4), (5, 2), (9, 4), (3, 4)])
def test_groups_that_do_not_divide_are_dealt_whole_and_minibatches_differ_by_one(
    num_groups, minibatches
):
    groups = [
        Group(i, tuple(replace(t, group_id=i) for t in group.trajectories))
        for i, group in enumerate((make_groups() * 3)[:num_groups])
    ]
    config = Config(group_size=3, max_response_tokens=6, minibatches=minibatches)
    updates = sequences_by_minibatch(groups, config, Cluster(), STEP)
    ids = [{sequence.group_id for sequence in update} for update in updates]
    assert len(updates) == minibatches and sum(map(len, ids)) == num_groups
    assert set.union(*ids) == {*range(num_groups)}
    assert max(map(len, ids)) - min(map(len, ids)) <= 1


@pytest.mark.usefixtures("one_rank")
def test_what_a_step_trains_on_is_counted_by_trajectory_also_what_the_loop_mixes_in():
    """The oldest token of an agent's trajectory is in a segment that is not its first."""
    late = make_trajectory(7, 0, (5, 5, 2))
    groups = make_groups()
    mixed = [*groups, groups[1], Group(7, (replace(late, segment_lengths=(2, 2)),))]
    policy = SimpleNamespace(
        config=Config(minibatches=2),
        clock=TimeLedger(),
        module=SimpleNamespace(layout="row_each"),
        split_over_ranks=split_evenly,
        loss=LOSSES["grpo"],
    )
    for batch in (groups, mixed):
        members = [t for group in batch for t in group.trajectories]
        tokens = [v for t in members for v in t.policy_versions.tolist() if v >= 0]
        staleness = [STEP - 1 - t.oldest_version for t in members]
        assert staleness_metrics(share_batch(batch, STEP, policy, Cluster()), STEP - 1) == {
            "tokens/forward": sum(len(t.tokens) for t in members),
            "samples": len(members),
            "staleness/mean": pytest.approx(np.mean(staleness)),
            "staleness/max": max(staleness),
            "staleness/token_mean": pytest.approx(STEP - 1 - np.mean(tokens)),
        }
    assert staleness_metrics([], 3) == {"tokens/forward": 0, "samples": 0}
