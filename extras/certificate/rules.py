"""The numbers of a check of trained tokens, and the four rules of its alarm. No model is needed.

The gap of a token is its recorded log-prob minus the trainer's under the weights of its stamped version. Tokens of a
response depend on each other. So a standard error is one of sums over responses (cluster-robust).

| rule | alarm if | sees |
| --- | --- | --- |
| size | the mean of abs(gap) of some lag is above the limit of the probe | in float32 a change of 1e-4 nats |
| shift | the mean of π/μ, 1 for tokens that μ sampled, is surely not 1 | log-probs with an offset |
| version | the version before, or after, surely explains the log-probs better | a wrong stamp below rounding |
| growth | abs(gap) of older tokens is surely twice that of the freshest | a mismatch that lag brings |

E[π/μ] = 1 holds for every policy π and every sampler μ with the same support, whatever the rounding of the two. So
`shift` needs no limit for a dtype. `version` compares squared distances. With the right stamp, a neighbour lies further
away, by the square of its change. If weights do not change, both are equally far.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.trainer.lag_stats import LAG_BUCKETS, LAST_LAGS

TOKEN = np.dtype(
    [
        ("response", np.int64),
        ("lag", np.int64),
        ("after_update", np.bool_),
        ("recorded", np.float64),
        ("stamped", np.float64),
        ("now", np.float64),
        ("before", np.float64),
        ("after", np.float64),
    ]
)
"""A trained token that was scored again. `response` numbers its response, unique in the run. `lag` is in steps.
`after_update`: an earlier token of the response has another version. The rest are log-probs, nats. `recorded` is the
engine's. The trainer's are under the `stamped` version, the versions `before` and `after` it, and `now`. `now` is the
version that the step trained. NaN means that these weights are not kept."""
SCORES = ("stamped", "now", "before", "after")
SURE = 4.0
"""Standard errors of an alarm. One healthy test in 30,000 exceeds it by chance, if its mean is at the limit."""
MIN_TOKENS = 32
"""Fewest tokens of a mean that is judged."""
MIN_RESPONSES = 8
"""Fewest responses on each side of `growth`. A single response does not show the spread between responses."""
MIN_SHIFT = 0.005
"""Smallest shift of an alarm, nats. Engine and trainer may cut a nucleus (top_p) at other tokens."""
ROUNDING = 0.1
"""Share of the probe's limit below which a gap is rounding, however it grows with the lag."""
RULES = ("size", "shift", "version", "growth")


class Evidence(NamedTuple):
    """A value and its distance from 0 in standard errors."""

    value: float
    sigmas: float


def describe_tokens(tokens: np.ndarray) -> dict[str, float]:
    """Return means over tokens [N] of TOKEN, and over each lag bucket of them, by their names in the log.

    `mismatch` is `recorded` − `stamped`, and `drift` is `stamped` − `now`, in nats per token.
    """
    scored = tokens[~np.isnan(tokens["stamped"])]
    num_unscored = len(tokens) - len(scored)
    metrics = {"tokens": float(len(scored)), "unscored": num_unscored / max(1, len(tokens))}
    metrics |= _means(scored[scored["after_update"]], "/after_update")
    for bucket, part in _by_lag(scored).items():
        metrics |= _means(part, f"/lag_{bucket}")
    return metrics | _means(scored, "")


def judge(
    windows: Sequence[np.ndarray], allowed: float, judges_after_update: bool
) -> dict[str, float]:
    """Return the values of the rules, and `alarm_RULE` 1 or 0 for each, by their names in the log.

    A window is the tokens [N] of TOKEN of the newest checks. A new fault shows best in a short window, a small one in a
    long window. Each rule takes its surest window. `allowed` is the probe's limit, nats. Without `judges_after_update`,
    tokens that follow an update within their response are left out. The option `--on-update keep` computes them with
    older keys on purpose.
    """
    judged = []
    for tokens in windows:
        is_judged = ~np.isnan(tokens["stamped"])
        is_judged &= judges_after_update | ~tokens["after_update"]
        judged.append(tokens[is_judged])
    worst = max(_worst_mean(tokens) for tokens in judged)
    shift = max(
        map(_shift, judged),
        key=lambda evidence: (abs(evidence.value) > MIN_SHIFT, abs(evidence.sigmas)),
    )
    surest = functools.partial(max, key=lambda evidence: evidence.sigmas)
    before = surest(_nearer(tokens, "before") for tokens in judged)
    after = surest(_nearer(tokens, "after") for tokens in judged)
    growth = surest(_growth(tokens, ROUNDING * allowed) for tokens in judged)
    alarms = (
        worst > allowed,
        abs(shift.value) > MIN_SHIFT and abs(shift.sigmas) > SURE,
        max(before.sigmas, after.sigmas) > SURE,
        growth.sigmas > SURE,
    )
    return {
        "worst": worst,
        "shift": shift.value,
        "shift_sigmas": shift.sigmas,
        "version_before_sigmas": before.sigmas,
        "version_after_sigmas": after.sigmas,
        "growth": growth.value,
        "growth_sigmas": growth.sigmas,
    } | {f"alarm_{rule}": float(is_broken) for rule, is_broken in zip(RULES, alarms, strict=True)}


