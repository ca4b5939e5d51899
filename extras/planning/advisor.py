"""Which split of devices and which async_ratio would balance rollout and training: arithmetic on what a run measured.

extras/planning/advice.py measures a run and says what comes of it; extras/planning/planner.py has the same step, of
computed rates.

Two predictions of a step's seconds, in device-seconds per step: g of decoding, t of training, on R and S devices of
D = R + S; L is the longest response of a step in seconds, α the async_ratio.

    by the rates    max(g/R, t/S, (g/R + t/S)/(1+α)): no step is faster; a batch holds its place for g/R + t/S at least,
                    and there are 1 + α batches of places
    proposition 2   max(g/R + L/(1+α), t/S), and g/R + L + t/S at α = 0: an upper bound (ROLL Flash, arXiv 2510.11345).
                    Between, 0 < α < 1, the paper has none; ours is the larger of max(…) and (g/R + L + t/S)/(1+α)

The step that was measured lies somewhere between the two, and other settings are expected to lie there too.

The paper's worker serves one sample at a time and takes μ_gen for it, so that N·μ_gen is its g; an engine decodes many
at once, and its share of one sample takes the place of μ_gen. E·N·μ_train is t.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """What a run has measured: means over some steps."""

    async_ratio: float
    rollout_devices: int
    training_devices: int
    unit: str
    """What a device is: `GPU` or `CPU core`."""
    is_shared: bool
    """Whether rollout and training compete for the same devices."""
    samples: int
    """Trained on in a step."""
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
    """Seconds that a step takes at least, if its samples take `generation_s` and the trainer `training_s`.

    With `tail_s`, how much longer the longest response of a batch takes than the mean: about how long. The batch holds
    its places until that one has ended.
    """
    return max(generation_s, training_s, (generation_s + tail_s + training_s) / (1 + alpha))


def most_step_s(generation_s: float, training_s: float, longest_s: float, alpha: float) -> float:
    """Seconds that a step takes at most, if its longest response takes `longest_s`.

    The paper's proposition 2 for α = 0 and α ≥ 1; between them ours, its synchronous bound over 1 + α.
    """
    synchronous = (generation_s + longest_s + training_s) / (1 + alpha)
    overlapped = max(generation_s + longest_s / (1 + alpha), training_s)
    return overlapped if alpha >= 1 else max(synchronous, overlapped)


def predicted_step(
    m: Measured, alpha: float, rollout: float, training: float
) -> tuple[float, float]:
    """Seconds that a step takes at least, by the rates, and at most, by proposition 2, with so many devices."""
    generation_s, training_s = m.decoding_s / rollout, m.training_s / training
    return least_step_s(generation_s, training_s, alpha), most_step_s(
        generation_s, training_s, m.response_max_s, alpha
    )


def tail_share(m: Measured) -> float:
    """Where the measured step lies between both predictions, 0–1: how much of the bound's L is really waited for."""
    low, high = predicted_step(m, m.async_ratio, m.rollout_devices, m.training_devices)
    return min(1.0, max(0.0, (m.step_s - low) / (high - low))) if high > low else 1.0


def expected_step(m: Measured, alpha: float, rollout: int, training: int) -> float:
    """Seconds per step, as far between both predictions as the measured step is."""
    low, high = predicted_step(m, alpha, rollout, training)
    return low + tail_share(m) * (high - low)
