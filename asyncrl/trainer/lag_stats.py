"""Statistics of trained tokens, averaged over all tokens and by lag (the age of a token in steps)."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from algos.kl import k3
from algos.ratio import importance_ratio
from asyncrl.cluster.cluster import gather_from_ranks
from asyncrl.trainer.logprobs import TokenScores
from asyncrl.trainer.packing import MicroBatch, RankShare

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
LAST_LAGS = (0, 1, 2, 4, 8, 16)
"""Largest lag of each bucket but the last, steps."""
QUANTILES = {"loss/ratio_q01": 0.01, "loss/ratio_q99": 0.99, "loss/ratio_max": 1.0}
NUM_TRAINED = "tokens/trained"
WEIGHT = "importance weight"
WEIGHT_SQUARED = "importance weight squared"
SLOPE_SQUARED = "slope squared"
NOT_REPORTED = (WEIGHT, WEIGHT_SQUARED, SLOPE_SQUARED)
"""Sums behind `loss/ess` and `loss/slope`."""


class TokenStats:
    """Sums of token statistics by lag bucket, over micro-batches. `reduce` turns them into means over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        """[buckets] float64 by name, on the tokens' device: only `reduce` waits for a GPU. NUM_TRAINED is a count."""
        self._log_ratios: list[Tensor] = []
        """Log-ratios of each micro-batch, [N] float32 nats."""
        self.sequence_log_ratios: list[Tensor] = []
        """Their sums over the sequences of each micro-batch, [S] float32 nats."""

    def add_scores(
        self, batch: MicroBatch, scores: TokenScores, loss_stats: dict[str, Tensor]
    ) -> None:
        """Add a micro-batch: its scores by the current policy, and the stats of its loss.

        The backward pass adds the slopes later. drift/k1 and drift/k3 estimate KL(behavior ‖ current) in nats. Their
        samples are of the behavior policy (Schulman, «Approximating KL divergence», 2020).
        """
        logprobs = scores.logprobs.detach()
        behavior_logprobs = batch.columns["behavior_logprobs"]
        log_ratios = logprobs - behavior_logprobs
        stats = {
            "drift/k1": -log_ratios,
            "drift/k3": k3(behavior_logprobs, logprobs, behavior_logprobs),
            "loss/ratio": importance_ratio(log_ratios),
            "loss/entropy": scores.entropy.detach(),
            "loss/advantage": batch.advantages,
            "loss/reward": batch.rewards,
            "loss/length": batch.trained_in_trajectory,
        }
        self.add(stats | loss_stats, batch.lags)
        sums = log_ratios.new_zeros(batch.num_sequences)
        self._log_ratios.append(log_ratios)
        self.sequence_log_ratios.append(sums.index_add(0, batch.sequence_ids, log_ratios))

        def add_slopes(slopes: Tensor) -> None:
            squares = (slopes / dist.get_world_size()).double() ** 2
            self._add({SLOPE_SQUARED: squares}, batch.lags)

        scores.logprobs.register_hook(add_slopes)

    def sequence_ess(self, since: int) -> float:
        """Return the effective sample size, 0–1, of the sequences' ratios; collective.

        It leaves out the first `since` micro-batches.
        """
        return _effective_sample_size(
            _joined(gather_from_ranks(_joined(self.sequence_log_ratios[since:])))
        )

    def add(self, stats: dict[str, Tensor], lags: Tensor) -> None:
        """Add per-token stats [N], by their names in the log, of tokens with `lags` [N] int64, steps."""
        columns = {NUM_TRAINED: torch.ones_like(lags), **stats}
        weight = columns.get("loss/weight", columns.get("loss/ratio"))
        if weight is not None:
            columns[WEIGHT] = weight
            columns[WEIGHT_SQUARED] = weight.double() ** 2
        self._add(columns, lags)

    def _add(self, columns: dict[str, Tensor], lags: Tensor) -> None:
        # A tensor of bounds would be copied to the GPU, and the host would wait.
        buckets = sum((lags > last).long() for last in LAST_LAGS)
        values = torch.stack([column.detach().double() for column in columns.values()])
        by_bucket = [
            torch.where(buckets == index, values, 0.0).sum(1) for index in range(len(LAG_BUCKETS))
        ]
        for name, total in zip(columns, torch.stack(by_bucket, 1), strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + total

    def reduce(self) -> dict[str, float]:
        """Return the means over all ranks, by name and by `name/lag_BUCKET` for buckets with tokens; collective.

        More names: `loss/ess` is the effective sample size of tokens, (Σw)² / (n·Σw²). Its weights w are the loss's
        `weight`, or `ratio` if it reports no weight. It is absent if all are 0. `loss/slope` is the norm of the slopes.
        `loss/ratio_q01`, `ratio_q99` and `ratio_max` are quantiles of the tokens' ratios. `loss/sequence_ess` is the
        effective sample size of the sequences' ratios. `tokens/trained` and `tokens/trained_lag_BUCKET` are sums.
        """
        sums = {name: total.cpu().numpy() for name, total in self._sums.items()}
        ranks = gather_from_ranks(
            (sums, _joined(self._log_ratios), _joined(self.sequence_log_ratios))
        )
        sums_of_ranks, log_ratios, sequence_log_ratios = zip(*ranks, strict=True)
        totals = Counter()
        for sums in sums_of_ranks:
            totals.update(sums)
        metrics = _means({name: float(buckets.sum()) for name, buckets in totals.items()})
        metrics |= _tails(_joined(log_ratios), _joined(sequence_log_ratios))
        for index, bucket in enumerate(LAG_BUCKETS):
            means = _means({name: float(buckets[index]) for name, buckets in totals.items()})
            if means:
                metrics[f"{NUM_TRAINED}_lag_{bucket}"] = means.pop(NUM_TRAINED)
            metrics |= {f"{name}/lag_{bucket}": mean for name, mean in means.items()}
        return metrics


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Turn sums over n tokens into means; {} if n = 0."""
    num_tokens = sums.get(NUM_TRAINED, 0.0)
    if not num_tokens:
        return {}
    means = {name: total / num_tokens for name, total in sums.items() if name not in NOT_REPORTED}
    if SLOPE_SQUARED in sums:
        means["loss/slope"] = math.sqrt(sums[SLOPE_SQUARED])
    if sums.get(WEIGHT_SQUARED):
        means["loss/ess"] = sums[WEIGHT] ** 2 / (num_tokens * sums[WEIGHT_SQUARED])
    return means | {NUM_TRAINED: num_tokens}


def staleness_metrics(share: RankShare, policy_version: int) -> dict[str, float]:
    """Return the number and staleness of the trajectories of a step, over all ranks; collective.

    `tokens/forward` counts the tokens of one pass over the step. `samples` counts trajectories, once for all epochs.
    `staleness/mean` and `max` are over trajectories, `token_mean` is over tokens, all in steps behind `policy_version`.
    The `staleness/*` metrics are absent if there is no trajectory.
    """
    bundles = list(itertools.chain(*itertools.chain(*share)))
    num_read = sum(bundle.num_tokens for bundle in bundles)
    sequences = [sequence for bundle in bundles for sequence in bundle.sequences]
    oldest = [s.oldest_version for s in sequences if s.oldest_version is not None]
    versions = [s.policy_versions[s.loss_mask] for s in sequences]
    ranks = gather_from_ranks(
        (num_read, oldest, np.concatenate([np.zeros(0, np.int32), *versions]))
    )
    nums_read, *parts = zip(*ranks, strict=True)
    staleness, lags = (policy_version - np.concatenate(part) for part in parts)
    metrics = {"tokens/forward": float(sum(nums_read)), "samples": len(staleness)}
    if len(staleness):
        metrics |= {
            "staleness/mean": float(staleness.mean()),
            "staleness/max": int(staleness.max()),
            "staleness/token_mean": float(lags.mean()),
        }
    return metrics


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0), *(part.cpu() for part in parts)])


def _tails(log_ratios: Tensor, sequence_log_ratios: Tensor) -> dict[str, float]:
    """Return quantiles of the tokens' ratios and the sequences' effective sample size; {} without tokens."""
    if not len(log_ratios):
        return {}
    ratios = importance_ratio(log_ratios)
    quantiles = np.quantile(ratios, list(QUANTILES.values()), method="nearest").tolist()
    ess = _effective_sample_size(sequence_log_ratios)
    return {**dict(zip(QUANTILES, quantiles, strict=True)), "loss/sequence_ess": ess}


def _effective_sample_size(log_weights: Tensor) -> float:
    """Return (Σw)² / (n·Σw²). The weights themselves may exceed a float's range."""
    weights = (log_weights - log_weights.max()).double().exp()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))
