"""What a run's steps tell the advisor (extras/planning/advisor.py), and the advice in words, with its arithmetic.

And how many machines are enough for a run that others sample for: see `rate_that_suffices`.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.cluster.placement import Placement
from asyncrl.config import Config
from asyncrl.runlog.metrics import RolloutReport
from extras.planning.advisor import Measured, expected_step, predicted_step, tail_share

FIRST_STEPS = 20
"""Steps after which advice is given; the first quarter of them is not looked at, as everything is still filling."""
MIN_STEPS = 8
ALPHAS = (0.0, 1.0, 2.0, 4.0, 8.0)
NEAR = 1.1
"""A step within this factor of the best is as good: the rest is within the arithmetic's error, and costs staleness."""


@dataclass(frozen=True)
class StepTold:
    """What one step tells."""

    metrics: dict[str, float]
    rollout: RolloutReport
    responses: tuple[tuple[int, float, float], ...]
    """Worker, start and end of each that was trained on, from ticket to reward, Unix seconds."""

    @property
    def busy_s(self) -> float:
        """What the trainer did not wait, seconds."""
        return self.metrics["time/step_s"] - self.metrics["time/wait_s"]


def measure(steps: list[StepTold], config: Config, placement: Placement) -> Measured:
    """Means over the steps, of which there are MIN_STEPS, but their first quarter."""
    rollout, training, unit, is_shared = _devices(placement)
    first = len(steps) // 4
    before, settled = steps[first - 1], steps[first:]
    generated = settled[-1].metrics["tokens/generated"] - before.metrics["tokens/generated"]
    sampled = sum(step.rollout.sampled.new for step in settled)  # by evaluations, too
    for_training = min(1.0, generated / sampled) if sampled else 1.0
    decoding_s = statistics.fmean(step.rollout.worker_time["decoding"] / 1e9 for step in settled) * for_training
    took_s = [[end - start for _, start, end in step.responses] for step in settled]
    return Measured(
        async_ratio=config.async_ratio,
        rollout_devices=rollout,
        training_devices=training,
        unit=unit,
        is_shared=is_shared,
        samples=config.groups_per_step * config.group_size,
        decoding_s=decoding_s * rollout / len(placement.workers),
        training_s=statistics.fmean(step.busy_s for step in settled) * training,
        response_mean_s=statistics.fmean(map(statistics.fmean, took_s)),
        response_max_s=statistics.fmean(map(max, took_s)),
        step_s=statistics.fmean(step.metrics["time/step_s"] for step in settled),
    )


def _devices(placement: Placement) -> tuple[int, int, str, bool]:
    """Devices of rollout and of training, what they are, and whether both use the same ones."""
    if placement.trainer_gpus[0] is not None:
        shared = any(worker.shared_with_rank is not None for worker in placement.workers)
        return sum(worker.num_gpus for worker in placement.workers), len(placement.trainer_gpus), "GPU", shared
    training = placement.trainer_threads * len(placement.trainer_gpus)
    return sum(worker.cpu_threads for worker in placement.workers), training, "CPU core", True


# Devices and α


def training_share_by_rates(m: Measured) -> float:
    """Share of the devices with which training is as fast as decoding: t / (g + t)."""
    return m.training_s / (m.decoding_s + m.training_s)


def training_share_by_proposition_2(m: Measured, alpha: float) -> float:
    """The paper's β* = t / (g + D·L/(α+1) + t), at which training takes all the time that the bound allows it."""
    devices = m.rollout_devices + m.training_devices
    return m.training_s / (m.decoding_s + devices * m.response_max_s / (alpha + 1) + m.training_s)


def best_split(m: Measured, alpha: float) -> tuple[int, int]:
    """Devices for rollout and for training with the least expected step; the present ones where nothing is better."""
    now = (m.rollout_devices, m.training_devices)
    if m.is_shared and m.unit == "GPU":
        return now
    total = sum(now)
    splits = [now, *((total - training, training) for training in range(1, total))]
    return min(splits, key=lambda split: expected_step(m, alpha, *split))


