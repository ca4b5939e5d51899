import math
from dataclasses import replace

import numpy as np
import pytest
from trajectories import make_trajectory

from asyncrl.records import check_trajectory

NAN = float("nan")


@pytest.mark.parametrize(
    ("column", "numbers", "where"),
    [
        *(("behavior_logprobs", [0.0, -1.0, bad, -1.0], "2 ") for bad in (NAN, -math.inf, 0.5)),
        ("policy_versions", [-1, -1, 3, 3], "1 .* at version -1"),
        # what the prompt has in place of log-probs does not matter
        ("behavior_logprobs", [NAN, -0.5, 0.0, -1.0], None),
    ],
)
def test_a_token_with_a_broken_logprob_or_without_a_version_is_named(column, numbers, where):
    trajectory = make_trajectory(group_id=7, member=2, versions=(3, 3, 3))
    dtype = getattr(trajectory, column).dtype
    broken = replace(trajectory, **{column: np.array(numbers, dtype)})
    if where is None:
        check_trajectory(broken)
        return
    who = r"trajectory 702 \(group 7, member 2, worker 0\)"
    with pytest.raises(RuntimeError, match=f"{who}, token {where}"):
        check_trajectory(broken)


def test_segments_cover_the_tokens_in_their_order_and_an_agents_limit_counts_what_it_sampled():
    trajectory = make_trajectory(0, 0, versions=(5, -1, 4, 6))
    assert (trajectory.min_version, trajectory.num_generated) == (4, 3)
    assert trajectory.segments == [slice(0, 5)] and trajectory.num_beyond_prompt == 4
    trajectory = replace(trajectory, segment_lengths=(2, 3))
    assert trajectory.segments == [slice(0, 2), slice(2, 5)] and trajectory.num_beyond_prompt == 3
