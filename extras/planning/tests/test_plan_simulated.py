"""The planner against simulated clusters under the real controller: its step.

Engines decode and trainers train as fast as the planner says; what is checked is how these go together: who gets which
ticket, what waits for whom, how long the longest responses hold a step up. A trainer does not wait for a broadcast.
Of thirty clusters, and of fifty random plans beside the chosen one, there are records: results/README.md.
"""

import random

from qwen3_models import shape_of

from asyncrl.config import Config
from extras.planning import planner
from extras.planning.planner import Cluster, Job, Lengths, Plan, Pool, make_engine, read_sheets
from extras.simulation.cluster import Case, Simulation
from extras.simulation.cluster import Cluster as Simulated
from extras.simulation.engine import EngineCurve, SimulatedEngine
from extras.simulation.workload import PROMPT_TOKENS, LengthLaw, Workload

LAW = LengthLaw(300.0, 0.8, 2048)
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KINDS = ("H200", "H100 SXM", "H800", "H20", "A100 80GB", "A800", "L40S", "L20", "RTX 4090")
LIMITS = {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": LAW.longest}


def random_job(rng: random.Random) -> Job:
    options = {
        "async_ratio": rng.choice([0.0, 1.0, 2.0]),
        "max_running_requests": rng.choice([32, 128]),
    }
    shape = shape_of(rng.choice(["1.7b", "8b"]))
    config = Config(groups_per_step=16, **LIMITS, **options).checked()
    return Job(config, shape, Lengths.lognormal(PROMPT_TOKENS, LAW.median, LAW.sigma, config))


def random_cluster(rng: random.Random) -> Cluster:
    """Two or three kinds of GPUs by their data sheets, 1–3 machines of each, 2–8 GPUs in one."""
    sheets = read_sheets()
    pools = tuple(
        Pool(name, name, rng.randint(1, 3), rng.choice([2, 4, 8]), 1.0, **sheets[name])
        for name in rng.sample(KINDS, rng.choice([2, 2, 3]))
    )
    return Cluster(pools, rng.choice([5.0, 25.0]), rng.choice([1.5, 5.0]))


class PlannedSimulation(Simulation):
    """A plan under the real controller: each worker has the engine of the plan, the trainer its time for a token."""

    def __init__(self, plan: Plan, seed: int, steps: int):
        split, job = plan.split, plan.split.job
        engines = [engine for _, engine, count in plan.engines for _ in range(count)]
        token_s = split.training_s / job.read_tokens
        machines = Simulated(self.curve(job, engines[0]), len(engines), token_s)
        names = ["groups_per_step", "group_size", "async_ratio", "max_running_requests", *LIMITS]
        options = {name: getattr(job.config, name) for name in names}
        period = 1 + int(job.config.async_ratio)  # groups that start together end together
        case = Case(options, Workload(LAW), machines, steps * period, 2 + period, seed)
        super().__init__(case)
        for worker, engine in zip(self.workers, engines, strict=True):
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
    return PlannedSimulation(plan, seed, steps).run().numbers["step_s"]


def compared(plan: Plan, seed: int) -> dict:
    step_s = simulated_step_s(plan, seed)
    return {"predicted_s": plan.step_s, "at_most_s": plan.most_step_s, "simulated_s": step_s}


def clusters(count):
    """`count` random clusters with the best plan in which nobody shares a GPU, and a seed."""
    seed = 0
    while count:
        rng, seed = random.Random(seed), seed + 1
        job, cluster = random_job(rng), random_cluster(rng)
        plans = [plan for plan in planner.plan(job, cluster) if not plan.split.colocate]
        if plans:
            count -= 1
            yield seed, job, cluster, plans[0]


def test_the_step_of_a_plan_is_near_that_of_a_simulated_cluster():
    for seed, _, _, plan in clusters(2):
        row = compared(plan, seed)
        assert 0.75 < row["predicted_s"] / row["simulated_s"] < 1.2, row
