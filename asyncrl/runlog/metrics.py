"""What one step's line in metrics.jsonl holds. Each name is explained in docs/reference.md."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from algos.advantages import overlong_penalty
from asyncrl.config import Config
from asyncrl.messages import SampledTokens
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TRAINER_STATES, TRAINING, WAITING, WORKER_STATES, shares

# What each node measures of a step. The type of a value says how those of several nodes become one.


@dataclass(frozen=True)
class Mean:
    """A mean over all trajectories, groups or tokens of all nodes."""

    total: float
    count: int

    @classmethod
    def over(cls, numbers: Iterable[float]) -> "Mean":
        """Return the mean of numbers or truths."""
        array = np.asarray(numbers, dtype=np.float64)
        return cls(float(array.sum()), len(array))

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """The mean."""
        return self.total / self.count


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


@dataclass(frozen=True)
class Sum:
    """What all nodes have together."""

    value: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


Measured = dict[str, Mean | Deviation | Max | Sum]
"""Metrics of one node, by name."""


def over_nodes(nodes: Iterable[Measured]) -> dict[str, float]:
    """Return the metrics of all nodes together; a node may lack some."""
    whole: Measured = {}
    for measured in nodes:
        whole |= {
            name: whole[name] + part if name in whole else part for name, part in measured.items()
        }
    return {name: measurement.value for name, measurement in whole.items()}


def batch_metrics(
    groups: list[Group], policy_version: int, config: Config, num_nodes: int = 1
) -> Measured:
    """Return metrics of a node's part of the batch that is consumed at the trainer's `policy_version`.

    The parts of all nodes have equally many trajectories. The published weights are publish_delay steps older.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    rewards = [trajectory.reward for trajectory in trajectories]
    staleness = [policy_version - trajectory.min_version for trajectory in trajectories]
    lengths = [trajectory.num_generated for trajectory in trajectories]
    versions = [trajectory.policy_versions[trajectory.loss_mask] for trajectory in trajectories]
    token_versions = np.concatenate(versions)
    published = max(0, policy_version - config.publish_delay)
    metrics = {
        "reward/mean": Mean.over(rewards),
        "reward/std": Deviation(tuple(rewards)),
        "reward/zero_variance_groups": Mean.over([np.ptp(group.rewards) == 0 for group in groups]),
        "response/length_mean": Mean.over(lengths),
        "response/length_max": Max(max(lengths)),
        "response/cut": Mean.over(
            [trajectory.finish_reason == "length" for trajectory in trajectories]
        ),
        "response/turns_mean": Mean.over([trajectory.num_turns for trajectory in trajectories]),
        "response/inherited_share": Mean.over(token_versions < published),
        "response/mixed_versions": Mean.over([len(np.unique(column)) > 1 for column in versions]),
        "staleness/mean": Mean.over(staleness),
        "staleness/max": Max(max(staleness)),
        "staleness/token_mean": Mean.over(policy_version - token_versions),
    }
    overlong = config.advantage_options.overlong
    if overlong:
        lengths_beyond_prompt = [trajectory.num_beyond_prompt for trajectory in trajectories]
        penalties = [
            overlong_penalty(num, config.max_response_tokens, overlong)
            for num in lengths_beyond_prompt
        ]
        metrics["reward/overlong_penalty"] = Mean.over(penalties)
    for name in dict.fromkeys(
        name for trajectory in trajectories for name in trajectory.reward_parts
    ):
        parts = [trajectory.reward_parts.get(name, 0.0) for trajectory in trajectories]
        # A node without this part does not know its name, so its trajectories are counted here.
        metrics[f"reward/{name}"] = Sum(float(np.sum(parts)) / (len(parts) * num_nodes))
    return metrics


@dataclass(frozen=True)
class RolloutReport:
    """What the controller of a node measured since its last report; those of several nodes add up."""

    pauses_s: list[float]
    """Time without progress of each weight update, seconds."""
    sampled: SampledTokens
    worker_time: Counter[str]
    """Nanoseconds of all workers in each of WORKER_STATES."""
    ledger: Counter[str]
    """SampleBuffer.ledger, since the start of the run."""
    num_restarts: int
    """Restarts of workers, since the start of the run."""

    def __add__(self, other: "RolloutReport") -> "RolloutReport":
        ledger = Counter(self.ledger)
        ledger.update(other.ledger)
        return RolloutReport(
            self.pauses_s + other.pauses_s,
            self.sampled + other.sampled,
            self.worker_time + other.worker_time,
            ledger,
            self.num_restarts + other.num_restarts,
        )


def training_metrics(stats: dict[str, float]) -> dict[str, float]:
    """The policy's stats under the names of the log: loss/*, but for drift/*, memory/*, tokens/* and value/*."""
    renamed = {"loss": "loss/total", "tokens": "tokens/trained"}
    metrics = {}
    for name, value in stats.items():
        if name.startswith("tokens/lag_"):
            name = name.replace("tokens/", "tokens/trained_")
        elif not name.startswith(("drift/", "memory/", "tokens/", "value/")):
            name = renamed.get(name, f"loss/{name}")
        metrics[name] = value
    return metrics


def rollout_metrics(report: RolloutReport, previous_tokens: int, step_s: float) -> dict[str, float]:
    """Metrics of what the controllers measured since the last line."""
    ledger, sampled = report.ledger, report.sampled
    metrics = {
        f"ledger/{name}": n for name, n in ledger.items() if name.startswith(("groups_", "tokens_"))
    }
    metrics["tokens/generated"] = ledger["tokens_generated"]
    metrics["rollout/tokens_per_s"] = (ledger["tokens_generated"] - previous_tokens) / step_s
    metrics["rollout/restarts"] = report.num_restarts
    if sampled.new:
        # APRIL's ratio (arXiv 2509.18521): last segments of resumed responses, of all new tokens
        metrics["rollout/resumed_share"] = sampled.resumed / sampled.new
    metrics["rollout/discarded_tokens"] = sampled.discarded
    if report.pauses_s:
        metrics["rollout/pause_s"] = float(np.mean(report.pauses_s))
    return metrics


def time_metrics(trainer: Counter[str], workers: dict[str, int]) -> dict[str, float]:
    """Seconds of the step and of its main phases, and the shares of all states: nanoseconds per state in.

    `workers` is of all workers together, so their shares are means weighted by how long each is known.
    """
    phases = {
        "wait": WAITING,
        "train": TRAINING,
        "publish": ("publish",),
        "step": tuple(TRAINER_STATES),
    }
    times = {
        f"time/{name}_s": sum(trainer[state] for state in states) / 1e9
        for name, states in phases.items()
    }
    in_steps = [state for state in TRAINER_STATES if state != "starting"]
    return {
        **times,
        **{f"trainer_time/{state}": share for state, share in shares(trainer, in_steps).items()},
        **{
            f"worker_time/{state}": share
            for state, share in shares(Counter(workers), WORKER_STATES).items()
        },
    }