def best_alpha(m: Measured) -> float:
    """The least α that is NEAR as good as any, each with its best split."""
    seconds = {alpha: expected_step(m, alpha, *best_split(m, alpha)) for alpha in {*ALPHAS, m.async_ratio}}
    return min(alpha for alpha, s in seconds.items() if s <= NEAR * min(seconds.values()))


# Machines


@dataclass(frozen=True)
class Machines:
    """What a run that machines have joined knows of its rollout workers, and of what the trainer asks of them."""

    rates: tuple[float, ...]
    """Responses/s of each worker in the time in which it samples any (μ); there is at least one."""
    responses: int
    """Trained on in a step (R)."""
    train_s: float
    """That the trainer needs for a step, without its waits (T_train)."""
    broadcast_s: float
    """From a publication until a machine has the weights, mean of the machines (T_broadcast)."""
    refresh_lag: int
    """Steps from one refresh of a machine to the next (κ), at least 1."""


def rate_that_suffices(m: Machines) -> float:
    """Responses/s with which all machines together do not keep the trainer waiting; infinite if no rate is enough.

    ECHO-2 (arXiv 2602.02192): the responses of κ steps and one broadcast of weights fit into κ steps of training,

        κR/Σμ + T_broadcast ≤ κ·T_train,   so   Σμ ≥ κR / (κ·T_train − T_broadcast).

    It takes a machine to stand still while weights come to it, and knows no longest response: where machines sample on
    meanwhile less is enough, with few responses a step more is needed.
    """
    left_s = m.refresh_lag * m.train_s - m.broadcast_s
    return m.refresh_lag * m.responses / left_s if left_s > 0 else math.inf


def machines_that_suffice(m: Machines) -> float:
    """Number of machines that are enough: the fastest of those there are, then more of their median rate."""
    needed, rates = rate_that_suffices(m), sorted(m.rates, reverse=True)
    enough = (count for count, rate in enumerate(itertools.accumulate(rates), start=1) if rate >= needed)
    missing = (needed - sum(rates)) / statistics.median(rates)
    return next(enough, None) or len(rates) + (missing if math.isinf(missing) else math.ceil(missing))


