"""The papers' comparisons as simulated cases: what is known of each, what is assumed, and what the papers measured.

Assumptions are chosen once, here and in workload.py and engine.py, from what the papers say of their workload; none is
set for one row. Where a paper names neither model, GPU nor limit of length: Qwen3-8B, H800 and 8192 tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scripts.bench_rollout_worker import REWARD_S
from scripts.latency import LatencyLaw
from scripts.simulation.cluster import Case, Cluster, Outcome, train_s_per_token
from scripts.simulation.engine import BYTES_PER_VALUE, GPUS, MODELS, EngineCurve, roofline
from scripts.simulation.theory import best_train_share
from scripts.simulation.workload import LONGEST_TO_MEDIAN, LengthLaw, Turns, Workload, lengths_up_to

SYNC_BYTES_PER_S = 8e9
"""Weights to all engines: what verl reports of 235B on 64 -> 64 GPUs (59 s)."""
NEAR_BEST = 0.03
"""An async ratio is called sufficient if no larger one gains more than this."""
NUM_TURNS, TURN_TOKENS, ENV_TIMEOUT_S, ENV_FAILURES = 20, 256, 60.0, 0.001
"""Of environments; the papers give none of the four."""

Outcomes = dict[str, Outcome]
CaseMaker = Callable[[Outcomes], Case]


@dataclass(frozen=True)
class Scenario:
    """Cases that are compared, the first one the baseline."""

    name: str
    measure: str
    """Property of Outcome that is compared."""
    unit: str
    better: int
    """−1 where less is better, 1 where more is."""
    arms: dict[str, Case | CaseMaker]
    """A CaseMaker makes its case from the outcomes of the arms before it."""
    paper: dict[str, float]
    """Arm -> how many times better than the first arm it is in the paper."""
    paper_text: str
    certainty: str
    """How sure the paper's numbers are."""
    why: str
    """Where ours differs, and why."""
    derived: Callable[[Outcomes], str] | None = None
    """A further result, in words."""
    baselines: dict[str, str] = field(default_factory=dict)
    """Arm -> the arm that it is compared with, where that is not the first."""

    def gain(self, outcomes: Outcomes, arm: str) -> float:
        """How many times better than its baseline."""
        baseline = self.baselines.get(arm, next(iter(self.arms)))
        baseline, value = (getattr(outcomes[name], self.measure) for name in (baseline, arm))
        return value / baseline if self.better > 0 else baseline / value


@dataclass(frozen=True)
class Setup:
    """Model, GPU and lengths of a case."""

    lengths: LengthLaw
    model: str = "Qwen3-8B"
    gpu: str = "H800"
    tensor_parallel: int = 1

    @property
    def curve(self) -> EngineCurve:
        return roofline(MODELS[self.model], GPUS[self.gpu], self.lengths.mean_context, self.tensor_parallel)

    @property
    def sync_s(self) -> float:
        return BYTES_PER_VALUE * MODELS[self.model].num_parameters / SYNC_BYTES_PER_S

    def rollout(self, num_engines: int) -> Cluster:
        """Engines alone: nothing is trained, and weights do not travel."""
        return Cluster(self.curve, num_engines, 0.0)

    def cluster(self, num_engines: int, train_gpus: int) -> Cluster:
        """Engines and a trainer, on the same GPUs or on others."""
        per_token = train_s_per_token(MODELS[self.model], GPUS[self.gpu], train_gpus)
        return Cluster(self.curve, num_engines, per_token, self.sync_s)


def batch_of(groups: int, group_size: int, **options) -> dict:
    """Options of Config."""
    return {"groups_per_step": groups, "group_size": group_size, **options}


