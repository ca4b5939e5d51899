"""Our own measurements, simulated: what bench_rollout.py found on two real engines, with their measured curve.

Options, lengths, rewards and latencies are those of bench_rollout.py itself. This is the check of the simulation: its
only inputs are the engine's curve, the time of an update and the number of turns, and nothing is fitted.
"""

import statistics
from dataclasses import replace
from pathlib import Path

from config import Config
from scripts import bench_rollout as bench
from scripts import bench_rollout_report as measured
from scripts.bench_rollout_worker import MEDIAN_TOKENS, REWARD_S, SIGMA, TURN_TOKENS
from scripts.latency import LatencyLaw
from scripts.simulation.cluster import Case, Cluster
from scripts.simulation.engine import EngineCurve
from scripts.simulation.scenarios import Scenario
from scripts.simulation.workload import LengthLaw, Turns, Workload

PROMPT_TOKENS, NUM_TURNS, UPDATE_S = 16, 5, 0.03
"""Of a prompt, of an episode of guess_number, and from a publication to sampling under it."""
NOT_SIMULATED = ("updates",)


def own_bench(curve: EngineCurve, path: Path) -> list[Scenario]:
    """Every comparison of which the file has records. Raises ValueError if it has none."""
    records = measured.load(path)
    names = {record["comparison"] for record in records} - set(NOT_SIMULATED)
    return [_scenario(comparison, records, curve) for comparison in bench.COMPARISONS if comparison.name in names]


def _scenario(comparison: bench.Comparison, records: list[dict], curve: EngineCurve) -> Scenario:
    measure = measured.measures_of(comparison.name)[0]
    found = {arm: measured.values(of_arm, measure) for arm, of_arm in measured.by_arm(records, comparison.name).items()}
    arms = list(comparison.arms)
    return Scenario(
        f"own bench, {comparison.name}",
        "new_tokens_per_rollout_s" if measure.better > 0 else "step_s",
        measure.name,
        measure.better,
        {arm: _case(comparison, arm, curve) for arm in arms},
        {arm: measured.gain(found[arms[0]], found[arm], measure) for arm in arms[1:]},
        f"measured by bench_rollout.py: {' → '.join(f'{statistics.median(found[arm]):.4g}' for arm in arms)}",
        f"measured, n = {min(map(len, found.values()))}, spreads in results/rollout",
        "there engines, controller and rewards share two cores, and a step's work in Python is not only the engine's",
    )


def _case(comparison: bench.Comparison, arm: str, curve: EngineCurve) -> Case:
    options = {**bench.COMMON, **comparison.common, **comparison.arms[arm]}
    config = comparison.config(arm)
    engines = replace(curve, max_running_requests=config.max_running_requests)
    cluster = Cluster(engines, bench.NUM_WORKERS, 0.0, UPDATE_S)
    return Case(arm, options, _workload(config, comparison.latency), cluster, steps=40, warmup=5)


def _workload(config: Config, latency: str) -> Workload:
    lengths = LengthLaw(MEDIAN_TOKENS, SIGMA, config.max_response_tokens, within_share=1.0)
    if not config.is_multi_turn:
        return Workload(lengths, None, PROMPT_TOKENS, REWARD_S, bench.VARYING_SHARE)
    turns = Turns(NUM_TURNS, TURN_TOKENS, LatencyLaw.parse(latency), config.env_timeout_s)
    return Workload(lengths, turns, PROMPT_TOKENS)
