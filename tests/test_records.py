import math
from dataclasses import replace

import pytest
from trajectories import make_trajectory

from asyncrl.records import check_trajectory

NAN = float("nan")


@pytest.mark.parametrize(
    ("place", "logprob", "version", "is_broken"),
    [
        *((2, bad, 3, True) for bad in (NAN, -math.inf, 0.5)),
        (1, -1.0, -1, True),
        (0, NAN, -1, False),  # of the prompt
        (3, 0.0, 3, False),
    ],
)
def test_a_token_with_a_broken_logprob_or_without_a_version_is_named(
    place, logprob, version, is_broken
):
    trajectory = make_trajectory(group_id=7, member=2, versions=(3, 3, 3))
    trajectory.behavior_logprobs[place] = logprob
    trajectory.policy_versions[place] = version
    if not is_broken:
        check_trajectory(trajectory)
        return
    who = rf"trajectory 702 \(group 7, member 2, worker 0\), token {place} .* at version {version}"
    with pytest.raises(RuntimeError, match=who):
        check_trajectory(trajectory)


def test_segments_cover_the_tokens_in_their_order_and_an_agents_limit_counts_what_it_sampled():
    trajectory = make_trajectory(0, 0, versions=(5, -1, 4, 6))
    assert (trajectory.oldest_version, trajectory.num_generated) == (4, 3)
    assert trajectory.segments == [slice(0, 5)] and trajectory.num_beyond_prompt == 4
    trajectory = replace(trajectory, segment_lengths=(2, 3))
    assert trajectory.segments == [slice(0, 2), slice(2, 5)] and trajectory.num_beyond_prompt == 3
