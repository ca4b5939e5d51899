import functools
import itertools
import math
import random
import shutil
from dataclasses import replace

import pytest

from asyncrl.records import Ticket
from extras.latency_law import LatencyLaw
from extras.simulation import report, scenarios
from extras.simulation.clock import Clock
from extras.simulation.cluster import Case, Cluster, simulate
from extras.simulation.engine import EngineCurve, Request, SimulatedEngine, Swarm, roofline
from extras.simulation.swarm import Uplink
from extras.simulation.workload import (
    Turns,
    Workload,
    lengths_up_to,
)
from extras.swarm.pull import KEPT
from scripts import simulate as script
from scripts.lines import read

LAW = lengths_up_to(400)
FAILING = Workload(LAW, Turns(3, 5, LatencyLaw.parse("constant:1 fail:0.05"), 10.0))


def ticket(group_id):
    return Ticket(0, group_id, 0, 1, 0, (), "", None, 0, 0)


def slowing(slots=8):
    return EngineCurve(((1, 10.0), (64, 2.0)), 2000.0, slots)


def case(options=None, workload=None, workers=2, curve=None, steps=4, warmup=1, **cluster):
    options = {"groups_per_step": 3, "group_size": 4, **(options or {})}
    known = {"train_s_per_token": 0.002, "sync_s": 0.5, **cluster}
    machines = Cluster(curve or slowing(), workers, **known)
    return Case(options, workload or Workload(LAW, prompt_tokens=10), machines, steps, warmup)


# Queues, in closed form


def processor_sharing_s(lengths, slots, rate):
    """When the last of these requests has ended: `slots` at a time, all as fast as so many are, each in its order."""
    waiting, running, now = list(lengths), [], 0.0
    while waiting or running:
        started = waiting[: slots - len(running)]
        del waiting[: len(started)]
        running += started
        shortest = min(running)
        now += shortest / rate(len(running))
        running = [length - shortest for length in running if length > shortest]
    return now


@pytest.mark.parametrize("seed", range(30))
def test_rollout_is_a_queue_that_shares_its_processor(seed):
    """A batch is scored one by one when all of it has ended; engines of a worker share its requests evenly."""
    rng = random.Random(seed)
    options = {"groups_per_step": rng.randint(1, 6), "group_size": rng.randint(2, 5)}
    members = itertools.product(range(options["groups_per_step"]), range(options["group_size"]))
    lengths = [LAW.draw(group, ticket(group), member) for group, member in members]
    options["replicate_prompts"] = rng.random() < 0.5
    # a request for a whole group waits until it has slots for all
    slots = rng.randint(1, 9) if options["replicate_prompts"] else len(lengths)
    slow_rate = rng.choice([10.0, 2.0])
    num_replicas = rng.randint(1, 2)
    curve = EngineCurve(((1, 10.0), (9, slow_rate)), 1e12, slots)
    options["scheduling"], reward_s = rng.choice([("queue", 0.0), ("batch", 3.0)])
    workload = Workload(LAW, prompt_tokens=0, reward_s=reward_s)
    known = {"steps": 1, "warmup": 0, "sync_s": 0.0, "num_replicas": num_replicas}
    outcome = simulate(case(options, workload, 1, curve, **known))
    slots *= num_replicas
    sampled_s = processor_sharing_s(lengths, slots, lambda n: curve.rate(n / num_replicas))
    assert outcome.numbers["rollout_s"] == pytest.approx(sampled_s + len(lengths) * reward_s)


def test_a_request_that_is_aborted_leaves_its_slot_to_the_next():
    clock, ended = Clock(), []
    engine = SimulatedEngine(clock, EngineCurve(((1, 10.0), (2, 10.0)), 1e12, 1))
    requests = [Request(100, 0, lambda r: ended.append(clock.now)) for _ in range(3)]
    for request in requests:
        engine.add(request)
    counts = []
    for time_s, index in ((2.55, 0), (3.0, 2)):
        clock.at(time_s, lambda index=index: counts.append(engine.remove(requests[index])))
    clock.run_until(lambda: bool(ended))
    assert counts == [25, 0] and ended == pytest.approx([12.55])


# The real logic is driven

