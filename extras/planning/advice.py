"""Advice on α, the split of devices, and the number of remote hosts, from the records of a run.

`python scripts/advise.py runs/NAME` prints it, with its arithmetic. The arithmetic for α and devices is in advisor.py,
and that for hosts in `rate_that_suffices`. A run is a record of scripts/runs.py: `metrics` has a row per step, `events`
a table per kind of event, and `info` is run.json.
"""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.cluster.placement import Placement, place
from asyncrl.config import OPTIONS, Config
from extras.planning.advisor import (
    Measured,
    expected_step,
    predicted_lag,
    predicted_step,
    tail_share,
)

MIN_STEPS = 8
"""Steps that advice needs. The first quarter of a run is left out, because the pipeline is still filling."""
ALPHAS = (0.0, 1.0, 2.0, 4.0, 8.0)
NEAR = 1.1
"""A step within this factor of the best counts as equally good: the arithmetic is no more exact."""


def config_of(run) -> Config:
    """Return the options of a run. Options that this code does not have are left out."""
    return Config.from_dict(
        {name: value for name, value in run.info["config"].items() if name in OPTIONS}
    )


def advice_of(run) -> str:
    """Return advice on remote hosts for a run with --listen. For other runs it is on α and the split of devices.

    Raises ValueError for a run that is too short, or that the arithmetic does not describe.
    """
    config, num_steps = config_of(run), len(run.metrics)
    if num_steps < MIN_STEPS:
        raise ValueError(
            f"{run.path} has {num_steps} steps, and advice needs {MIN_STEPS}; let it train longer"
        )
    if (
        config.suspends_between_steps
        or config.colocate == "sleep"
        or (config.listen and config.async_ratio == 0)
    ):
        raise ValueError(
            f"{run.path} lets rollout and training take turns, so there is nothing to balance"
        )
    if "groups" not in run.events["step"] or "group" not in run.events["trajectory"]:
        raise ValueError(
            f"{run.path} does not record which responses a step trained on; give a run that sampled"
        )
    if run.events["step"]["node"].nunique() > 1:
        raise ValueError(f"{run.path} has several nodes; there is advice for one node only")
    if config.listen:
        return advise_on_hosts(measure_hosts(run, config))
    hardware = run.info["hardware"]
    placement = place(config, len(hardware["gpus"]), hardware["cpu_cores"], run.info["world_size"])
    return f"{advise(measure(run, config, placement))}\n{describe_lag(run, config)}"


def measure(run, config: Config, placement: Placement) -> Measured:
    """Return means over the steps of a run, without its first quarter."""
    rollout, training, unit, is_shared = _devices(placement)
    first = len(run.metrics) // 4
    settled = run.metrics.iloc[first:]
    # evaluations count as a part of sampling
    decoding_s = (settled["time/step_s"] * settled["worker_time/decoding"]).mean()
    responses = trained_responses(run, first)
    took_s = (responses["ended_at"] - responses["started_at"]).groupby(responses["step"])
    return Measured(
        async_ratio=config.async_ratio,
        rollout_devices=rollout,
        training_devices=training,
        unit=unit,
        is_shared=is_shared,
        samples=config.groups_per_step * config.group_size,
        decoding_s=decoding_s * rollout,
        training_s=_busy_s(settled) * training,
        response_mean_s=took_s.mean().mean(),
        response_max_s=took_s.max().mean(),
        step_s=settled["time/step_s"].mean(),
    )


def trained_responses(run, first: int):
    """Return a row per response and step after the `first` that trained on it: the response's event, and `step`."""
    groups = run.events["step"][["step", "groups"]].explode("groups").astype("Int64")
    groups = groups[groups["step"] > first]
    return groups.merge(run.events["trajectory"], left_on="groups", right_on="group")


def describe_lag(run, config: Config) -> str:
    """Return one line with the mean staleness of trained groups, predicted and realised, without the first quarter."""
    first = len(run.metrics) // 4
    settled, responses = run.metrics.iloc[first:], trained_responses(run, first)
    groups = responses[responses["finish_reason"] != "aborted"].groupby("group")
    group_s = (groups["ended_at"].max() - groups["started_at"].min()).mean()
    step_s = settled["time/step_s"].mean()
    group_steps, busy_share = group_s / step_s, _busy_s(settled) / step_s
    num_outstanding = config.max_outstanding_groups - config.extra_groups
    alpha = num_outstanding / config.groups_per_step - 1
    low, high = predicted_lag(alpha, config.publish_delay, group_steps, busy_share)
    return (
        f"  lag: predicted {low:.2f} steps by the rates (a group takes {group_steps:.2f} steps, the trainer is busy "
        f"for {busy_share:.2f}) … {high:.2f} with all places taken; realised {settled['staleness/mean'].mean():.2f}"
    )