def asynchronous(name: str, options: dict, workload: Workload, cluster: Cluster, ratio: int, min_steps: int) -> Case:
    """A case that is measured once its pipeline is full, over whole cycles.

    Groups that were admitted together at the start end together, wait together and are replaced together, so that one
    step in 1 + α is a long one.
    """
    steps = -(-min_steps // (1 + ratio)) * (1 + ratio)
    return Case(name, {**options, "async_ratio": float(ratio)}, workload, cluster, steps, warmup=2 + ratio)


# One function per mechanism; `tail` is the longest length divided by the median


def scheduling(tail: float) -> list[Scenario]:
    setup = Setup(lengths_up_to(8192, tail))
    workload, cluster = Workload(setup.lengths, reward_s=REWARD_S), setup.rollout(8)
    common = batch_of(8, 8, drop_zero_variance=True)
    arms = {"batch": {"scheduling": "batch"}, "queue": {}, "queue +16 groups": {"extra_groups": 16}}
    return [
        Scenario(
            "queue scheduling 8x8",
            "rollout_s",
            "s per batch",
            -1,
            {arm: Case(arm, {**common, **differs}, workload, cluster, 60, 1) for arm, differs in arms.items()},
            {"queue": 125 / 58, "queue +16 groups": 125 / 37},
            "125 s → 58 s → 37 s",
            "3.4x: two secondary sources agree; 58 s: one",
            "our `batch` starts only as many groups as were filtered in its next round, not a whole batch, and waits "
            "less; share of filtered groups (0.5) and the 8 engines are assumed",
        )
    ]


def replication(tail: float) -> list[Scenario]:
    setup = Setup(lengths_up_to(8192, tail))
    paper = {
        32: (1.30, "116 s → 89 s", "one secondary source"),
        64: (1.84, "149 s → 81 s", "two secondary sources agree on 1.84"),
    }
    return [
        Scenario(
            f"prompt replication {groups}x16",
            "rollout_s",
            "s per batch",
            -1,
            {
                arm: Case(
                    arm, batch_of(groups, 16, replicate_prompts=on), Workload(setup.lengths), setup.rollout(8), 15, 1
                )
                for arm, on in (("one request", False), ("replicated", True))
            },
            {"replicated": ratio},
            text,
            certainty,
            "an engine bound by memory decodes 16 responses almost as fast as one, and the longest sets the time in "
            "both arms. Where a step is dearer the more it samples there is a gain: «own bench, replication»",
        )
        for groups, (ratio, text, certainty) in paper.items()
    ]


def _turns(sigma: float, failures: float = 0.0) -> Turns:
    law = f"normal:10,{sigma:g}" + (f" fail:{failures:g}" if failures else "")
    return Turns(NUM_TURNS, TURN_TOKENS, LatencyLaw.parse(law), ENV_TIMEOUT_S)


def environments(tail: float) -> list[Scenario]:
    setup = Setup(lengths_up_to(32768, tail))
    paper = {
        1: (1.23, "RollArt: 1.23x", "read in RollArt"),
        5: (None, "RollArt: between 1.23x and 2.27x", "read in RollArt"),
        10: (2.46, "892 s → 362 s, 2.46x; RollArt: 2.27x", "two secondary sources agree; RollArt read"),
    }
    return [
        Scenario(
            f"environment-level asynchrony normal(10,{sigma})",
            "rollout_s",
            "s per batch",
            -1,
            {
                arm: Case(
                    arm,
                    batch_of(32, 8, scheduling="lockstep" if barrier else "queue"),
                    Workload(setup.lengths, _turns(sigma)),
                    setup.rollout(32),
                    6,
                    0,
                )
                for arm, barrier in (("barrier", True), ("asynchronous", False))
            },
            {} if ratio is None else {"asynchronous": ratio},
            text,
            certainty,
            f"{NUM_TURNS} turns of {TURN_TOKENS} tokens are assumed: the more turns, the nearer the ratio comes to "
            "longest/mean latency of 256",
        )
        for sigma, (ratio, text, certainty) in paper.items()
    ]


def redundancy(tail: float) -> list[Scenario]:
    setup = Setup(lengths_up_to(32768, tail))
    arms = {
        "32x8": {}, "36x8": {"extra_groups": 4}, "32x9": {"extra_members": 1},
        "36x9": {"extra_groups": 4, "extra_members": 1}, "36x12": {"extra_groups": 4, "extra_members": 4},
    }  # fmt: skip
    return [
        Scenario(
            f"redundant environments normal(10,5){name}",
            "rollout_s",
            "s per batch",
            -1,
            {
                arm: Case(
                    arm,
                    batch_of(32, 8, **differs),
                    Workload(setup.lengths, _turns(5, failures)),
                    setup.rollout(32),
                    8,
                    1,
                )
                for arm, differs in arms.items()
            },
            {"36x9": 5.40, "36x12": 5.28},
            "243 s → 45 s (36x9), 46 s (36x12); RollArt: at most 1.62x",
            "one secondary source, unverified: normal(10,5) alone cannot give 5x; 1.62x read in RollArt",
            why,
        )
        for name, failures, why in (
            ("", 0.0, "only the tail of a sum of 20 latencies is to be gained"),
            (
                f", {ENV_FAILURES:.1%} of steps fail",
                ENV_FAILURES,
                f"a group without a spare member is lost with one failure, and half of the failures hang for "
                f"{ENV_TIMEOUT_S:g} s first; share and timeout are assumed",
            ),
        )
    ]


ALPHAS = (0, 1, 2, 4, 8)


def sufficient_alpha(outcomes: Outcomes) -> str:
    """The smallest ratio that no larger one beats by more than NEAR_BEST, and the gain over 1."""
    rates = {arm: outcome.tokens / outcome.seconds for arm, outcome in outcomes.items()}
    best = max(rates.values())
    enough = next(arm for arm, rate in rates.items() if rate >= (1 - NEAR_BEST) * best)
    return f"sufficient: {enough}; best over α = 1: {best / rates['α = 1']:.2f}x"


def alpha_sweep(tail: float) -> list[Scenario]:
    rows = (
        ("rollout size 32, 32K, 8B", 32, 32768, "Qwen3-8B", "4"),
        ("rollout size 256, 32K, 8B", 256, 32768, "Qwen3-8B", "2"),
        ("rollout size 128, 4K, 8B", 128, 4096, "Qwen3-8B", "1"),
        ("rollout size 128, 32K, 0.6B", 128, 32768, "Qwen3-0.6B", "2"),
    )
    return [
        _alpha_row(name, groups, Setup(lengths_up_to(longest, tail), model), best)
        for name, groups, longest, model, best in rows
    ]


def _alpha_row(name: str, groups: int, setup: Setup, best: str) -> Scenario:
    cluster, workload = setup.cluster(24, 16), Workload(setup.lengths)
    arms = {
        f"α = {alpha}": asynchronous(f"α = {alpha}", batch_of(groups, 8), workload, cluster, alpha, 5)
        for alpha in ALPHAS
    }
    return Scenario(
        f"async ratio, {name}",
        "trained_tokens_per_s",
        "trained tokens/s",
        1,
        arms,
        {},
        f"best α = {best}; RollArt: α = 1 … 6 gain at most 1.22x over α = 1",
        "one secondary source, two others agree on 2; RollArt read",
        "24 engines and 16 training GPUs are the paper's; under so heavy a tail the longest response still sets the "
        "pace at α = 2, and a larger α goes on gaining",
        sufficient_alpha,
    )


NUMBERS_OF_GPUS = (16, 32, 64, 128)


def scaling(tail: float) -> list[Scenario]:
    rows = (("Think, 32K", 32768, 2.24), ("Base, 8K", 8192, 2.12))
    return [_scaling_row(label, Setup(lengths_up_to(longest, tail)), paper) for label, longest, paper in rows]


def _scaling_row(label: str, setup: Setup, paper: float) -> Scenario:
    arms: dict[str, Case | CaseMaker] = {}
    for gpus in NUMBERS_OF_GPUS:
        arms |= _scaling_arms(setup, gpus)
    return Scenario(
        f"scaling, {label}",
        "trained_tokens_per_s",
        "trained tokens/s",
        1,
        arms,
        {"128 async": paper},
        "up to 2.24x and 2.12x over sync; 7.6x the throughput on 8x the GPUs",
        "2.24x in the abstract; sources disagree on which model has which, and on the baseline; 7.6x: maintainers",
        "256x8 responses are assumed at every size, 16 for each of 128 GPUs: the longest then sets the time, and more "
        "GPUs hardly help, which the paper's runs do not show",
        _growth,
        {f"{gpus} {arm}": f"{gpus} naive" for gpus in NUMBERS_OF_GPUS for arm in ("naive", "sync", "async")},
    )


def _scaling_arms(setup: Setup, gpus: int) -> dict[str, Case | CaseMaker]:
    """Rollout and training in turn on all GPUs, by the baseline and by the queue; and apart, split by Proposition 2."""
    workload, options, together = Workload(setup.lengths), batch_of(256, 8), setup.cluster(gpus, gpus)
    naive = {**options, "scheduling": "batch", "replicate_prompts": False}

    def apart(outcomes: Outcomes) -> Case:
        train = train_gpus_of(outcomes[f"{gpus} sync"], gpus, 2.0)
        return asynchronous(f"{gpus - train} + {train}", options, workload, setup.cluster(gpus - train, train), 2, 4)

    return {
        f"{gpus} naive": Case("naive", naive, workload, together, 3, 1),
        f"{gpus} sync": Case("sync", options, workload, together, 3, 1),
        f"{gpus} async": apart,
    }


def _growth(outcomes: Outcomes) -> str:
    rates = {arm: outcome.trained_tokens_per_s for arm, outcome in outcomes.items()}
    splits = ", ".join(outcomes[f"{gpus} async"].case.name for gpus in NUMBERS_OF_GPUS)
    grown = " and ".join(f"{rates[f'128 {arm}'] / rates[f'16 {arm}']:.2f}x ({arm})" for arm in ("sync", "async"))
    return f"rollout + train: {splits}; throughput from 16 to 128 GPUs: {grown}"


def train_gpus_of(sync: Outcome, gpus: int, async_ratio: float) -> int:
    """GPUs for the trainer, by β* of Proposition 2 and what a synchronous run on all of them measured."""
    slot_s = [s for step in sync.steps for s in step.slot_s]
    rollout_s = sum(slot_s) / len(sync.steps) / sync.case.cluster.num_slots
    share = best_train_share(rollout_s, max(slot_s), sync.train_s, async_ratio)
    return min(max(1, round(share * gpus)), gpus - 1)


def split(tail: float) -> list[Scenario]:
    setup, gpus = Setup(lengths_up_to(32768, tail)), 40
    workload, options = Workload(setup.lengths), batch_of(256, 8)
    arms: dict[str, Case | CaseMaker] = {
        "sync on all 40": Case("sync", options, workload, setup.cluster(gpus, gpus), 5, 1)
    }
    for train in (4, 8, 12, 16, 20, 24):
        name = f"{gpus - train} + {train}"
        arms[name] = asynchronous(name, options, workload, setup.cluster(gpus - train, train), 2, 5)

    def best(outcomes: Outcomes) -> str:
        rates = {arm: o.tokens / o.seconds for arm, o in outcomes.items()}
        share = train_gpus_of(outcomes["sync on all 40"], gpus, 2.0)
        return f"best: {max(rates, key=rates.get)}; β* of Proposition 2: {gpus - share} + {share}"

    return [
        Scenario(
            "split of 40 GPUs, α = 2",
            "trained_tokens_per_s",
            "trained tokens/s",
            1,
            arms,
            {"24 + 16": 2.0},
            "best at about 24 + 16, nearly 2x over the baseline; RollArt in production: train to rollout 1 : 5",
            "one secondary source; RollArt read",
            "where the best split lies depends on the assumed speed of training and the longest response; the "
            "baseline of the paper is not known",
            best,
        )
    ]


def over_sampling(tail: float) -> list[Scenario]:
    rows = []
    for model, text, ratio in (("Qwen3-4B", "+31.3 % (GRPO)", 1.313), ("Qwen3-8B", "+36.9 % (GRPO)", 1.369)):
        setup = Setup(lengths_up_to(16384, tail), model, "MI300X", tensor_parallel=2)
        options, cluster = batch_of(32, 8, on_update="resume"), setup.cluster(4, 8)
        arms = {f"R = {r:g}": r for r in (1.0, 1.5, 2.0, 3.0)}
        rows.append(
            Scenario(
                f"over-sampling 32x8, {model}",
                "new_tokens_per_rollout_s",
                "new tokens/s of rollout",
                1,
                {
                    arm: Case(arm, {**options, "over_sampling": r}, Workload(setup.lengths), cluster, 20, 5)
                    for arm, r in arms.items()
                },
                {"R = 2": ratio},
                f"R = 2: {text}; all models and losses +22.5 % on average, +44 % at most; resumed share 0.3–0.4",
                "secondary sources on two versions of the paper; settings read in its code",
                "the gain is that of not waiting for the longest response, and hangs on how much longer than the mean "
                "it is: 14 times under the law assumed here; the papers' runs must have had a lighter tail",
                _resumed,
            )
        )
    return rows


def _resumed(outcomes: Outcomes) -> str:
    two = outcomes["R = 2"]
    inherited = sum(step.inherited_tokens for step in two.steps) / two.tokens
    return (
        f"R = 2: resumed share {two.resumed_tokens / two.generated_tokens:.2f}, of trained tokens inherited "
        f"{inherited:.2f}, staleness at most {two.staleness_max}"
    )


def eta_sweep(tail: float) -> list[Scenario]:
    known = {
        "8K, 64x16 on 8 GPUs": (8192, 64, 8, {0: 27.1, 1: 47.8, 2: 47.8, 4: 49.0, 8: 51.5, 16: 52.0}),
        "27K, 128x16 on 32 GPUs": (27648, 128, 32, {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4}),
    }
    return [_eta_row(name, *row, tail) for name, row in known.items()]


def _eta_row(name: str, longest: int, groups: int, gpus: int, paper: dict[int, float], tail: float) -> Scenario:
    setup = Setup(lengths_up_to(longest, tail), "R1-Distill-Qwen-1.5B")
    cluster, workload = setup.cluster(gpus * 3 // 4, gpus // 4), Workload(setup.lengths)
    options = batch_of(groups, 16, stale_policy="gate", on_update="recompute")
    return Scenario(
        f"AReaL η, {name}",
        "trained_tokens_per_s",
        "trained tokens/s",
        1,
        {f"η = {eta}": asynchronous(f"η = {eta}", options, workload, cluster, eta, 5) for eta in paper},
        {f"η = {eta}": value / paper[0] for eta, value in paper.items() if eta},
        " → ".join(f"{value:g}" for value in paper.values()) + " k tokens/s",
        "read in the paper"
        + ("" if gpus == 8 else "; its 512x16 are simulated at a quarter, as are the assumed 128 GPUs"),
        "at η = 0 the two sides take turns; it levels off where one side is always busy, which is set by the assumed "
        "speed of training",
    )


def with_curve(case: Case, curve: EngineCurve) -> Case:
    """The same case on other engines."""
    return replace(case, cluster=replace(case.cluster, curve=curve))


MECHANISMS: dict[str, Callable[[float], list[Scenario]]] = {
    "scheduling": scheduling,
    "replication": replication,
    "environments": environments,
    "redundancy": redundancy,
    "alpha": alpha_sweep,
    "scaling": scaling,
    "split": split,
    "over-sampling": over_sampling,
    "eta": eta_sweep,
}
QUICK = ("scheduling", "replication", "over-sampling")
"""Those that are run for other tails too."""
TAILS = (LONGEST_TO_MEDIAN, 10.0, 5.0)
"""Longest length divided by the median: the papers' and, to see what hangs on it, less heavy ones."""
