"""The planner against simulated clusters under the real controller: its step, its order of plans, and its choice.

Engines decode and trainers train as fast as the planner says; what is checked is how these go together: who gets which
ticket, what waits for whom, how long the longest responses hold a step up. A trainer does not wait for a broadcast.
Records: extras/planning/tests/planner_records.py.
"""

import random
import statistics

import pytest
from planner_records import keep
from scipy.stats import spearmanr

from asyncrl.config import Config
from extras.planning import planner
from extras.planning.planner import Cluster, Job, Lengths, Plan, Pool, make_engine, read_sheets
from extras.planning.shape import read_shape
from extras.simulation.cluster import Case, Simulation
from extras.simulation.cluster import Cluster as Simulated
from extras.simulation.engine import EngineCurve, SimulatedEngine
from extras.simulation.workload import PROMPT_TOKENS, LengthLaw, Workload
from scripts.qwen3_shapes import qwen3_config

LAW = LengthLaw(300.0, 0.8, 2048)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KINDS = ("H200", "H100 SXM", "H800", "H20", "A100 80GB", "A800", "L40S", "L20", "RTX 4090")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Two models by their config.json."""
    found = {}
    for size in ("1.7b", "8b"):
        folder = tmp_path_factory.mktemp(size)
        qwen3_config(size).save_pretrained(folder)
        found[size] = read_shape(str(folder))
    return found


def job(shape, **options) -> Job:
    limits = {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": LAW.longest}
    config = Config(groups_per_step=16, **limits, **options).checked()
    return Job(config, shape, Lengths.lognormal(PROMPT_TOKENS, LAW.median, LAW.sigma, config))


def random_cluster(rng: random.Random) -> Cluster:
    """Two or three kinds of GPUs by their data sheets, 1–3 machines of each, 2–8 GPUs in one."""
    sheets, pools = read_sheets(), []
    for name in rng.sample(KINDS, rng.choice([2, 2, 3])):
        pools.append(
            Pool(name, name, rng.randint(1, 3), rng.choice([2, 4, 8]), 1.0, **sheets[name])
        )
    return Cluster(tuple(pools), rng.choice([5.0, 25.0]), rng.choice([1.5, 5.0]))


class PlannedSimulation(Simulation):
    """A plan under the real controller: each worker has the engine of the plan, the trainer its time for a token."""

    def __init__(self, plan: Plan, seed: int, steps: int):
        split, job = plan.split, plan.split.job
        chosen = [engine for _, engine, count in plan.engines for _ in range(count)]
        token_s = split.training_s / job.read_tokens
        machines = Simulated(self.curve(job, chosen[0]), len(chosen), token_s)
        names = ["groups_per_step", "group_size", "async_ratio", "max_running_requests"]
        names += ["max_prompt_tokens", "max_response_tokens"]
        options = {name: getattr(job.config, name) for name in names}
        period = 1 + int(job.config.async_ratio)  # groups that start together end together
        case = Case(options, Workload(LAW), machines, steps * period, 2 + period, seed)
        super().__init__(case)
        for worker, engine in zip(self.workers, chosen, strict=True):
            worker.process.engine = SimulatedEngine(self.clock, self.curve(job, engine))
            worker.process.sync_s = split.update_s

    @staticmethod
    def curve(job: Job, engine: planner.Engine) -> EngineCurve:
        """The planner's own costs at each number of requests; as many run as the cache allows."""
        pool, tp = engine.pool, engine.tp
        most = planner.largest_engine(job, pool, tp).requests
        decode = tuple((n, 1 / make_engine(job, pool, tp, n).decode_s) for n in COUNTS)
        return EngineCurve(decode, job.lengths.prompt / planner.prefill_s(job, pool, tp), most)


def simulated_step_s(plan: Plan, seed: int, steps: int = 6) -> float:
    outcome = PlannedSimulation(plan, seed, steps).run()
    return outcome.numbers["step_s"]


