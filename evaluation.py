"""Evaluations on held-out problems, each pinned to one policy version, while training samples go on."""

from dataclasses import dataclass, field

import numpy as np

from data.records import Ticket, Trajectory


@dataclass
class Evaluation:
    """Held-out problems being sampled at one version."""

    version: int
    waiting: set[int]
    """Tickets whose trajectories are to come."""
    trajectories: list[Trajectory] = field(default_factory=list)
    num_failed: int = 0

    @classmethod
    def of(cls, version: int, tickets: list[Ticket]) -> "Evaluation":
        """An evaluation that waits for these tickets."""
        return cls(version, {ticket.ticket_id for ticket in tickets})

    @property
    def accuracy(self) -> float:
        """Mean reward of the responses that could be scored."""
        return float(np.mean([t.reward for t in self.trajectories])) if self.trajectories else float("nan")

    @property
    def has_ended(self) -> bool:
        """Whether all trajectories are there."""
        return not self.waiting

    def issue_again(self, old: Ticket, new: Ticket) -> None:
        """Wait for another ticket in place of one that was lost."""
        self.waiting.symmetric_difference_update({old.ticket_id, new.ticket_id})

    def add(self, trajectory: Trajectory) -> None:
        """Take in a trajectory. Raises RuntimeError if any of its tokens is of another version."""
        self.waiting.remove(trajectory.ticket_id)
        if trajectory.finish_reason == "failed":
            self.num_failed += 1
            return
        versions = set(trajectory.policy_versions[trajectory.loss_mask].tolist())
        if versions != {self.version}:
            raise RuntimeError(f"evaluation of version {self.version} got tokens of versions {sorted(versions)}")
        self.trajectories.append(trajectory)
