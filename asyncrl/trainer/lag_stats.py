"""Per-token training statistics, averaged overall and by lag: how many steps old a token was when it was trained on."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from algos.kl import k3
from algos.ratio import importance_ratio

T = TypeVar("T")
LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LAST_LAG = (0, 1, 2, 4, 8)  # of each bucket but the last, steps
_WEIGHT, _WEIGHT_SQUARED = "importance weight", "importance weight squared"  # sums for ess, not reported themselves
_SLOPE_SQUARED = "slope squared"
_QUANTILES = {"ratio_q01": 0.01, "ratio_q99": 0.99, "ratio_max": 1.0}


class TokenStats:
    """Sums of per-token statistics by lag bucket, over micro-batches; `reduce` turns them into means over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name → [6] float64; "tokens" counts
        self._log_ratios: list[Tensor] = []  # of tokens, nats
        self._of_sequences: list[Tensor] = []  # their sums over each sequence

    def add_ratios(self, log_ratios: Tensor, sequence_ids: Tensor) -> None:
        """Add log-ratios [N] of current and behavior policy, nats, of the tokens of sequences [N]; not by lag."""
        whole = log_ratios.new_zeros(int(sequence_ids[-1]) + 1).index_add(0, sequence_ids, log_ratios)
        self._log_ratios.append(log_ratios.float())
        self._of_sequences.append(whole.float())

    @property
    def num_added(self) -> int:
        """Micro-batches whose ratios were added."""
        return len(self._of_sequences)

    def sequence_ess(self, since: int) -> float:
        """Effective sample size, 0–1, of the whole ratios of the sequences in micro-batches added since; collective."""
        return _effective_sample_size(_joined(_on_all_ranks(_joined(self._of_sequences[since:]))))

    def add_slopes(self, slopes: Tensor, lags: Tensor) -> None:
        """Add the derivatives [N] of the update's loss with respect to the log-probs of tokens with `lags` [N]."""
        self._add({_SLOPE_SQUARED: slopes.double() ** 2}, lags)

    def add(self, stats: dict[str, Tensor], lags: Tensor) -> None:
        """Add per-token stats [N] of tokens with `lags` [N] int64, steps."""
        columns = {"tokens": torch.ones_like(lags, dtype=torch.float64)} | {k: v.double() for k, v in stats.items()}
        if "weight" in stats or "ratio" in stats:
            columns[_WEIGHT] = columns["weight" if "weight" in stats else "ratio"]
            columns[_WEIGHT_SQUARED] = columns[_WEIGHT] ** 2
        self._add(columns, lags)

    def _add(self, columns: dict[str, Tensor], lags: Tensor) -> None:
        buckets = torch.bucketize(lags, torch.tensor(_LAST_LAG, device=lags.device))
        one_hot = torch.nn.functional.one_hot(buckets, len(LAG_BUCKETS)).double()
        values = torch.stack(list(columns.values()))
        finite = values.nan_to_num(0.0, 0.0, 0.0)  # an infinity times the zeros of one_hot is NaN in every bucket
        sums = (finite @ one_hot).index_add(1, buckets, values - finite)
        for name, total in zip(columns, sums, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + total

    def reduce(self) -> dict[str, float]:
        """Sum over all ranks (collective) and return the means, per name and as `name/lag_BUCKET` where it has tokens.

        Besides the names given: `ess`, the effective sample size over the number of tokens, (Σw)² / (n·Σw²), of the
        importance weights w: the loss's `weight` where it reports one, else `ratio`; absent where all are 0. `slope` is
        the norm of the slopes; `ratio_q01`, `ratio_q99` and `ratio_max` are quantiles of the tokens' ratios;
        `sequence_ess` is the effective sample size of the sequences' whole ratios. `tokens` is a sum.
        """
        mine = {name: sums.tolist() for name, sums in self._sums.items()}
        ratios = _joined(self._log_ratios), _joined(self._of_sequences)
        of_ranks, *ratios = zip(*_on_all_ranks((mine, *ratios)), strict=True)
        names = dict.fromkeys(name for sums in of_ranks for name in sums)
        empty = [0.0] * len(LAG_BUCKETS)  # of a rank that only ran empty micro-batches: it knows no names
        columns = {name: zip(*(s.get(name, empty) for s in of_ranks), strict=True) for name in names}
        sums = {name: [sum(of_bucket) for of_bucket in buckets] for name, buckets in columns.items()}
        metrics = _means({name: sum(values) for name, values in sums.items()}) | _tails(*map(_joined, ratios))
        for i, bucket in enumerate(LAG_BUCKETS):
            means = _means({name: values[i] for name, values in sums.items()})
            metrics |= {f"{name}/lag_{bucket}": mean for name, mean in means.items()}
        return metrics


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Turn sums over n tokens into means; {} where n = 0."""
    n = sums.get("tokens", 0.0)
    if not n:
        return {}
    others = ("tokens", _WEIGHT, _WEIGHT_SQUARED, _SLOPE_SQUARED)
    means = {name: total / n for name, total in sums.items() if name not in others}
    if _SLOPE_SQUARED in sums:
        means["slope"] = math.sqrt(sums[_SLOPE_SQUARED])
    if sums.get(_WEIGHT_SQUARED):
        means["ess"] = sums[_WEIGHT] ** 2 / (n * sums[_WEIGHT_SQUARED])
    return means | {"tokens": n}


def _on_all_ranks(mine: T) -> list[T]:
    """The values of all ranks; collective."""
    of_ranks: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return of_ranks


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.cpu() for part in parts]) if parts else torch.zeros(0)


def _tails(log_ratios: Tensor, of_sequences: Tensor) -> dict[str, float]:
    """Quantiles of the tokens' ratios, and the effective sample size of the sequences'; {} of none."""
    if not len(log_ratios):
        return {}
    places = {name: round(share * (len(log_ratios) - 1)) for name, share in _QUANTILES.items()}
    ordered = importance_ratio(log_ratios.sort().values)
    found = {name: float(ordered[place]) for name, place in places.items()}
    return found | {"sequence_ess": _effective_sample_size(of_sequences)}


def _effective_sample_size(log_weights: Tensor) -> float:
    """(Σw)² / (n·Σw²) of weights that may be beyond a float's range."""
    weights = (log_weights - log_weights.max()).double().exp()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def drift(logprobs: Tensor, behavior_logprobs: Tensor) -> dict[str, Tensor]:
    """Distance of the current policy from the one that sampled, per token [N]: k1, k3 (nats) and the ratio.

    Estimators of KL(behavior ‖ current) from samples of behavior: Schulman, «Approximating KL divergence», 2020.
    """
    log_ratio = logprobs - behavior_logprobs
    return {
        "drift/k1": -log_ratio,
        "drift/k3": k3(behavior_logprobs, logprobs, behavior_logprobs),
        "ratio": importance_ratio(log_ratio),
    }
