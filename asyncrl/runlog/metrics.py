"""The metrics of a step in metrics.jsonl. docs/reference.md explains each name."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from algos.advantages import overlong_penalty
from asyncrl.config import Config
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TRAINER_STATES, TRAINING, WAITING

# Measurements of a node. The type of a value defines how values of several nodes, or moments, become one.


@dataclass(frozen=True)
class Mean:
    """A mean over all trajectories, groups or tokens of all nodes."""

    total: float
    count: int

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float | None:
        """The mean; None without numbers."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True)
class Comparison:
    """Two means over all nodes, compared when both are known."""

    compare: Callable[[float, float], float]
    """A function of the module `operator`."""
    left: Mean
    right: Mean

    def __add__(self, other: "Comparison") -> "Comparison":
        return Comparison(self.compare, self.left + other.left, self.right + other.right)

    @property
    def value(self) -> float | None:
        """The result; None if one mean has no numbers."""
        if self.left.count and self.right.count:
            return self.compare(self.left.value, self.right.value)
        return None


@dataclass(frozen=True)
class Deviation:
    """A standard deviation of numbers of all nodes."""

    numbers: tuple[float, ...]

    def __add__(self, other: "Deviation") -> "Deviation":
        return Deviation(self.numbers + other.numbers)

    @property
    def value(self) -> float:
        """The standard deviation of the numbers around their mean."""
        return float(np.std(self.numbers))


@dataclass(frozen=True)
class Max:
    """The largest of all nodes."""

    value: float

    def __add__(self, other: "Max") -> "Max":
        return Max(max(self.value, other.value))


Measured = dict[str, Mean | Comparison | Deviation | Max | float]
"""Metrics of one node, by name. A plain number is summed over all nodes."""


def merge(parts: Iterable[Measured]) -> Measured:
    """Return the sum of measurements; each may lack some metrics."""
    whole: Measured = {}
    for measured in parts:
        for name, part in measured.items():
            whole[name] = whole[name] + part if name in whole else part
    return whole


def merge_nodes(nodes: Iterable[Measured]) -> dict[str, float]:
    """Return the metrics of all nodes together, without means that have no numbers."""
    values = {name: getattr(part, "value", part) for name, part in merge(nodes).items()}
    return {name: value for name, value in values.items() if value is not None}


def batch_metrics(
    groups: list[Group], policy_version: int, config: Config, num_nodes: int = 1
) -> Measured:
    """Return metrics of a node's part of the batch that is consumed at `policy_version`.

    The parts of all nodes have equally many trajectories.
    `lag_stats.staleness_metrics` makes `staleness/*`, because a user's loop can add old groups.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    lengths = [trajectory.num_generated for trajectory in trajectories]
    versions = [trajectory.policy_versions[trajectory.loss_mask] for trajectory in trajectories]
    token_versions = np.concatenate(versions)
    due_version = config.due_version(policy_version)
    means = {
        "reward/mean": rewards,
        "reward/zero_variance_groups": [np.ptp(group.rewards) == 0 for group in groups],
        "response/length_mean": lengths,
        "response/cut": [trajectory.finish_reason == "length" for trajectory in trajectories],
        "response/turns_mean": [trajectory.num_turns for trajectory in trajectories],
        "response/inherited_share": token_versions < due_version,
        "response/mixed_versions": [len(np.unique(column)) > 1 for column in versions],
    }
    overlong = config.advantage_options.overlong_tokens
    if overlong:
        means["reward/overlong_penalty"] = [
            overlong_penalty(trajectory.num_beyond_prompt, config.max_response_tokens, overlong)
            for trajectory in trajectories
        ]
    metrics: Measured = {
        name: Mean(float(np.sum(numbers)), len(numbers)) for name, numbers in means.items()
    }
    metrics["reward/std"] = Deviation(tuple(rewards))
    metrics["response/length_max"] = Max(max(lengths))
    for name in dict.fromkeys(
        name for trajectory in trajectories for name in trajectory.reward_parts
    ):
        parts = [trajectory.reward_parts.get(name, 0.0) for trajectory in trajectories]
        # A node without this part does not know its name, so its trajectories are counted here.
        metrics[f"reward/{name}"] = float(np.sum(parts)) / (len(parts) * num_nodes)
    return metrics


def time_metrics(spent: Counter[str]) -> dict[str, float]:
    """Return seconds of the step and its phases, and shares of the trainer's states. `spent` has nanoseconds."""
    phases = {
        "wait": WAITING,
        "train": TRAINING,
        "publish": ("publish",),
        "step": tuple(TRAINER_STATES),
    }
    times = {
        f"time/{name}_s": sum(spent[state] for state in states) / 1e9
        for name, states in phases.items()
    }
    return times | {
        f"trainer_time/{state}": spent[state] / spent.total()
        for state in TRAINER_STATES
        if state != "starting"
    }
