"""Comparisons as simulated cases, read from scenarios.toml, which says what each of its keys means."""

import functools
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from extras.latency_law import LatencyLaw
from extras.simulation.cluster import Case, Outcome, train_s_per_token
from extras.simulation.engine import BYTES_PER_VALUE, MODELS, Cluster, EngineCurve, Swarm, roofline
from extras.simulation.workload import LONGEST_TO_MEDIAN, LengthLaw, Turns, Workload, lengths_up_to

RESULTS = Path(__file__).resolve().parents[2] / "results"
SYNC_BYTES_PER_S = 8e9
"""Weights to all engines: what verl reports of 235B on 64 -> 64 GPUs (59 s)."""
NEAR_BEST = 0.03
"""An async ratio is called sufficient if no larger one gains more than this."""
UNITS = {
    "rollout_s": "s per batch", "step_s": "s per step", "trained_tokens_per_s": "trained tokens/s",
    "new_tokens_per_rollout_s": "new tokens/s of rollout",
}  # fmt: skip
LESS_IS_BETTER = ("rollout_s", "step_s")

Arms = dict[str, dict[str, float]]
"""The numbers of each arm, of one seed."""


@dataclass(frozen=True)
class Claim:
    """A number of a comparison, and what the paper says of it."""

    name: str
    of: Callable[[Arms], float]
    arm: str = ""
    """The arm of which it says how many times better it is than the arm `against`."""
    against: str = ""
    paper: tuple[float, float] | None = None
    """Lowest and highest that are reported, if any is."""
    short: str = ""
    """Its words in the short table, if it stands there."""