def _busy_s(steps) -> float:
    """Return the mean time of a step without waits of the trainer, seconds."""
    return (steps["time/step_s"] - steps["time/wait_s"]).mean()


def _devices(placement: Placement) -> tuple[int, int, str, bool]:
    """Return the devices of rollout and of training, their unit, and whether both use the same devices."""
    if placement.trainer_gpus[0] is not None:
        shared = any(worker.shared_with_rank is not None for worker in placement.workers)
        return (
            sum(worker.num_gpus for worker in placement.workers),
            len(placement.trainer_gpus),
            "GPU",
            shared,
        )
    training = placement.trainer_threads * len(placement.trainer_gpus)
    return sum(worker.cpu_threads for worker in placement.workers), training, "CPU core", True


# Devices and α


def best_split(m: Measured, alpha: float) -> tuple[int, int]:
    """Return devices for rollout and training with the least expected step. The present split wins a tie."""
    now = (m.rollout_devices, m.training_devices)
    if m.is_shared and m.unit == "GPU":
        return now
    total = sum(now)
    splits = [now, *((total - training, training) for training in range(1, total))]
    return min(splits, key=lambda split: expected_step(m, alpha, *split))


def best_alpha(m: Measured) -> float:
    """Return the least α whose step, with the best split, is within NEAR of the least step of all α."""
    seconds = {
        alpha: expected_step(m, alpha, *best_split(m, alpha)) for alpha in {*ALPHAS, m.async_ratio}
    }
    return min(alpha for alpha, s in seconds.items() if s <= NEAR * min(seconds.values()))


# Remote hosts


@dataclass(frozen=True)
class RemoteHosts:
    """Measurements of a run that hosts have joined."""

    rates: tuple[float, ...]
    """Responses/s of each worker, one or more, while it samples (μ)."""
    responses: int
    """Responses of a step (R)."""
    train_s: float
    """Time of the trainer for a step, without its waits (T_train)."""
    broadcast_s: float
    """Mean time from a publication until a host has the weights (T_broadcast)."""
    refresh_lag: int
    """Steps from one refresh of a host to the next (κ), at least 1."""


def rate_that_suffices(m: RemoteHosts) -> float:
    """Return the least responses/s of all hosts to keep the trainer busy; infinite if no rate is enough.

    ECHO-2 (arXiv 2602.02192): the responses of κ steps and one broadcast of weights fit into κ steps of training,

        κR/Σμ + T_broadcast ≤ κ·T_train,   so   Σμ ≥ κR / (κ·T_train − T_broadcast).

    The rule assumes that a host is idle while it fetches weights. Less is enough if hosts sample meanwhile. It ignores
    the longest response, so more is needed if a step has few responses.
    """
    left_s = m.refresh_lag * m.train_s - m.broadcast_s
    return m.refresh_lag * m.responses / left_s if left_s > 0 else math.inf


def hosts_that_suffice(m: RemoteHosts) -> float:
    """Return the number of hosts that are enough: the fastest present hosts, then more of their median rate."""
    needed, rates = rate_that_suffices(m), sorted(m.rates, reverse=True)
    if math.isinf(needed):
        return math.inf
    for count, rate in enumerate(itertools.accumulate(rates), start=1):
        if rate >= needed:
            return count
    return len(rates) + math.ceil((needed - sum(rates)) / statistics.median(rates))


def measure_hosts(run, config: Config) -> RemoteHosts:
    """Return means over the steps without their first quarter. Rates are of the last steps, because hosts leave."""
    latest = trained_responses(run, len(run.metrics) - MIN_STEPS).groupby("worker")
    workers = [rows[["started_at", "ended_at"]].to_numpy().tolist() for _, rows in latest]
    first = len(run.metrics) // 4
    updates = run.events["update"]
    settled = updates[updates["time"] > run.events["step"]["time"].iloc[first - 1]]
    return RemoteHosts(
        rates=tuple(len(spans) / _covered_s(spans) for spans in workers),
        responses=config.groups_per_step * config.group_size,
        train_s=_busy_s(run.metrics.iloc[first:]),
        broadcast_s=settled["broadcast_s"].mean(),
        refresh_lag=max(1, config.swarm.refresh_lag),
    )


