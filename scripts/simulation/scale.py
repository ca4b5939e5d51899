"""Beyond the papers: 128, 1,000 and 10,000 GPUs, and what holds a step up first.

One worker stands for the 8 engines of a node, as a data-parallel engine does; five sixths of the GPUs sample, one sixth
trains (RollArt's share in production). Results wait for the controller, which takes for each what measure-controller
found. The trainer is assumed to divide its work perfectly and a broadcast to take the same time at any size, so neither
can be the first to fail here.
"""

import json
from pathlib import Path

from scripts.simulation.cluster import Case, Cluster, Outcome
from scripts.simulation.scenarios import Outcomes, Scenario, Setup, batch_of
from scripts.simulation.workload import Workload, lengths_up_to

ENGINES_PER_WORKER = 8
ASYNC_RATIO = 1.0
SIZES = ((128, 512), (1_000, 512), (10_000, 512), (10_000, 1_024))
"""GPUs, and groups of 16 per step: AReaL's batch, and twice it."""


def read_message_s(path: Path) -> dict[int, float]:
    """Workers -> seconds that the controller takes per trajectory. Raises ValueError if the file does not say."""
    try:
        points = json.loads(path.read_text(encoding="utf-8"))["points"]
        return {point["workers"]: point["seconds_per_trajectory"] for point in points}
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no costs of the controller ({error}); run measure-controller") from None


def message_s(costs: dict[int, float], num_workers: int) -> float:
    """Cost with that many workers: of the measured number nearest to it."""
    return costs[min(costs, key=lambda measured: abs(measured - num_workers))]


def scale(tail: float, costs: dict[int, float]) -> list[Scenario]:
    """One scenario: all sizes, the first one the baseline."""
    setup = Setup(lengths_up_to(32768, tail))
    arms = {f"{gpus:,} GPUs, {groups}x16": _case(setup, gpus, groups, costs) for gpus, groups in SIZES}
    return [
        Scenario(
            "scale 32K, α = 1",
            "trained_tokens_per_s",
            "trained tokens/s",
            1,
            arms,
            {},
            "no paper goes beyond a few hundred GPUs",
            "–",
            "what grows first is the share of idle slots: the longest response does not get shorter with more engines",
            findings,
        )
    ]


def _case(setup: Setup, gpus: int, groups: int, costs: dict[int, float]) -> Case:
    train_gpus = gpus // 6
    num_workers = (gpus - train_gpus) // ENGINES_PER_WORKER
    base = setup.cluster(num_workers, train_gpus)
    cluster = Cluster(
        base.curve,
        num_workers,
        base.train_s_per_token,
        base.sync_s,
        ENGINES_PER_WORKER,
        message_s(costs, num_workers),
    )
    name = f"{gpus} GPUs, {groups}x16"
    options = batch_of(groups, 16, async_ratio=ASYNC_RATIO)
    return Case(name, options, Workload(setup.lengths), cluster, steps=2, warmup=2)


def where_time_goes(outcome: Outcome) -> str:
    """Shares of the step and of the resources, in words."""
    step_s, cluster = outcome.step_s, outcome.case.cluster
    return (
        f"step {step_s:.0f} s (waits {outcome.rollout_s / step_s:.0%}, trains {outcome.train_s / step_s:.0%}, weights "
        f"{cluster.sync_s / step_s:.1%}), slots taken {outcome.slot_share:.1%}, "
        f"controller busy {outcome.controller_share:.1%}"
    )


def engines_of_a_controller(outcome: Outcome) -> float:
    """Engines whose slots are always taken that one controller can serve, by what a trajectory costs it."""
    cluster, mean_tokens = outcome.case.cluster, outcome.case.workload.lengths.mean
    most = cluster.curve.max_running_requests
    responses_per_s = most * cluster.curve.rate(most) / mean_tokens
    return 1 / (cluster.message_s * responses_per_s)


def findings(outcomes: Outcomes) -> str:
    """Where the time of each size goes, and how much the controller could serve."""
    return "; ".join(
        f"{arm}: {where_time_goes(o)}, {o.num_trajectories / o.seconds:,.0f} of at most "
        f"{1 / o.case.cluster.message_s:,.0f} responses/s, those of {engines_of_a_controller(o):,.0f} full engines"
        for arm, o in outcomes.items()
    )
