import numpy as np
import pytest
from test_buffer import make_trajectory

from batch import make_updates
from config import Config
from data.records import Group


def make_group(group_id, rewards):
    members = [make_trajectory(group_id, member, (0, 0)) for member in range(len(rewards))]
    return Group(group_id, tuple(type(t)(**{**vars(t), "reward": r}) for t, r in zip(members, rewards, strict=True)))


def test_whole_groups_are_dealt_to_the_minibatches_in_order():
    groups = [make_group(group_id, (0.0, 1.0)) for group_id in range(4)]
    updates = make_updates(groups, Config(groups_per_step=4, group_size=2, minibatches=2))
    assert [len(update) for update in updates] == [4, 4]
    assert [s.reward for update in updates for s in update] == [0.0, 1.0] * 4


def test_advantages_are_estimated_over_the_whole_step_and_not_per_minibatch():
    groups = [make_group(0, (0.0, 0.0)), make_group(1, (1.0, 1.0))]
    config = Config(groups_per_step=2, group_size=2, minibatches=2, advantage="reinforce")
    first, second = make_updates(groups, config)
    assert all(s.advantage < 0 for s in first) and all(s.advantage > 0 for s in second)


def test_a_group_of_equal_rewards_has_no_advantage():
    (update,) = make_updates([make_group(0, (1.0, 1.0, 1.0))], Config(groups_per_step=1, group_size=3))
    assert [s.advantage for s in update] == [0.0, 0.0, 0.0]


def test_a_reward_that_is_not_a_number_stops_the_step():
    with pytest.raises(RuntimeError, match="rewards must be finite"):
        make_updates([make_group(0, (1.0, float("nan")))], Config(groups_per_step=1, group_size=2))


def test_behavior_logprobs_and_versions_pass_through_untouched():
    group = make_group(0, (0.0, 1.0))
    (update,) = make_updates([group], Config(groups_per_step=1, group_size=2))
    for sequence, trajectory in zip(update, group.trajectories, strict=True):
        assert np.shares_memory(sequence.behavior_logprobs, trajectory.behavior_logprobs)
        assert np.array_equal(sequence.policy_versions, trajectory.policy_versions)