@dataclass(frozen=True)
class Scenario:
    """Arms that are compared by one measure."""

    mechanism: str
    name: str
    measure: str
    arms: dict[str, dict]
    """What is known of each arm; see the top of scenarios.toml."""
    claims: list[Claim]
    source: str
    """What the papers say, and how sure that is."""
    why: str
    """Where ours differs, and why."""
    tail: float
    """Longest length divided by the median."""

    def case(self, arm: str, outcomes: dict[str, Outcome], seed: int) -> Case:
        """The run of one arm, where `outcomes` are those of the arms before it."""
        known = dict(self.arms[arm])
        ratio = int(known["options"].get("async_ratio", 0))
        if "split_by" in known:
            known["train_gpus"] = train_gpus(outcomes[known["split_by"]], known["gpus"], ratio)
            known["engines"] = known["gpus"] - known["train_gpus"]
        # Groups that start together end, wait and are replaced together: one step in 1 + α is a long one.
        steps = -(-known["steps"] // (1 + ratio)) * (1 + ratio)
        workload = _workload(known, self.tail)
        return Case(
            known["options"],
            workload,
            _cluster(known, workload.lengths),
            steps,
            known.get("warmup", 2 + ratio),
            seed,
        )


def _workload(known: dict, tail: float) -> Workload:
    lengths = (
        LengthLaw(**known["lengths"])
        if "lengths" in known
        else lengths_up_to(known["longest"], tail)
    )
    law = LatencyLaw.parse(known["latency"]) if "latency" in known else None
    rest = {name: known[name] for name in ("reward_s", "prompt_tokens") if name in known}
    return Workload(lengths, Turns(latency=law, **known["turns"]) if law else None, **rest)


def _cluster(known: dict, lengths: LengthLaw) -> Cluster:
    model, gpu = known.get("model", "Qwen3-8B"), known.get("gpu", "H800")
    if "curve" in known:
        curve = EngineCurve.load(RESULTS / "simulation" / known["curve"])
        curve = replace(curve, max_running_requests=known["options"]["max_running_requests"])
    else:
        curve = roofline(model, gpu, lengths.mean_context, known.get("tensor_parallel", 1))
    trains, weight_bytes, swarm = (
        "train_gpus" in known,
        BYTES_PER_VALUE * MODELS[model].num_parameters,
        None,
    )
    if "swarm" in known:
        curve = replace(curve, max_running_requests=known["options"]["max_running_requests"])
        swarm, gpu = Swarm(weight_bytes, **known["swarm"]), "H800"
    return Cluster(
        curve,
        known["engines"],
        train_s_per_token(model, gpu, known["train_gpus"]) if trains else 0.0,
        known.get("sync_s", weight_bytes / SYNC_BYTES_PER_S if trains else 0.0),
        known.get("replicas", 1),
        known.get("message_s", 0.0),
        swarm,
    )


def train_gpus(sync: Outcome, gpus: int, async_ratio: float) -> int:
    """GPUs for the trainer: β* of Proposition 2, by what a synchronous run on all of them measured."""
    slot_s = [s for step in sync.steps for s in step.slot_s]
    rollout_s = sum(slot_s) / len(sync.steps) / sync.case.cluster.num_slots
    share = best_train_share(rollout_s, max(slot_s), sync.numbers["train_s"], async_ratio)
    return min(max(1, round(share * gpus)), gpus - 1)


def best_train_share(
    rollout_s: float, longest_s: float, train_s: float, async_ratio: float
) -> float:
    """β* of Proposition 2: the trainer's share of the machines at which its branch equals the bound.

    Takes (N/K)·μ, L and E·N·μ_train/K, in seconds, each with all K slots or machines.
    """
    return train_s / (rollout_s + longest_s / (async_ratio + 1) + train_s)


# Claims


def times_better(measure: str, arm: str, against: str) -> Callable[[Arms], float]:
    """How many times better an arm is than another."""
    if measure in LESS_IS_BETTER:
        arm, against = against, arm
    return lambda arms: arms[arm][measure] / arms[against][measure]


def sufficient_alpha(arms: Arms) -> float:
    """The smallest async ratio that no larger one beats by more than NEAR_BEST."""
    rates = {
        float(arm.split()[-1]): numbers["trained_tokens_per_s"] for arm, numbers in arms.items()
    }
    return next(
        alpha for alpha, rate in rates.items() if rate >= (1 - NEAR_BEST) * max(rates.values())
    )


def best_over_one(arms: Arms) -> float:
    """How many times better the best async ratio is than 1."""
    return (
        max(numbers["trained_tokens_per_s"] for numbers in arms.values())
        / arms["α = 1"]["trained_tokens_per_s"]
    )


def best_split(arms: Arms) -> float:
    """GPUs for rollout of the best split that does not depend on a measurement."""
    best = max(
        (arm for arm in arms if "+" in arm), key=lambda arm: arms[arm]["trained_tokens_per_s"]
    )
    return float(best.split()[0])


FUNCTIONS = {
    function.__name__: function for function in (sufficient_alpha, best_over_one, best_split)
}


def _claim(measure: str, known: dict, arm: str = "", against: str = "") -> Claim:
    """What an arm or one of `numbers` claims."""
    paper = known.get("paper")
    paper = (paper, paper) if isinstance(paper, int | float) else paper and tuple(paper)
    arm, against = known.get("arm", arm), known.get("against", against)
    if "of" in known:
        of = FUNCTIONS[known["of"]]
    elif "number" in known:
        of = lambda arms: arms[arm][known["number"]]  # noqa: E731
    else:
        of = times_better(measure, arm, against)
    return Claim(known["name"], of, arm, against, paper, known.get("short", ""))


# The file


def scenarios(only: list[str] | None = None) -> list[Scenario]:
    """All comparisons, at every tail; or those of the mechanisms, and with the names, in `only`.

    Raises ValueError for a name that there is not.
    """
    file = tomllib.loads((Path(__file__).parent / "scenarios.toml").read_text(encoding="utf-8"))
    found = [scenario for known in file["comparison"] for scenario in _scenarios(known)]
    mechanisms = list(dict.fromkeys(scenario.mechanism for scenario in found))
    if unknown := set(only or ()) - {*mechanisms, *(scenario.name for scenario in found)}:
        raise ValueError(
            f"--only {sorted(unknown)[0]!r} is none of {', '.join(mechanisms)}, nor a comparison's name"
        )
    return [
        scenario
        for scenario in found
        if only is None or not {scenario.mechanism, scenario.name}.isdisjoint(only)
    ]


def _scenarios(comparison: dict) -> Iterator[Scenario]:
    for row in comparison.get("rows", [{"name": ""}]):
        known = _merged(comparison, row)
        known["name"] = f"{comparison['name']} {row['name']}".strip()
        if known["mechanism"] == "own":
            measured = _measured(row["name"])
            known["arms"] = [{**arm, "paper": measured[arm["name"]]} for arm in known["arms"]]
        arms = {arm["name"]: _merged(known, arm) for arm in known["arms"]}
        first, measure = next(iter(arms)), known["measure"]
        claims = [_claim(measure, arm, arm["name"], first) for arm in known["arms"][1:]]
        claims += [_claim(measure, number) for number in known.get("numbers", [])]
        for tail in (LONGEST_TO_MEDIAN, *known.get("tails", [])):
            yield Scenario(
                known["mechanism"],
                known["name"],
                measure,
                arms,
                claims,
                known.get("source", ""),
                known["why"],
                tail,
            )


def _merged(known: dict, changes: dict) -> dict:
    nested = {
        name: {**known[name], **changes.get(name, {})}
        for name in ("options", "swarm")
        if name in known
    }
    return {**known, **changes, **nested}


@functools.cache
def _measured(comparison: str) -> dict[str, float]:
    """Arm -> how many times better than the first it was in a comparison of scripts/bench/rollout.py, by medians."""
    key = "new_tokens_per_s" if comparison == "over-sampling" else "seconds_per_step"
    frame = pd.read_json(RESULTS / "rollout" / "rollout.jsonl", lines=True)
    medians = frame[frame.comparison == comparison].groupby("arm", sort=False)[key].median()
    return dict(
        medians / medians.iloc[0] if key == "new_tokens_per_s" else medians.iloc[0] / medians
    )
