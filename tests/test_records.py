from dataclasses import replace

import numpy as np
import pytest
from trajectories import make_trajectory

from asyncrl.records import check_trajectory


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_a_broken_logprob_is_refused_naming_trajectory_and_token(value):
    trajectory = make_trajectory(group_id=7, member=2, versions=(0, 0, 0))
    logprobs = np.array([0.0, -1.0, value, -1.0], dtype=np.float32)
    with pytest.raises(
        RuntimeError, match=r"trajectory 702 \(group 7, member 2, worker 0\), token 2 "
    ):
        check_trajectory(replace(trajectory, behavior_logprobs=logprobs))


def test_a_generated_token_without_a_version_is_refused():
    trajectory = make_trajectory(0, 0, versions=(3, 3))
    with pytest.raises(RuntimeError, match=r"token 1 .* at version -1"):
        check_trajectory(replace(trajectory, policy_versions=np.array([-1, -1, 3], dtype=np.int32)))


def test_what_the_prompt_has_in_place_of_logprobs_does_not_matter():
    trajectory = make_trajectory(0, 0, versions=(3, 3))
    check_trajectory(
        replace(trajectory, behavior_logprobs=np.array([np.nan, -0.5, 0.0], dtype=np.float32))
    )


def test_oldest_version_and_length_count_generated_tokens_only():
    trajectory = make_trajectory(0, 0, versions=(5, 4, 6))
    assert (trajectory.min_version, trajectory.num_generated) == (4, 3)


def test_segments_cover_the_tokens_in_their_order_and_an_agents_limit_counts_what_it_sampled():
    trajectory = make_trajectory(0, 0, versions=(5, -1, 4, 6))
    assert trajectory.segments == [slice(0, 5)] and trajectory.num_beyond_prompt == 4
    trajectory = replace(trajectory, segment_lengths=(2, 3))
    assert trajectory.segments == [slice(0, 2), slice(2, 5)] and trajectory.num_beyond_prompt == 3