def _gaps(tokens: np.ndarray) -> np.ndarray:
    return tokens["recorded"] - tokens["stamped"]


def _means(tokens: np.ndarray, ending: str) -> dict[str, float]:
    """Return the means of both differences of tokens, their sizes, and estimates k3 of KL; {} without tokens."""
    if not len(tokens):
        return {}
    metrics = {}
    columns = {"mismatch": _gaps(tokens), "drift": tokens["stamped"] - tokens["now"]}
    for name, differences in columns.items():
        metrics[f"{name}{ending}"] = float(differences.mean())
        metrics[f"{name}_abs{ending}"] = float(np.abs(differences).mean())
        metrics[f"{name}_k3{ending}"] = float(np.mean(np.expm1(-differences) + differences))
    return metrics | ({f"tokens{ending}": float(len(tokens))} if ending else {})


def _by_lag(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tokens of each lag bucket that has some."""
    buckets = np.searchsorted(LAST_LAGS, tokens["lag"])
    return {LAG_BUCKETS[bucket]: tokens[buckets == bucket] for bucket in np.unique(buckets)}


def _worst_mean(tokens: np.ndarray) -> float:
    """Return the largest mean of abs(gap), nats, of a lag bucket and of tokens after an update; 0 without any."""
    parts = [*_by_lag(tokens).values(), tokens[tokens["after_update"]]]
    return max(
        (float(np.abs(_gaps(part)).mean()) for part in parts if len(part) >= MIN_TOKENS),
        default=0.0,
    )


def _error(tokens: np.ndarray, values: np.ndarray) -> float:
    """Return the standard error of the sum of values [N], from their sums over responses."""
    _, places = np.unique(tokens["response"], return_inverse=True)
    return float(np.linalg.norm(np.bincount(places, values)))


def _mean(tokens: np.ndarray, values: np.ndarray) -> Evidence:
    """Return the mean of values [N]."""
    error = _error(tokens, values)
    return Evidence(float(values.mean()), float(values.sum() / error) if error else 0.0)


def _shift(tokens: np.ndarray) -> Evidence:
    """Return the mean of π/μ − 1."""
    if len(tokens) < MIN_TOKENS:
        return Evidence(0.0, 0.0)
    return _mean(tokens, np.expm1(-_gaps(tokens)))


def _nearer(tokens: np.ndarray, neighbour: str) -> Evidence:
    """Return by how much a neighbour of the stamped version is nearer to the recorded log-probs, nats²."""
    known = tokens[~np.isnan(tokens[neighbour])]
    if len(known) < MIN_TOKENS:
        return Evidence(0.0, 0.0)
    return _mean(known, _gaps(known) ** 2 - (known["recorded"] - known[neighbour]) ** 2)


def _growth(tokens: np.ndarray, rounding: float) -> Evidence:
    """Return by how much the mean of abs(gap) of older tokens exceeds twice that of the freshest, nats.

    Older tokens have more than the smallest lag. A mean up to `rounding` is no evidence.
    """
    is_old = tokens["lag"] > tokens["lag"].min(initial=np.iinfo(np.int64).max)
    num_old, num_fresh = int(is_old.sum()), int((~is_old).sum())
    responses = (np.unique(tokens["response"][side]) for side in (is_old, ~is_old))
    if min(num_old, num_fresh) < MIN_TOKENS or min(map(len, responses)) < MIN_RESPONSES:
        return Evidence(0.0, 0.0)
    sizes = np.abs(_gaps(tokens))
    old, fresh = sizes[is_old].mean(), sizes[~is_old].mean()
    influence = np.where(is_old, (sizes - old) / num_old, -2 * (sizes - fresh) / num_fresh)
    excess, error = float(old - 2 * fresh), _error(tokens, influence)
    return Evidence(excess, excess / error if error and old > rounding else 0.0)


TEXTS: dict[str, Callable[[dict[str, float]], str]] = {
    "size": lambda m: (
        f"recorded log-probs differ by {m['worst']:.3g} nats on average from those of the stamped weights. Likely "
        "causes: weights that did not arrive whole, keys and values of older weights, or wrong stamps"
    ),
    "shift": lambda m: (
        f"the ratio of stamped to recorded probabilities has a mean of 1 {m['shift']:+.3g}, {m['shift_sigmas']:.3g} "
        "standard errors from 1. Likely cause: the recorded log-probs are not those of the sampling, for example of "
        "another temperature"
    ),
    "version": lambda m: (
        "the version {} the stamped one explains recorded log-probs better, by {:.3g} standard errors. Likely causes: "
        "stamps are off by one, or weights come late".format(
            *max(
                ("before", m["version_before_sigmas"]),
                ("after", m["version_after_sigmas"]),
                key=lambda pair: pair[1],
            )
        )
    ),
    "growth": lambda m: (
        f"the mismatch grows with the lag: it exceeds twice that of the freshest tokens by {m['growth']:.3g} nats, "
        f"{m['growth_sigmas']:.3g} standard errors. Likely causes: wrong stamps, or keys of older weights"
    ),
}
"""The text of each rule's alarm from the values of `judge`."""