ARMS = {
    "synchronous": {},
    "asynchronous": {"async_ratio": 1.5},
    "dropping": {"async_ratio": 1.0, "stale_policy": "drop"},
    "batch": {"scheduling": "batch", "drop_zero_variance": True},
    "one request": {"replicate_prompts": False, "async_ratio": 1.0},
    "redundant": {"extra_groups": 2, "extra_members": 1, "drop_zero_variance": True},
    "over-sampling": {"over_sampling": 2.0, "on_update": "resume"},
    "gate": {"async_ratio": 2.0, "stale_policy": "gate", "on_update": "recompute"},
    "late": {"publish_delay": 2},
    "failing": {},
}


@pytest.mark.parametrize("arm", ARMS)
def test_every_group_and_token_is_accounted_for_and_none_is_trained_on_beyond_the_bound(arm):
    run = case(ARMS[arm], FAILING if arm == "failing" else None, steps=6)
    outcome, again = simulate(run), simulate(run)
    assert outcome.steps == again.steps and outcome.ledger == again.ledger
    assert simulate(replace(run, seed=1)).steps != outcome.steps
    ledger = outcome.ledger
    for source in ("groups_issued", "tokens_generated"):
        unit = source[:6]
        rest = [count for name, count in ledger.items() if name.startswith(unit) and name != source]
        assert ledger[source] == sum(rest)
    assert ledger["groups_consumed"] == 7 * 3
    assert [len(step.staleness) for step in outcome.steps] == [3 * 4] * 6
    read_s = [0.002 * (step.tokens + 12 * run.workload.prompt_tokens) for step in outcome.steps]
    assert [step.train_s for step in outcome.steps] == pytest.approx(read_s)
    assert (ledger["groups_dropped_failed"] > 0) == (arm == "failing")
    if arm != "gate":
        assert 0 <= outcome.numbers["staleness_max"] <= outcome.case.config.max_staleness
    if arm == "late":
        assert {value for step in outcome.steps[1:] for value in step.staleness} == {2}


def test_a_controller_that_takes_longer_than_the_results_come_sets_the_pace():
    instant = {"train_s_per_token": 0.0, "sync_s": 0.0}
    workload = Workload(LAW, prompt_tokens=0)
    numbers = simulate(case(workload=workload, message_s=100.0, **instant)).numbers
    assert numbers["step_s"] == pytest.approx(12 * 100.0, rel=0.2)
    assert numbers["controller_share"] > 0.8


# Swarms


def pulled(uplink_bytes_per_s, pulls):
    """When each of these pulls ends: (start, bytes, link)."""
    clock, ends = Clock(), {}
    uplink = Uplink(clock, uplink_bytes_per_s)
    for name, (start, num_bytes, link) in enumerate(pulls):
        done = functools.partial(lambda name: ends.update({name: clock.now}), name)
        clock.at(start, functools.partial(uplink.pull, num_bytes, link, done))
    clock.run_until(lambda: len(ends) == len(pulls))
    assert uplink.sent_bytes == pytest.approx(sum(num_bytes for _, num_bytes, _ in pulls), rel=1e-3)
    return [ends[name] for name in range(len(pulls))]


def test_machines_that_pull_share_the_uplink_and_leave_what_their_own_links_cannot_take():
    # 10 kB/s: the slow link takes 2, the fast one 8 until it has its 40 kB at 5 s; the slow one goes on to 10 s.
    assert pulled(1e4, [(0, 2e4, 2e3), (0, 4e4, 1e6)]) == pytest.approx([10.0, 5.0], rel=1e-3)
    # Alone to 2 s, 5 and 5 to 4 s, alone again.
    assert pulled(1e4, [(0, 4e4, 1e6), (2, 1e4, 1e6)]) == pytest.approx([5.0, 4.0], rel=1e-3)
    assert pulled(math.inf, [(0, 2e4, 2e3), (0, 4e4, 1e4)]) == pytest.approx([10.0, 4.0], rel=1e-3)


def swarm_case(options=None, steps=9, **changes):
    known = {"weight_bytes": 1e7, "delta_share": 0.02, "uplink_bytes_per_s": 1e7, "stay_s": 1e9}
    options = {"async_ratio": 1.0, "max_running_requests": 4, **(options or {})}
    known = Swarm(**known | changes)
    return case(options, workers=8, curve=slowing(4), steps=steps, swarm=known)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_machines_that_come_and_go_lose_no_group_and_break_no_bound(lag):
    outcome = simulate(swarm_case({"swarm.refresh_lag": lag}, stay_s=30.0))
    numbers = outcome.numbers
    assert numbers["issued_again"] > 0 and outcome.ledger["groups_consumed"] == 10 * 3
    assert 0 < numbers["staleness_max"] <= 1 + lag == outcome.case.config.max_staleness
    assert 0.01 < numbers["cpu_ms_per_trajectory"] < 100


