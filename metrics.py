"""What one step's line in metrics.jsonl holds. Each name is explained in the README's table."""

import numpy as np

from data.records import Group
from evaluation import Evaluation


def batch_metrics(groups: list[Group], policy_version: int, publish_delay: int = 0) -> dict[str, float]:
    """Metrics of a batch consumed at the trainer's `policy_version`; what is published is publish_delay steps older."""
    trajectories = [t for group in groups for t in group.trajectories]
    staleness = np.array([policy_version - t.min_version for t in trajectories])
    lengths = np.array([t.num_generated for t in trajectories])
    versions = [t.policy_versions[t.loss_mask] for t in trajectories]
    rewards = np.array([t.reward for t in trajectories])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/zero_variance_groups": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        "response/length_mean": float(lengths.mean()),
        "response/length_max": int(lengths.max()),
        "response/cut": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "response/turns_mean": float(np.mean([t.num_turns for t in trajectories])),
        "response/inherited_share": float(np.mean(np.concatenate(versions) < max(0, policy_version - publish_delay))),
        "response/mixed_versions": float(np.mean([len(np.unique(v)) > 1 for v in versions])),
        "staleness/mean": float(staleness.mean()),
        "staleness/max": int(staleness.max()),
        "staleness/token_mean": float(policy_version - np.concatenate(versions).mean()),
    }


def training_metrics(stats: dict[str, float]) -> dict[str, float]:
    """The policy's stats under the names of the log: loss/*, but for drift/*, memory/* and tokens/*."""
    renamed = {"loss": "loss/total", "tokens": "tokens/trained"}
    metrics = {}
    for name, value in stats.items():
        if name.startswith("tokens/lag_"):
            name = name.replace("tokens/", "tokens/trained_")
        elif not name.startswith(("drift/", "memory/", "tokens/")):
            name = renamed.get(name, f"loss/{name}")
        metrics[name] = value
    return metrics


def evaluation_metrics(evaluations: list[Evaluation]) -> dict[str, float]:
    """Metrics of the newest evaluation that ended since the last line, or nothing."""
    if not evaluations:
        return {}
    newest = evaluations[-1]
    return {
        "eval/accuracy": newest.accuracy,
        "eval/policy_version": newest.version,
        "eval/problems": len(newest.trajectories),
        "eval/failed": newest.num_failed,
    }


def rollout_metrics(measured: dict, previous_tokens: int, step_s: float) -> dict[str, float]:
    """Metrics of what the controller measured since the last line; see Controller.drain."""
    ledger, pauses = measured["ledger"], measured["pause_s"]
    metrics = {f"ledger/{name}": count for name, count in ledger.items()}
    metrics["tokens/generated"] = ledger["tokens_generated"]
    metrics["rollout/tokens_per_s"] = (ledger["tokens_generated"] - previous_tokens) / step_s
    metrics["rollout/restarts"] = measured["num_restarts"]
    if measured[
        "sampled"
    ].new:  # APRIL's ratio (arXiv 2509.18521): last segments of resumed responses, of all new tokens
        metrics["rollout/resumed_share"] = measured["sampled"].resumed / measured["sampled"].new
    metrics["rollout/discarded_tokens"] = measured["sampled"].discarded
    if pauses:
        metrics["rollout/pause_s"] = float(np.mean(pauses))
    return metrics