def compared(plan: Plan, seed: int) -> dict:
    step_s = simulated_step_s(plan, seed)
    return {"predicted_s": plan.step_s, "at_most_s": plan.most_step_s, "simulated_s": step_s}


def random_plan(every: list[planner.Split], rng: random.Random) -> Plan:
    """Some split of the GPUs with some engines on some of them."""
    split = rng.choice(every)
    site, engine = rng.choice(split.options)
    most = site.gpus // engine.tp * (1 if site.trains else site.machines)
    count = rng.randint(1, most) * (site.machines if site.trains else 1)
    chosen = [(site, engine, count)]
    others = [(s, e) for s, e in split.options if s != site]
    if others and rng.random() < 0.7:
        other, of = rng.choice(others)
        more = rng.randint(1, other.gpus // of.tp * (1 if other.trains else other.machines))
        chosen.append((other, of, more * (other.machines if other.trains else 1)))
    return planner.sampled_by(split, chosen)


def clusters(shapes, count):
    """`count` random clusters with the best plan in which nobody shares a GPU, and a seed."""
    seed = 0
    while count:
        rng, seed = random.Random(seed), seed + 1
        options = {
            "async_ratio": rng.choice([0.0, 1.0, 2.0]),
            "max_running_requests": rng.choice([32, 128]),
        }
        j, c = job(shapes[rng.choice(list(shapes))], **options), random_cluster(rng)
        plans = [plan for plan in planner.plan(j, c) if not plan.split.colocate]
        if plans:
            count -= 1
            yield seed, j, c, plans[0]


def test_the_step_of_a_plan_is_near_that_of_a_simulated_cluster(shapes):
    for seed, _, _, plan in clusters(shapes, 2):
        row = compared(plan, seed)
        assert 0.75 < row["predicted_s"] / row["simulated_s"] < 1.1, row


@pytest.mark.study
def test_the_steps_of_30_random_clusters_are_in_the_order_of_the_simulated_ones(shapes):
    rows = []
    for seed, j, c, plan in clusters(shapes, 30):
        gpus = " + ".join(f"{p.count} × {p.gpus} {p.gpu}" for p in c.pools)
        rows.append(
            {
                "arm": f"{seed}",
                "gpus": gpus,
                "async_ratio": j.config.async_ratio,
                **compared(plan, seed),
            }
        )
    errors = [row["predicted_s"] / row["simulated_s"] - 1 for row in rows]
    rank = spearmanr(
        [row["predicted_s"] for row in rows], [row["simulated_s"] for row in rows]
    ).statistic
    said = f"Rank correlation (Spearman) {rank:.3f}."
    keep(__file__, [{"case": "simulated", "repeat": 0, **row, "all": said} for row in rows])
    assert rank > 0.95, rank
    assert abs(statistics.median(errors)) < 0.15 and max(map(abs, errors)) < 0.4, errors


@pytest.mark.study
def test_the_chosen_plan_is_not_beaten_by_50_random_ones_in_the_simulation(shapes):
    rows = []
    for seed, j, c, best in clusters(shapes, 3):
        rng, every = random.Random(seed), [p for p in planner.splits(j, c) if not p.colocate]
        others = []
        while len(others) < 50:
            plan = random_plan(every, rng)
            others.append((plan.step_s, simulated_step_s(plan, seed, steps=4)))
        chosen_s = simulated_step_s(best, seed, steps=4)
        steps_s = sorted(simulated for _, simulated in others)
        rank = spearmanr(
            [predicted for predicted, _ in others], [simulated for _, simulated in others]
        ).statistic
        rows.append({"arm": f"{seed}", "chosen_s": chosen_s, "best_s": steps_s[0], "median_s": steps_s[25],
                     "rank": rank, "beaten_by": sum(s < chosen_s for s in steps_s)})  # fmt: skip
        assert chosen_s <= 1.05 * steps_s[0], rows[-1]
    keep(__file__, [{"case": "50 others", "repeat": 0, **row} for row in rows])
