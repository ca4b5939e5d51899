"""Evaluations on held-out problems, each pinned to one policy version, while training samples go on."""

import math
from dataclasses import dataclass, field

import numpy as np

from asyncrl.records import EVALUATION_GROUP, GREEDY_GROUP, Ticket, Trajectory


@dataclass
class Evaluation:
    """Held-out problems being sampled at one version."""

    version: int
    waiting: set[int]
    """Tickets whose trajectories are to come."""
    trajectories: list[Trajectory] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    """group_id of those that failed."""

    def accuracy(self, group_id: int = EVALUATION_GROUP) -> float:
        """Return the mean reward over all problems asked, sampled or greedily.

        A response that failed counts 0, so hanging the scorer never pays.
        """
        rewards = [
            trajectory.reward for trajectory in self.trajectories if trajectory.group_id == group_id
        ]
        rewards += [0.0] * self.failed.count(group_id)
        return float(np.mean(rewards)) if rewards else float("nan")

    def issue_again(self, old: Ticket, new: Ticket) -> None:
        """Wait for another ticket in place of one that was lost."""
        self.waiting.symmetric_difference_update({old.ticket_id, new.ticket_id})

    def add(self, trajectory: Trajectory) -> None:
        """Take in a trajectory. Raises RuntimeError if any of its tokens is of another version."""
        self.waiting.remove(trajectory.ticket_id)
        if trajectory.finish_reason == "failed":
            self.failed.append(trajectory.group_id)
            return
        versions = set(trajectory.policy_versions[trajectory.loss_mask].tolist())
        if versions != {self.version}:
            raise RuntimeError(
                f"evaluation of version {self.version} got tokens of versions {sorted(versions)}"
            )
        self.trajectories.append(trajectory)


def evaluation_metrics(evaluations: list[Evaluation]) -> dict[str, float]:
    """Return the metrics of the newest evaluation that ended since the last line, or nothing."""
    if not evaluations:
        return {}
    newest = evaluations[-1]
    metrics = {
        "eval/accuracy": newest.accuracy(),
        "eval/policy_version": newest.version,
        "eval/problems": len(newest.trajectories),
        "eval/failed": len(newest.failed),
    }
    greedy = newest.accuracy(GREEDY_GROUP)
    if not math.isnan(greedy):
        metrics["eval/greedy_accuracy"] = greedy
    return metrics


@dataclass
class Evaluations:
    """One evaluation at a time, and those that have ended."""

    running: Evaluation | None = None
    ended: list[Evaluation] = field(default_factory=list)
    """Those that have ended since the last `take_ended`."""

    def start(self, version: int, tickets: list[Ticket]) -> None:
        """Wait for these tickets' trajectories."""
        self.running = Evaluation(version, {ticket.ticket_id for ticket in tickets})

    def add(self, trajectory: Trajectory) -> Evaluation | None:
        """Take in a trajectory. Returns the evaluation if this was its last."""
        evaluation = self.running
        evaluation.add(trajectory)
        if evaluation.waiting:
            return None
        self.ended.append(evaluation)
        self.running = None
        return evaluation

    def take_ended(self) -> list[Evaluation]:
        """Take the evaluations that have ended since the last call."""
        ended, self.ended = self.ended, []
        return ended
