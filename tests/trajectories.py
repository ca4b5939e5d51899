"""Small trajectories and groups that tests are about."""

from dataclasses import replace

import numpy as np

from asyncrl.records import Group, Trajectory


def make_trajectory(group_id, member, versions=(0,), finish_reason="stop"):
    """A trajectory of one prompt token and one generated token per version."""
    versions = np.array([-1, *versions], dtype=np.int32)
    return Trajectory(
        ticket_id=group_id * 100 + member,
        group_id=group_id,
        member=member,
        tokens=np.zeros(len(versions), dtype=np.int64),
        loss_mask=versions >= 0,
        behavior_logprobs=np.zeros(len(versions), dtype=np.float32),
        policy_versions=versions,
        reward=0.0,
        finish_reason=finish_reason,
        failure="",
        num_turns=1,
        started_at=0.0,
        ended_at=1.0,
        worker=0,
    )


def make_group(group_id, rewards):
    members = enumerate(rewards)
    trajectories = (replace(make_trajectory(group_id, i, (0, 0)), reward=r) for i, r in members)
    return Group(group_id, tuple(trajectories))
