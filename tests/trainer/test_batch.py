import numpy as np
import pytest
from trajectories import make_group, make_trajectory

from algos import ADVANTAGES
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import AdvantageOptions, Config
from asyncrl.records import Group
from asyncrl.trainer.batch import make_updates


def ids_of(updates):
    return [[sequence.group_id for sequence in update] for update in updates]


def test_one_minibatch_keeps_the_order_of_the_groups():
    groups = [make_group(group_id, (0.0, 1.0)) for group_id in (3, 1, 2)]
    (update,) = ids_of(
        make_updates(groups, Config(groups_per_step=3, group_size=2), Cluster(), step=1)
    )
    assert update == [3, 3, 1, 1, 2, 2]


def test_minibatches_get_whole_groups_once_in_an_order_that_seed_and_step_decide():
    groups = [make_group(group_id, (0.0, 1.0)) for group_id in range(8)]

    def dealt(step, seed=0):
        config = Config(groups_per_step=8, group_size=2, minibatches=4, seed=seed)
        return ids_of(make_updates(groups, config, Cluster(), step=step))

    for update in dealt(step=1):
        assert len(update) == 4 and update[::2] == update[1::2]
    assert sorted(i for update in dealt(step=1) for i in update) == sorted([*range(8), *range(8)])
    assert dealt(step=1) == dealt(step=1)
    assert len({str(dealt(step, seed)) for step in (1, 2, 3) for seed in (0, 1)}) == 6


def test_updates_of_a_step_are_equally_stale_though_groups_come_sorted_by_age():
    config, num_steps = (
        Config(groups_per_step=16, group_size=1, minibatches=4, advantage="reinforce"),
        400,
    )
    groups = [make_group(group_id, (0.0,)) for group_id in range(16)]  # the id stands for the age
    dealt = [
        ids_of(make_updates(groups, config, Cluster(), step=step))
        for step in range(1, num_steps + 1)
    ]
    means = np.array(dealt).mean((0, 2))
    # 7.5 each, and the mean of four of sixteen has a standard deviation of 2 before it is averaged over the steps.
    assert np.abs(means - 7.5).max() < 4 * 2 / num_steps**0.5


class SecondOfTwoNodes(Cluster):
    """Node 1, whose fellow brings two groups with ids and rewards of its own; nothing is sent."""

    def gather(self, value):
        return [[(50.0, 100, 0), (10.0, 100, 0), (7.0, 101, 0), (3.0, 101, 0)], value]


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_every_trajectory_gets_its_own_advantage_on_a_node_of_several(minibatches):
    rewards = {group_id: (float(group_id), 2.0 * group_id + 1) for group_id in range(4)}
    config = Config(groups_per_step=4, group_size=2, minibatches=minibatches, advantage="dr_grpo")
    cluster = SecondOfTwoNodes(node=1, ranks_of_nodes=((0,), (1,)))
    groups = [make_group(group_id, pair) for group_id, pair in rewards.items()]
    updates = make_updates(groups, config, cluster, step=3)
    sequences = [sequence for update in updates for sequence in update]
    assert len(sequences) == 8
    for sequence in sequences:
        assert sequence.advantage == sequence.reward - sum(rewards[sequence.group_id]) / 2


def test_advantages_are_estimated_over_the_whole_step_and_not_per_minibatch():
    groups = [make_group(0, (0.0, 0.0)), make_group(1, (1.0, 1.0))]
    config = Config(groups_per_step=2, group_size=2, minibatches=2, advantage="reinforce")
    updates = make_updates(groups, config, Cluster(), step=1)
    assert all(
        (s.advantage > 0) == (s.reward > 0) and s.advantage for update in updates for s in update
    )


def test_what_a_reward_loses_by_length_is_in_the_advantage_alone():
    """Responses of 2, 4 and 6 tokens, of 6 at most, where all above 2 lose."""
    members = [make_trajectory(0, i, (0,) * num) for i, num in enumerate((2, 4, 6))]
    config = Config(
        groups_per_step=1,
        group_size=3,
        max_response_tokens=6,
        advantage="dr_grpo",
        advantage_options=AdvantageOptions(overlong=4),
    )
    (update,) = make_updates([Group(0, tuple(members))], config, Cluster(), step=1)
    assert [(s.advantage, s.reward) for s in update] == [(0.5, 0.0), (0.0, 0.0), (-0.5, 0.0)]


def test_an_estimator_gets_the_lag_of_the_oldest_token_of_each_response(monkeypatch):
    members = [make_trajectory(0, 0, (7, 9)), make_trajectory(0, 1, (9, 9))]
    monkeypatch.setitem(ADVANTAGES, "lag", lambda lags: lags.double())
    config = Config(groups_per_step=1, advantage="lag")
    (update,) = make_updates([Group(0, tuple(members))], config, Cluster(), step=10)
    assert [sequence.advantage for sequence in update] == [2.0, 0.0]


def test_a_group_of_equal_rewards_has_no_advantage():
    (update,) = make_updates(
        [make_group(0, (1.0, 1.0, 1.0))], Config(groups_per_step=1, group_size=3), Cluster(), step=1
    )
    assert [s.advantage for s in update] == [0.0, 0.0, 0.0]


def test_a_reward_that_is_not_a_number_stops_the_step():
    with pytest.raises(RuntimeError, match="rewards must be finite"):
        make_updates(
            [make_group(0, (1.0, float("nan")))],
            Config(groups_per_step=1, group_size=2),
            Cluster(),
            step=1,
        )


def test_behavior_logprobs_and_versions_pass_through_untouched():
    group = make_group(0, (0.0, 1.0))
    (update,) = make_updates([group], Config(groups_per_step=1, group_size=2), Cluster(), step=1)
    for sequence, trajectory in zip(update, group.trajectories, strict=True):
        assert np.shares_memory(sequence.behavior_logprobs, trajectory.behavior_logprobs)
        assert np.array_equal(sequence.policy_versions, trajectory.policy_versions)