def _covered_s(spans: list[tuple[float, float]]) -> float:
    """Return the seconds that lie in any of these spans."""
    covered_s, until = 0.0, -math.inf
    for start, end in sorted(spans):
        covered_s, until = covered_s + max(0.0, end - max(start, until)), max(until, end)
    return covered_s


# Text


def advise(m: Measured) -> str:
    """Return the advice with its arithmetic."""
    lines = [*_measurements(m), *_predictions(m), *_advice(m)]
    if m.is_shared:
        lines.append(
            f"  rollout and training share these {m.unit}s: each side's seconds were measured beside the other's load. "
            "They say which side is slower. Predictions for more overlap promise too much, and for less are too slow"
        )
    return "\n".join(lines)


def _measurements(m: Measured) -> Iterator[str]:
    yield (
        f"advice on α (now {m.async_ratio:g}) and on the split of {m.rollout_devices + m.training_devices} {m.unit}s "
        f"(now {_split(m.rollout_devices, m.training_devices)}); a step took {m.step_s:.3f} s"
    )
    yield (
        f"  {m.samples} samples need g = {m.decoding_s:.3f} {m.unit}-seconds of decoding and t = {m.training_s:.3f} of "
        f"training; a response takes {m.response_mean_s:.3f} s, the longest of a step L = {m.response_max_s:.3f} s"
    )


def _predictions(m: Measured) -> Iterator[str]:
    yield "  predicted seconds per step, at least (rates) … at most (proposition 2):"
    now = (m.rollout_devices, m.training_devices)
    for alpha in sorted({*ALPHAS, m.async_ratio}):
        best = best_split(m, alpha)
        line = f"    α = {alpha:<4g} {_range(m, alpha, *now)}" + (
            " (now)" if alpha == m.async_ratio else ""
        )
        yield line if best == now else f"{line}; with {_split(*best)} {_range(m, alpha, *best)}"


def _advice(m: Measured) -> Iterator[str]:
    alpha = best_alpha(m)
    before, split = (m.rollout_devices, m.training_devices), best_split(m, alpha)
    changes = [f"--async-ratio {alpha:g}"] * (alpha != m.async_ratio) + [_split(*split)] * (
        split != before
    )
    if not changes:
        yield "  advice: leave α and the split of devices as they are"
        return
    now, then = (m.async_ratio, *before), (alpha, *split)
    rates, bound = (
        slow / fast
        for slow, fast in zip(predicted_step(m, *now), predicted_step(m, *then), strict=True)
    )
    expected = expected_step(m, *now) / expected_step(m, *then)
    yield (
        f"  advice: {', '.join(changes)}: predicted {expected:.2f}× ({rates:.2f}× by the rates, {bound:.2f}× by "
        f"ROLL Flash's proposition 2, of whose tail {tail_share(m):.0%} was waited for in the steps measured)"
    )


def _range(m: Measured, alpha: float, rollout: int, training: int) -> str:
    low, high = predicted_step(m, alpha, rollout, training)
    return f"{low:.3f} … {high:.3f}"


def _split(rollout: int, training: int) -> str:
    return f"{rollout} for rollout + {training} for training"


def advise_on_hosts(m: RemoteHosts) -> str:
    """Return the advice on the number of hosts with its arithmetic."""
    lag, rate, have, enough = m.refresh_lag, sum(m.rates), len(m.rates), hosts_that_suffice(m)
    left_s, right_s = lag * m.responses / rate + m.broadcast_s, lag * m.train_s
    if math.isinf(enough):
        advice = (
            f"no number of hosts is enough, as T_broadcast ≥ κ·T_train: refresh_lag must be at least "
            f"{math.floor(m.broadcast_s / m.train_s) + 1}, or weights must come faster"
        )
    elif enough > have:
        advice = f"{enough - have} more hosts of the median rate {statistics.median(m.rates):.3g}/s are enough"
    else:
        advice = f"the fastest {enough} of them are enough"
    return (
        f"advice on remote hosts: {have} workers give Σμ = {rate:.3g} responses/s; by ECHO-2 κR/Σμ + T_broadcast = "
        f"{lag}·{m.responses}/{rate:.3g} + {m.broadcast_s:.3f} = {left_s:.3f} s must fit into κ·T_train = "
        f"{lag}·{m.train_s:.3f} = {right_s:.3f} s: {advice}"
    )
