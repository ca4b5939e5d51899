"""Per-token training statistics, averaged overall and by lag: how many steps old a token was when it was trained on."""

import torch
import torch.distributed as dist
from torch import Tensor

from algos.kl import k3
from algos.ratio import importance_ratio

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
_LAST_LAG = (0, 1, 2, 4, 8)  # of each bucket but the last, steps
_WEIGHT, _WEIGHT_SQUARED = "importance weight", "importance weight squared"  # sums for ess, not reported themselves


class TokenStats:
    """Sums of per-token statistics by lag bucket, over micro-batches; `reduce` turns them into means over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}  # name → [6] float64; "tokens" counts

    def add(self, stats: dict[str, Tensor], lags: Tensor) -> None:
        """Add per-token stats [N] of tokens with `lags` [N] int64, steps."""
        buckets = torch.bucketize(lags, torch.tensor(_LAST_LAG, device=lags.device))
        one_hot = torch.nn.functional.one_hot(buckets, len(LAG_BUCKETS)).double()
        columns = {"tokens": torch.ones_like(lags, dtype=torch.float64)} | {k: v.double() for k, v in stats.items()}
        if "weight" in stats or "ratio" in stats:
            columns[_WEIGHT] = columns["weight" if "weight" in stats else "ratio"]
            columns[_WEIGHT_SQUARED] = columns[_WEIGHT] ** 2
        values = torch.stack(list(columns.values()))
        finite = values.nan_to_num(0.0, 0.0, 0.0)  # an infinity times the zeros of one_hot is NaN in every bucket
        sums = (finite @ one_hot).index_add(1, buckets, values - finite)
        for name, total in zip(columns, sums, strict=True):
            self._sums[name] = self._sums.get(name, 0.0) + total

    def reduce(self) -> dict[str, float]:
        """Sum over all ranks (collective) and return the means, per name and as `name/lag_BUCKET` where it has tokens.

        Besides the names given: `ess`, the effective sample size over the number of tokens, (Σw)² / (n·Σw²), of the
        importance weights w: the loss's `weight` where it reports one, else `ratio`; absent where all are 0.
        `tokens` is a sum, not a mean.
        """
        mine = {name: sums.tolist() for name, sums in self._sums.items()}
        of_ranks: list[dict[str, list[float]] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, mine)
        names = dict.fromkeys(name for sums in of_ranks for name in sums)
        empty = [0.0] * len(LAG_BUCKETS)  # of a rank that only ran empty micro-batches: it knows no names
        columns = {name: zip(*(s.get(name, empty) for s in of_ranks), strict=True) for name in names}
        sums = {name: [sum(of_bucket) for of_bucket in buckets] for name, buckets in columns.items()}
        metrics = _means({name: sum(values) for name, values in sums.items()})
        for i, bucket in enumerate(LAG_BUCKETS):
            means = _means({name: values[i] for name, values in sums.items()})
            metrics |= {f"{name}/lag_{bucket}": mean for name, mean in means.items()}
        return metrics


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Turn sums over n tokens into means; {} where n = 0."""
    n = sums.get("tokens", 0.0)
    if not n:
        return {}
    means = {name: total / n for name, total in sums.items() if name not in ("tokens", _WEIGHT, _WEIGHT_SQUARED)}
    if sums.get(_WEIGHT_SQUARED):
        means["ess"] = sums[_WEIGHT] ** 2 / (n * sums[_WEIGHT_SQUARED])
    return means | {"tokens": n}


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