def measure_machines(steps: list[StepTold], config: Config) -> Machines:
    """What the steps tell; the rates are those of the last MIN_STEPS, as machines leave."""
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for worker, start, end in itertools.chain(*(step.responses for step in steps[-MIN_STEPS:])):
        spans[worker].append((start, end))
    settled = steps[len(steps) // 4 :]
    broadcasts_s = [seconds for step in settled for seconds in step.rollout.broadcasts_s]
    return Machines(
        rates=tuple(len(of) / _covered_s(of) for of in spans.values()),
        responses=config.groups_per_step * config.group_size,
        train_s=statistics.fmean(step.busy_s for step in settled),
        broadcast_s=statistics.fmean(broadcasts_s or [0.0]),
        refresh_lag=max(1, config.swarm.refresh_lag),
    )


def _covered_s(spans: list[tuple[float, float]]) -> float:
    """Seconds that lie in any of these spans."""
    covered_s, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered_s, until = covered_s + max(0.0, end - max(start, until)), max(until, end)
    return covered_s


# Text


def advice_of(steps: list[StepTold], config: Config, placement: Placement) -> str:
    """The advice that these steps give: on machines where they may join, else on α and the split of devices."""
    if config.listen is not None:
        return advise_on_machines(measure_machines(steps, config))
    return advise(measure(steps, config, placement))


def advise(m: Measured) -> str:
    """The advice, with its arithmetic."""
    return "\n".join([*_measurements(m), *_balance(m), *_predictions(m), *_advice(m), *_caveats(m)])


def _measurements(m: Measured) -> Iterator[str]:
    yield (
        f"advice on α (now {m.async_ratio:g}) and on the split of {m.rollout_devices + m.training_devices} {m.unit}s "
        f"(now {_split(m.rollout_devices, m.training_devices)}); a step took {m.step_s:.3f} s"
    )
    yield (
        f"  {m.samples} samples need g = {m.decoding_s:.3f} {m.unit}-seconds of decoding and t = {m.training_s:.3f} of "
        f"training; a response takes {m.response_mean_s:.3f} s, the longest of a step L = {m.response_max_s:.3f} s"
    )


def _balance(m: Measured) -> Iterator[str]:
    g, t, devices = m.decoding_s, m.training_s, m.rollout_devices + m.training_devices
    yield (
        f"  share of the devices that balances training: by the rates t/(g+t) = {t:.3f}/({g:.3f}+{t:.3f}) = "
        f"{training_share_by_rates(m):.0%}; by ROLL Flash, proposition 2, t/(g+D·L/(α+1)+t) = "
        f"{t:.3f}/({g:.3f}+{devices}·{m.response_max_s:.3f}/{m.async_ratio + 1:g}+{t:.3f}) = "
        f"{training_share_by_proposition_2(m, m.async_ratio):.0%}; now {m.training_devices / devices:.0%}"
    )


def _predictions(m: Measured) -> Iterator[str]:
    yield "  predicted seconds per step, at least (rates) … at most (proposition 2):"
    now = (m.rollout_devices, m.training_devices)
    for alpha in sorted({*ALPHAS, m.async_ratio}):
        best = best_split(m, alpha)
        line = f"    α = {alpha:<4g} {_range(m, alpha, *now)}" + (" (now)" if alpha == m.async_ratio else "")
        yield line if best == now else f"{line}; with {_split(*best)} {_range(m, alpha, *best)}"


def _advice(m: Measured) -> Iterator[str]:
    alpha = best_alpha(m)
    before, split = (m.rollout_devices, m.training_devices), best_split(m, alpha)
    changes = [f"--async-ratio {alpha:g}"] * (alpha != m.async_ratio) + [_split(*split)] * (split != before)
    if not changes:
        yield "  advice: leave both as they are"
        return
    now, then = (m.async_ratio, *before), (alpha, *split)
    rates, bound = (one / other for one, other in zip(predicted_step(m, *now), predicted_step(m, *then), strict=True))
    expected = expected_step(m, *now) / expected_step(m, *then)
    yield (
        f"  advice: {', '.join(changes)}: predicted {expected:.2f}× ({rates:.2f}× by the rates, {bound:.2f}× by "
        f"proposition 2, of whose tail {tail_share(m):.0%} was waited for in the steps measured)"
    )


def _caveats(m: Measured) -> Iterator[str]:
    if not m.is_shared:
        return
    yield (
        f"  rollout and training share these {m.unit}s: each side's seconds were measured "
        + ("while the other stood still" if m.async_ratio == 0 else "while the other took part of them")
        + ". They say which side is slower; overlapping gains only what one side leaves idle, so the predictions "
        + ("for α > 0 promise too much" if m.async_ratio == 0 else "for less overlap are too slow")
    )


def _range(m: Measured, alpha: float, rollout: int, training: int) -> str:
    low, high = predicted_step(m, alpha, rollout, training)
    return f"{low:.3f} … {high:.3f}"


def _split(rollout: int, training: int) -> str:
    return f"{rollout} for rollout + {training} for training"


def advise_on_machines(m: Machines) -> str:
    """The advice on how many machines are enough, with its arithmetic."""
    lag, rate, have, enough = m.refresh_lag, sum(m.rates), len(m.rates), machines_that_suffice(m)
    left_s, right_s = lag * m.responses / rate + m.broadcast_s, lag * m.train_s
    if math.isinf(enough):
        advice = (
            f"no number of machines is enough, as T_broadcast ≥ κ·T_train: refresh_lag must be at least "
            f"{math.floor(m.broadcast_s / m.train_s) + 1}, or weights must come faster"
        )
    elif enough > have:
        advice = f"{enough - have} more machines of the median rate {statistics.median(m.rates):.3g}/s are enough"
    else:
        advice = f"the fastest {enough} of them are enough"
    return (
        f"advice on machines: {have} workers give Σμ = {rate:.3g} responses/s; by ECHO-2 κR/Σμ + T_broadcast = "
        f"{lag}·{m.responses}/{rate:.3g} + {m.broadcast_s:.3f} = {left_s:.3f} s must fit into κ·T_train = "
        f"{lag}·{m.train_s:.3f} = {right_s:.3f} s: {advice}"
    )
