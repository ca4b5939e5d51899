"""Tells whether an engine has the version that it reports, or an older one, by the trainer's change between versions.

Engine and trainer round differently, in bfloat16 by more than a version changes. But rounding has no direction, and an
older version lies back along the trainer's own change. Two slopes over all probe tokens measure this. `lag` is the
engine's distance behind its version, and `lead` is its distance ahead of the version before. The change at a version
is half of the difference between the next version and the one before. So its rounding is that of other versions than
the compared one, and does not bias either slope.

|                                   | lag | lead |
|-----------------------------------|-----|------|
| the version itself                | 0   | 1    |
| half of its tensors               | 0.5 | 0.5  |
| the version before                | 1   | 0    |

Rounding in the changes divides both slopes by the same factor, so only their proportion decides.
"""

from dataclasses import dataclass

import numpy as np

SURE = 6.0
"""Standard errors of a sure answer. Tokens round alike, so the true error is up to twice the computed one."""
TOLERATED = 1 / 3
"""Share of `lead` that `lag` must exceed in an alarm, because trainer and engine may always differ a little."""


@dataclass(frozen=True)
class EngineLag:
    """Distance of an engine behind the version that it reports."""

    lag: float
    """Versions behind."""
    lag_error: float
    """Its standard error."""
    lead: float
    """Versions ahead of the version before."""
    behind: float
    """Standard errors by which `lag` exceeds TOLERATED · `lead`."""
    right: float
    """Standard errors by which `lead` exceeds `lag`."""


def measure_lag(products: np.ndarray, squares: np.ndarray) -> EngineLag | None:
    """Return the lag of an engine from sums over publishes, [2, N] float64 each, for lag and lead of N tokens.

    Returns None if no weight has changed.

    `products` are of changes and distances, `squares` of changes. A token is one observation however often it was
    compared, because its rounding persists.
    """
    totals = squares.sum(axis=1)
    if not totals.all():
        return None
    lag, lead = slopes = products.sum(axis=1) / totals
    errors = (products - slopes[:, None] * squares) / totals[:, None]

    def excess(weights: np.ndarray) -> float:
        """Return a weighted sum of lag and lead in its standard errors."""
        error = np.linalg.norm(weights @ errors)
        return float(weights @ slopes / max(error, np.finfo(float).tiny))

    return EngineLag(
        float(lag),
        float(np.linalg.norm(errors[0])),
        float(lead),
        excess(np.array([1, -TOLERATED])),
        excess(np.array([-1, 1])),
    )


class Arrivals:
    """The scores of one engine, over the versions that this start of a run compares."""

    def __init__(self) -> None:
        self._whole = self._recent = np.zeros((2, 2, 1))
        self._newest = -1

    def add(self, version: int, engine: np.ndarray, trainer: list[np.ndarray]) -> None:
        """Add an engine's log-probs of a version, and the trainer's from two versions before to one after.

        Each has [N] nats. A version counts once."""
        if version <= self._newest:
            return
        self._newest = version
        if self.recent is not None and self.recent.behind <= 0:
            # A fault must not be diluted by versions before it.
            self._recent = np.zeros((2, 2, 1))
        two_before, before, same, after = (scores.astype(np.float64) for scores in trainer)
        changes = np.stack([after - before, same - two_before]) / 2
        distances = np.stack([same - engine, engine - before])
        sums = np.stack([changes * distances, changes**2])
        self._whole = self._whole + sums
        self._recent = self._recent + sums

    @property
    def whole(self) -> EngineLag | None:
        """Return the lag over all compared versions."""
        return measure_lag(*self._whole)

    @property
    def recent(self) -> EngineLag | None:
        """Return the lag since the engine was last nearer to its version than to older ones."""
        return measure_lag(*self._recent)
