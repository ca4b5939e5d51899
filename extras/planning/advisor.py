"""Arithmetic on the split of devices and the async_ratio that balance rollout and training.

It is applied to measurements of a run (extras/planning/advice.py) and to computed rates (extras/planning/planner.py).

There are two predictions of a step's seconds, from device-seconds per step. Decoding takes g of them on R devices.
Training takes t of them on S devices. The longest response of a step takes L seconds, and α is the async_ratio.

    by the rates    max(g/R, t/S, (g/R + t/S)/(1+α)): no step is faster. A batch holds its place for g/R + t/S at least,
                    and there are places for 1 + α batches.
    proposition 2   max(g/R + L/(1+α), t/S), and g/R + L + t/S at α = 0: an upper bound (ROLL Flash, arXiv 2510.11345).
                    For 0 < α < 1 the paper has no bound. Ours is the larger of max(…) and (g/R + L + t/S)/(1+α).

A measured step lies between the two, and other settings are expected to lie there, too.

A worker of the paper serves one sample at a time and takes μ_gen for it. So N·μ_gen is its g. An engine decodes many
samples at once, and its share of one sample takes the place of μ_gen. E·N·μ_train is t.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Measured:
    """Measurements of a run: means over some steps."""

    async_ratio: float
    rollout_devices: int
    training_devices: int
    unit: str
    """Unit of devices: `GPU` or `CPU core`."""
    is_shared: bool
    """True if rollout and training compete for the same devices."""
    samples: int
    """Responses of a step."""
    decoding_s: float
    """Device-seconds of decoding that a step's samples need (g)."""
    training_s: float
    """Device-seconds that the trainer needs for a step (t)."""
    response_mean_s: float
    response_max_s: float
    """Longest response of a step, seconds (L)."""
    step_s: float


# Arithmetic


def least_step_s(
    generation_s: float, training_s: float, alpha: float, tail_s: float = 0.0
) -> float:
    """Return the least seconds of a step whose samples take `generation_s` and whose training takes `training_s`.

    `tail_s` is the extra time of the longest response of a batch over the mean one. With it the step is about so long,
    because the batch holds its places until that response has ended. Arguments can be arrays.
    """
    overlapped = np.maximum(generation_s, training_s)
    return np.maximum(overlapped, (generation_s + tail_s + training_s) / (1 + alpha))


def most_step_s(generation_s: float, training_s: float, longest_s: float, alpha: float) -> float:
    """Return the most seconds of a step whose longest response takes `longest_s`.

    It is proposition 2 of the paper for α = 0 and α ≥ 1. Between them it is ours: the synchronous bound over 1 + α.
    """
    synchronous = (generation_s + longest_s + training_s) / (1 + alpha)
    overlapped = max(generation_s + longest_s / (1 + alpha), training_s)
    return overlapped if alpha >= 1 else max(synchronous, overlapped)


def predicted_step(
    m: Measured, alpha: float, rollout: float, training: float
) -> tuple[float, float]:
    """Return the seconds of a step with so many devices: by the rates, and by proposition 2."""
    generation_s, training_s = m.decoding_s / rollout, m.training_s / training
    return least_step_s(generation_s, training_s, alpha), most_step_s(
        generation_s, training_s, m.response_max_s, alpha
    )


def predicted_lag(
    alpha: float, publish_delay: int, group_steps: float, busy_share: float
) -> tuple[float, float]:
    """Return the mean staleness of trained groups in steps: by the rates, and with all places taken.

    `alpha` is outstanding groups over the groups of a step, − 1. `group_steps` is T/s, the time of a group over that of
    a step. A group lasts from its first start to its last end. `busy_share` is ρ, the share of a step that the trainer
    works.

        by the rates        K + min(α, T/s + ρ)        K is publish_delay
        all places taken    K + α

    A group starts under version v and is trained on by version u. It is present at each of the u − v announcements
    between them. So without K the lag is the mean number of such groups at an announcement, over B. They are at most
    α·B, because there are (1 + α)·B places. The batch that was just trained holds B of them.

    If the trainer takes each batch when B groups are ready, B·T/s groups run, by Little's law. Another ρ·B have ended
    since then. Applied Compute has this sum, with concurrency times tail over batch for T/s (Predicting and
    controlling staleness in fully asynchronous RL training, 3 July 2026). Groups pile up behind a straggler that must
    be waited for, and before a trainer that never waits. They do so until all places are taken.
    """
    return publish_delay + min(alpha, group_steps + busy_share), publish_delay + alpha


def tail_share(m: Measured) -> float:
    """Return the place of the measured step between both predictions, 0–1: the share of L that is waited for."""
    low, high = predicted_step(m, m.async_ratio, m.rollout_devices, m.training_devices)
    return min(1.0, max(0.0, (m.step_s - low) / (high - low))) if high > low else 1.0


def expected_step(m: Measured, alpha: float, rollout: int, training: int) -> float:
    """Return the expected seconds of a step: at the place of the measured step between both predictions."""
    low, high = predicted_step(m, alpha, rollout, training)
    return low + tail_share(m) * (high - low)