def test_weights_take_a_machine_the_time_of_their_bytes_and_those_no_longer_kept_come_whole():
    quick, slow = (simulate(swarm_case(uplink_bytes_per_s=rate)).numbers for rate in (1e7, 1e4))
    assert 0.999 * 8 * 2e5 / 1e7 < quick["fetch_s"] < 1 and slow["fetch_s"] > 8 * 2e5 / 1e4 > 100
    assert quick["uplink_share"] < slow["uplink_share"] <= 1 and quick["step_s"] < slow["step_s"]
    lag = {"swarm.refresh_lag": KEPT}
    whole, files = (simulate(swarm_case(lag, uplink_bytes_per_s=rate)) for rate in (1e7, math.inf))
    assert whole.numbers["fetch_s"] > 10 * files.numbers["fetch_s"]


@pytest.mark.parametrize(("context", "num_requests", "most"), [(10_000, 128, 37), (100, 256, 128)])
def test_a_roofline_is_its_formula_and_holds_as_many_requests_as_fit(context, num_requests, most):
    """Weights and cache are the limit of the long context, floating-point operations that of the short one."""
    curve = roofline("Qwen3-8B", "H800", context)
    kv_bytes = 2 * 36 * 8 * 128 * 2 * context
    for n in (1, 16, num_requests):
        compute_s = 2 * 8.2e9 * n / (0.4 * 989e12)
        memory_s = (16.4e9 + n * kv_bytes) / 0.7 / 3.35e12
        assert 1 / curve.rate(n) == pytest.approx(0.003 + max(compute_s, memory_s))
    assert curve.max_running_requests == most


# Comparisons


def test_every_arm_in_the_file_of_comparisons_is_a_valid_run():
    outcome = simulate(case(steps=1))  # stands for the arm by which others are split
    for scenario in scenarios.scenarios():
        assert scenario.why and scenario.source
        for arm in scenario.arms:
            run = scenario.case(arm, dict.fromkeys(scenario.arms, outcome), seed=3)
            assert run.config and run.seed == 3
            assert run.steps % math.ceil(1 + run.config.async_ratio) == 0


# Records and tables


SIMULATED_AGAIN = [
    "own bench, environments normal(10,5)",
    pytest.param("own bench, over-sampling", marks=pytest.mark.slow),
    "own bench, replication 8x8",
    pytest.param("own bench, redundancy", marks=pytest.mark.slow),
]
"""Of every kind the comparison that is simulated fastest."""


@pytest.mark.parametrize("name", SIMULATED_AGAIN)
def test_a_stored_record_is_what_is_simulated_now(name):
    (scenario,) = scenarios.scenarios([name])
    (arms,) = (
        record["arms"]
        for record in read(scenarios.RESULTS / "simulation" / "simulation.jsonl")
        if (record["scenario"], record["seed"]) == (name, 1)
    )
    for arm, numbers in script.run(scenario, 1)["arms"].items():
        assert arms[arm] == arms[arm] | numbers


def test_the_stored_page_is_made_of_the_stored_records_which_have_all_comparisons(tmp_path):
    folder = scenarios.RESULTS / "simulation"
    shutil.copy(folder / "simulation.jsonl", tmp_path)
    report.write(tmp_path)
    assert (tmp_path / "table.md").read_text() == (folder / "table.md").read_text()
    counts = report.claims(read(folder / "simulation.jsonl"))
    there = set(zip(counts["scenario"], counts["tail"], strict=True))
    assert there == {(scenario.name, scenario.tail) for scenario in scenarios.scenarios()}
    assert counts["count"].min() == counts["count"].max() >= 5


def test_a_run_replaces_its_earlier_record_and_one_of_other_arms_is_refused(tmp_path):
    path, name = tmp_path / "simulation.jsonl", SIMULATED_AGAIN[2]
    for seed, arms in ((0, 1), (1, 1), (1, 2)):
        report.replace({"scenario": name, "tail": 20.0, "seed": seed, "arms": {"one": arms}}, path)
    assert [(record["seed"], record["arms"]["one"]) for record in read(path)] == [(0, 1), (1, 2)]
    with pytest.raises(ValueError, match=f"records of '{name}' do not have the arms of"):
        report.claims(read(path))
