"""Advantages of a whole step, its updates, and shares of ranks that are about equal."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from trajectories import make_group as make_trajectories
from trajectories import make_trajectory

from algos import ADVANTAGES
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import AdvantageOptions, Config
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TrainerClock
from asyncrl.trainer.batch import deal, make_updates
from asyncrl.trainer.dealing import distribute

OTHER_NODE = [(50.0, 100, 0), (10.0, 100, 0), (7.0, 101, 0), (3.0, 101, 0)]
"""Rewards, group ids and lags of another node."""


class SecondOfTwoNodes(Cluster):
    """Node 1; nothing is sent."""

    def gather(self, value):
        return [OTHER_NODE, value]


def updates_of(groups, *, cluster=None, step=1, **options):
    config = Config(groups_per_step=len(groups), group_size=len(groups[0].trajectories), **options)
    return make_updates(groups, config, cluster or Cluster(), step)


def ids_of(updates):
    return [[sequence.group_id for sequence in update] for update in updates]


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce"])
def test_every_trajectory_gets_its_own_advantage_by_the_rewards_of_all_nodes(
    advantage, minibatches
):
    rewards = {group_id: (float(group_id), 2.0 * group_id + 1) for group_id in range(4)}
    groups = [make_trajectories(group_id, pair) for group_id, pair in rewards.items()]
    cluster = SecondOfTwoNodes(node=1, ranks_of_nodes=((0,), (1,)))
    options = {"minibatches": minibatches, "advantage": advantage}
    updates = updates_of(groups, cluster=cluster, step=3, **options)
    sequences = [sequence for update in updates for sequence in update]
    step = np.array([*(reward for reward, *_ in OTHER_NODE), *sum(rewards.values(), ())])
    assert len(updates) == minibatches and len(sequences) == 8
    for sequence in sequences:
        baseline, scale = np.mean(rewards[sequence.group_id]), 1.0
        if advantage == "reinforce":
            baseline, scale = step.mean(), step.std(ddof=1)
        expected = (sequence.reward - baseline) / scale
        assert sequence.advantage == pytest.approx(expected, rel=1e-5)


def branched(group):
    """The group with one, two or three segments in its first trajectory."""
    first, *others = group.trajectories
    lengths = ((), (1, 2), (1, 1, 1))[group.group_id % 3]
    first = replace(first, tokens=np.arange(3), segment_lengths=lengths)
    return replace(group, trajectories=(first, *others))


def test_one_minibatch_keeps_the_order_of_the_groups_and_all_that_was_sampled_in_each_segment():
    groups = [branched(make_trajectories(group_id, (0.0, 1.0))) for group_id in (3, 1, 2)]
    (update,) = updates_of(groups, advantage="dr_grpo")
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    segments = [(trajectory, place) for trajectory in trajectories for place in trajectory.segments]
    for sequence, (trajectory, place) in zip(update, segments, strict=True):
        assert (sequence.group_id, sequence.reward) == (trajectory.group_id, trajectory.reward)
        assert sequence.advantage == trajectory.reward - 0.5
        for name in ("tokens", "loss_mask", "behavior_logprobs", "policy_versions"):
            assert np.array_equal(getattr(sequence, name), getattr(trajectory, name)[place])


def test_minibatches_get_whole_groups_once_in_an_order_that_seed_and_step_decide():
    groups = [branched(make_trajectories(group_id, (0.0, 1.0))) for group_id in range(8)]

    def dealt(step, seed=0):
        return ids_of(updates_of(groups, step=step, minibatches=2, seed=seed))

    groups_of_updates = [list(dict.fromkeys(update)) for update in dealt(step=1)]
    assert list(map(len, groups_of_updates)) == [4, 4]
    assert sorted(itertools.chain(*groups_of_updates)) == list(range(8))
    assert dealt(step=1) == dealt(step=1)
    assert len({str(dealt(step, seed)) for step in (1, 2, 3) for seed in (0, 1)}) == 6


def test_what_a_reward_loses_by_length_is_in_the_advantage_alone():
    """Responses of 2, 4 and 6 tokens, of 6 at most, where all above 2 lose."""
    members = [make_trajectory(0, i, (0,) * num) for i, num in enumerate((2, 4, 6))]
    options = {"advantage": "dr_grpo", "advantage_options": AdvantageOptions(overlong=4)}
    (update,) = updates_of([Group(0, tuple(members))], max_response_tokens=6, **options)
    assert [(s.advantage, s.reward) for s in update] == [(0.5, 0.0), (0.0, 0.0), (-0.5, 0.0)]


def test_an_estimator_gets_the_lag_of_the_oldest_token_of_each_response(monkeypatch):
    members = [make_trajectory(0, 0, (7, 9)), make_trajectory(0, 1, (9, 9))]
    monkeypatch.setitem(ADVANTAGES, "lag", lambda lags: lags.double())
    (update,) = updates_of([Group(0, tuple(members))], step=10, advantage="lag")
    assert [sequence.advantage for sequence in update] == [2.0, 0.0]


class UnsentShares(Cluster):
    """The leader of a node of two ranks, which keeps all shares."""

    def scatter_on_node(self, shares):
        return shares


@pytest.mark.parametrize("can_share", [True, False])
def test_a_leader_deals_its_updates_to_its_ranks_and_a_follower_has_nothing_to_deal(can_share):
    """Nothing is shared where the model cannot."""
    config = Config(
        groups_per_step=8, group_size=2, minibatches=2, max_prompt_tokens=2, max_response_tokens=10,
        max_tokens_per_microbatch=12, share_prefix="auto",
    )  # fmt: skip
    groups = [
        Group(i, tuple(make_trajectory(i, member, (0,) * (i + 1)) for member in range(2)))
        for i in range(8)
    ]
    module = SimpleNamespace(cost=sum, layout="row_each", can_share=can_share)
    policy = SimpleNamespace(config=config, clock=TrainerClock(), module=module)
    cluster = UnsentShares(ranks_of_nodes=((0, 1),))
    shares = deal(groups, 3, policy, cluster)
    updates = make_updates(groups, config, cluster, 3)
    sharing = "auto" if can_share else "off"
    assert repr(shares) == repr(distribute(updates, 2, 12, sharing, sum, "row_each"))
    assert policy.clock.take().spans[-1][0] == "gather"
    assert deal(None, 3, policy, cluster) is None


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_a_reward_that_is_not_a_number_stops_the_step(advantage):
    with pytest.raises(RuntimeError, match=r"^rewards must be finite, got \[nan\]$"):
        updates_of([make_trajectories(0, (1.0, float("nan")))], advantage=advantage)
