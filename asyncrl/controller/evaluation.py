"""Evaluations on held-out problems, each at one policy version, while training responses are sampled, too."""

import math
from dataclasses import dataclass, field

import numpy as np

from asyncrl.controller.failures import Failures
from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Trajectory


@dataclass
class Evaluation:
    """Held-out problems that are sampled at one version."""

    version: int
    num_asked: int
    """Tickets, each for one trajectory."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """Trajectories that have arrived, also failed ones."""

    def add(self, trajectory: Trajectory) -> bool:
        """Add a trajectory. Return whether it was the last. Raises RuntimeError if a token has another version."""
        versions = set(trajectory.policy_versions[trajectory.loss_mask].tolist())
        if trajectory.finish_reason != "failed" and versions != {self.version}:
            raise RuntimeError(
                f"evaluation of version {self.version} got tokens of versions {sorted(versions)}"
            )
        self.trajectories.append(trajectory)
        return len(self.trajectories) == self.num_asked

    def failures(self) -> Failures:
        """Return the counts and reasons of failed responses of this evaluation."""
        failures = Failures()
        for trajectory in self.trajectories:
            failures.count(trajectory.failure)
        return failures

    def accuracy(self, group_id: int = EVALUATION_GROUP) -> float:
        """Return the mean reward over all problems, sampled or greedily.

        A failed response counts 0, so a response that makes the scorer hang does not pay.
        """
        rewards = [
            0.0 if trajectory.finish_reason == "failed" else trajectory.reward
            for trajectory in self.trajectories
            if trajectory.group_id == group_id
        ]
        return float(np.mean(rewards)) if rewards else float("nan")

    def metrics(self) -> dict[str, float]:
        num_failed = self.failures().num_failed
        metrics = {
            "eval/accuracy": self.accuracy(),
            "eval/policy_version": self.version,
            "eval/problems": self.num_asked - num_failed,
            "eval/failed": num_failed,
        }
        greedy = self.accuracy(GREEDY_GROUP)
        return metrics if math.isnan(greedy) else metrics | {"eval/greedy_accuracy": greedy}
