import math
from dataclasses import replace

import numpy as np
import pytest
from trajectories import make_trajectory

from asyncrl.records import Completion, check_trajectory, join_columns, spread_columns

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


def turn(num_tokens, num_top):
    """A turn of the policy with `num_top` likeliest tokens in each place."""
    shape = (num_tokens, num_top)
    top = {"top_ids": np.ones(shape, np.int32), "top_logprobs": np.full(shape, -1, np.float32)}
    columns = {
        "behavior_logprobs": np.full(num_tokens, -0.5, np.float32),
        "policy_versions": np.zeros(num_tokens, np.int32),
    }
    return Completion([7] * num_tokens, "stop", **columns, **(top if num_top else {}))


def test_a_turn_that_is_aborted_before_its_first_token_has_no_likeliest_tokens():
    aborted = Completion([], "interrupted", **join_columns([]))
    assert aborted.top_ids is None
    columns = spread_columns([(2, turn(3, num_top=4)), (7, aborted)], 9)
    assert columns["top_ids"].shape == (9, 4)
    assert columns["top_ids"][2:5].all() and columns["top_ids"].sum() == 12
    assert "top_ids" not in spread_columns([(2, aborted)], 9)
    with pytest.raises(RuntimeError, match="only some parts of a response have the column top_ids"):
        spread_columns([(2, turn(3, num_top=4)), (5, turn(2, num_top=0))], 9)
