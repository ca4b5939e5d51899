"""What one step's line in metrics.jsonl holds. Each name is explained in the README's table."""

import functools
import math
import operator
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from algos.advantages import overlong_penalty
from asyncrl.config import Config
from asyncrl.messages import SampledTokens
from asyncrl.records import Group
from asyncrl.runlog.time_ledger import TRAINER_STATES, TRAINING, WAITING, WORKER_STATES, shares


def batch_metrics(groups: list[Group], policy_version: int, config: Config) -> dict[str, float]:
    """Metrics of a batch consumed at the trainer's `policy_version`; what is published is publish_delay steps older."""
    trajectories = [t for group in groups for t in group.trajectories]
    staleness = np.array([policy_version - t.min_version for t in trajectories])
    lengths = np.array([t.num_generated for t in trajectories])
    versions, published = [t.policy_versions[t.loss_mask] for t in trajectories], policy_version - config.publish_delay
    rewards = np.array([t.reward for t in trajectories])
    overlong = config.advantage_options.overlong
    penalties = [overlong_penalty(t.num_beyond_prompt, config.max_response_tokens, overlong) for t in trajectories]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **_part_means([t.reward_parts for t in trajectories]),
        **({"reward/overlong_penalty": float(np.mean(penalties))} if overlong else {}),
        "reward/zero_variance_groups": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": int(lengths.max()),
        "response/cut": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "response/turns_mean": float(np.mean([t.num_turns for t in trajectories])),
        "response/inherited_share": float(np.mean(np.concatenate(versions) < max(0, published))),
        "response/mixed_versions": float(np.mean([len(np.unique(v)) > 1 for v in versions])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": int(staleness.max()),
        "staleness/token_mean": float(policy_version - np.concatenate(versions).mean()),
    }


def _part_means(of_trajectories: list[dict[str, float]]) -> dict[str, float]:
    """Mean of each part of the rewards; a trajectory without it counts 0."""
    names = dict.fromkeys(name for parts in of_trajectories for name in parts)
    return {f"reward/{name}": float(np.mean([of.get(name, 0.0) for of in of_trajectories])) for name in names}


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
    broadcasts_s: list[float] = field(default_factory=list)
    """From the announcement of weights until a worker had them, of each update, seconds."""

    def __add__(self, other: "RolloutReport") -> "RolloutReport":
        return RolloutReport(
            self.pauses_s + other.pauses_s,
            self.sampled + other.sampled,
            self.worker_time + other.worker_time,
            Counter({name: self.ledger[name] + other.ledger[name] for name in {**self.ledger, **other.ledger}}),
            self.num_restarts + other.num_restarts,
            self.broadcasts_s + other.broadcasts_s,
        )


TOKEN_MEANS = ("response/inherited_share", "staleness/token_mean")
"""Metrics of a batch that are means over tokens, not over trajectories or groups."""


@dataclass(frozen=True)
class StepOfNode:
    """What one node knows of a step, or all together."""

    batch: dict[str, float]
    """batch_metrics of what it trained on."""
    rollout: RolloutReport
    """What its controller measured."""
    evaluation: dict[str, float]
    """evaluation_metrics; of the first node alone."""
    mismatch: dict[str, float]
    """The worst of any of its machines."""
    swarm: dict[str, float] = field(default_factory=dict)
    """What machines did that sample for it from elsewhere."""


def over_nodes(of_nodes: list[StepOfNode]) -> StepOfNode:
    """What each node knows of a step, as of all nodes."""
    if len(of_nodes) == 1:
        return of_nodes[0]
    return StepOfNode(
        _batch_over_nodes([node.batch for node in of_nodes]),
        functools.reduce(operator.add, (node.rollout for node in of_nodes)),
        {name: value for node in of_nodes for name, value in node.evaluation.items()},
        worst_mismatch([node.mismatch for node in of_nodes]),
        _swarm_over_nodes([node.swarm for node in of_nodes]),
    )


def _batch_over_nodes(of_nodes: list[dict[str, float]]) -> dict[str, float]:
    """Metrics of the whole batch from those of each node's part; the parts have equally many trajectories and groups.

    Means are averaged, by tokens where they are over tokens; a maximum is the largest, and the variance of the rewards
    is that within nodes and that between them.
    """
    names = dict.fromkeys(name for metrics in of_nodes for name in metrics)
    columns = {name: np.array([metrics.get(name, 0.0) for metrics in of_nodes]) for name in names}  # 0 of a part
    whole = {name: float(column.mean()) for name, column in columns.items()}
    of_maxima = [name for name in columns if name.endswith("max") and not name.startswith("reward/")]
    whole |= {name: columns[name].max().item() for name in of_maxima}
    tokens = columns["response/length_mean"]
    whole |= {name: float(np.average(columns[name], weights=tokens)) for name in TOKEN_MEANS}
    variance = (columns["reward/std"] ** 2).mean() + columns["reward/mean"].var()
    return whole | {"reward/std": math.sqrt(variance)}


def worst_mismatch(of_engines: list[dict[str, float]]) -> dict[str, float]:
    """The largest mismatch of any of several engines, or nodes, that measured one."""
    names = dict.fromkeys(name for metrics in of_engines for name in metrics)
    return {name: max(metrics[name] for metrics in of_engines if name in metrics) for name in names}


def _swarm_over_nodes(of_nodes: list[dict[str, float]]) -> dict[str, float]:
    """What machines did, of all nodes together; a maximum is the largest."""
    names = dict.fromkeys(name for metrics in of_nodes for name in metrics)
    return {
        name: (max if name.endswith("max") else sum)(metrics[name] for metrics in of_nodes if name in metrics)
        for name in names
    }


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
    metrics = {f"ledger/{name}": n for name, n in ledger.items() if name.startswith(("groups_", "tokens_"))}
    metrics |= _bias_of_dropping(ledger)
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


def _bias_of_dropping(ledger: Counter[str]) -> dict[str, float]:
    """By reason, how groups dropped so far differ from those consumed: the ratio of their mean response lengths, and
    the difference of their mean rewards. Both are over members that had finished."""
    fates = [name.removeprefix("measured_") for name in ledger if name.startswith("measured_")]
    means = {of: [ledger[f"{name}_{of}"] / ledger[f"measured_{of}"] for name in ("length", "reward")] for of in fates}
    length, reward = means.pop("consumed", (0, 0))
    if not length:
        return {}
    ratios = {f"{of.replace('_', '/', 1)}_length_ratio": mean / length for of, (mean, _) in means.items()}
    return ratios | {f"{of.replace('_', '/', 1)}_reward_gap": mean - reward for of, (_, mean) in means.items()}


def time_metrics(trainer: Counter[str], workers: dict[str, int]) -> dict[str, float]:
    """Seconds of the step and of its main phases, and the shares of all states: nanoseconds per state in.

    `workers` is of all workers together, so their shares are means weighted by how long each is known.
    """
    phases = {"wait": WAITING, "train": TRAINING, "publish": ("publish",), "step": tuple(TRAINER_STATES)}
    times = {f"time/{name}_s": sum(trainer[state] for state in states) / 1e9 for name, states in phases.items()}
    in_steps = [state for state in TRAINER_STATES if state != "starting"]
    return {
        **times,
        **{f"trainer_time/{state}": share for state, share in shares(trainer, in_steps).items()},
        **{f"worker_time/{state}": share for state, share in shares(Counter(workers), WORKER_STATES).items()},
    }
