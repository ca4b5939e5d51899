"""Tells whether an engine has the version that it reports, or an older one, by the trainer's change between versions.

Engine and trainer round differently, in bfloat16 by more than a version changes. But rounding has no direction, and an
older version lies back along the trainer's own change. Two slopes over all probe tokens measure this.
`versions_behind` is the engine's distance behind its version, and `versions_ahead` is its distance ahead of the version
before. The change at a version is half of the difference between the next version and the one before. So its rounding
is that of other versions than the compared one, and does not bias either slope.

| the engine has      | versions_behind | versions_ahead |
|---------------------|-----------------|----------------|
| the version itself  | 0               | 1              |
| half of its tensors | 0.5             | 0.5            |
| the version before  | 1               | 0              |

Rounding in the changes divides both slopes by the same factor, so only their proportion decides.
"""

from dataclasses import dataclass

import numpy as np

SURE = 6.0
"""Standard errors of a sure answer. Tokens round alike, so the true error is up to twice the computed one."""
TOLERATED = 1 / 3
"""Share of `versions_ahead` that `versions_behind` must exceed in an alarm, because trainer and engine may always
differ a little."""
ALLOWED_MISMATCH = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.02}
"""Largest mean difference of an engine that has the trainer's weights, nats per token, by the dtype of computing.

On a CPU the tiny model has 2e-6 in float32, 0.003 in float16 and 0.03 in bfloat16. The tokens are random. SmolLM2-135M
has 0.07 in bfloat16, or 0.12 for sequences of 16 tokens. The largest of 239 versions of its stored runs is 0.063. If
one norm of the tiny model is not sent, the difference is 0.4 or more. Means over steps of SmolLM2-135M on an H200 are
0.043 to 0.052 in bfloat16. In float16 they are 0.005 to 0.007."""


@dataclass(frozen=True)
class Arrival:
    """Distance of an engine behind the version that it reports."""

    versions_behind: float
    """Versions behind the reported one."""
    versions_behind_error: float
    """Its standard error."""
    versions_ahead: float
    """Versions ahead of the version before."""
    late_sigmas: float
    """Excess of `versions_behind` over TOLERATED · `versions_ahead`, standard errors."""
    current_sigmas: float
    """Excess of `versions_ahead` over `versions_behind`, standard errors."""


def measure_arrival(products: np.ndarray, squares: np.ndarray) -> Arrival | None:
    """Return the distance of an engine behind its version from sums over publishes, [2, N] float64 each.

    The first row is for `versions_behind` and the second for `versions_ahead`, of N tokens each. Returns None if no
    weight has changed.

    `products` are of changes and distances, `squares` of changes. A token is one observation however often it was
    compared, because its rounding persists.
    """
    totals = squares.sum(axis=1)
    if not totals.all():
        return None
    versions_behind, versions_ahead = slopes = products.sum(axis=1) / totals
    errors = (products - slopes[:, None] * squares) / totals[:, None]

    def excess(weights: np.ndarray) -> float:
        """Return a weighted sum of the two slopes in its standard errors."""
        error = np.linalg.norm(weights @ errors)
        return float(weights @ slopes / max(error, np.finfo(float).tiny))

    return Arrival(
        float(versions_behind),
        float(np.linalg.norm(errors[0])),
        float(versions_ahead),
        excess(np.array([1, -TOLERATED])),
        excess(np.array([-1, 1])),
    )


class Arrivals:
    """Sums of one engine, over the versions that this start of a run compares."""

    def __init__(self) -> None:
        self._whole = self._recent = np.zeros((2, 2, 1))
        self._newest = -1
        self.num_versions = 0
        """Versions that were compared."""

    def add(self, version: int, engine: np.ndarray, trainer: list[np.ndarray]) -> None:
        """Add an engine's log-probs of a version, and the trainer's from two versions before to one after.

        Each has [N] nats. A version counts once."""
        if version <= self._newest:
            return
        self._newest = version
        self.num_versions += 1
        if self.recent is not None and self.recent.late_sigmas <= 0:
            # A fault must not be diluted by versions before it.
            self._recent = np.zeros((2, 2, 1))
        two_before, before, same, after = (scores.astype(np.float64) for scores in trainer)
        changes = np.stack([after - before, same - two_before]) / 2
        distances = np.stack([same - engine, engine - before])
        sums = np.stack([changes * distances, changes**2])
        self._whole = self._whole + sums
        self._recent = self._recent + sums

    @property
    def whole(self) -> Arrival | None:
        """Return the distance over all compared versions."""
        return measure_arrival(*self._whole)

    @property
    def recent(self) -> Arrival | None:
        """Return the distance since the engine was last nearer to its version than to older ones."""
        return measure_arrival(*self._recent)
