"""The real controller over a virtual cluster: queues in closed form, the ledger, swarms, and stored records."""

import functools
import itertools
import math
import random
import shutil
import statistics
from dataclasses import replace

import pytest

from asyncrl.records import Ticket
from extras.latency_law import LatencyLaw
from extras.planning.advisor import predicted_lag
from extras.simulation import studies
from extras.simulation.clock import Clock
from extras.simulation.cluster import Case, Cluster, Simulation, simulate
from extras.simulation.engine import EngineCurve, Request, SimulatedEngine, Swarm
from extras.simulation.swarm import Uplink
from extras.simulation.workload import Turns, Workload, lengths_up_to
from extras.swarm.pull import KEPT
from scripts import simulate as script
from scripts.lines import ROOT, read, replace_record

LAW = lengths_up_to(400)
FAILING = Workload(LAW, Turns(3, 5, LatencyLaw.parse("constant:1 fail:0.05"), 10.0))
RESULTS = ROOT / "results" / "simulation"


def ticket(group_id, member):
    return Ticket(0, group_id, member, 1, 0, (), "", None, 0, 0)


def slowing(slots=8):
    return EngineCurve(((1, 10.0), (64, 2.0)), 2000.0, slots)


def case(options=None, workload=None, workers=2, curve=None, steps=4, warmup=1, **cluster):
    options = {"groups_per_step": 3, "group_size": 4, **(options or {})}
    numbers = {"train_s_per_token": 0.002, "sync_s": 0.5, **cluster}
    hardware = Cluster(curve or slowing(), workers, **numbers)
    return Case(options, workload or Workload(LAW, prompt_tokens=10), hardware, steps, warmup)


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
    """Engines of a worker share its requests evenly."""
    rng = random.Random(seed)
    options = {"groups_per_step": rng.randint(1, 6), "group_size": rng.randint(2, 5)}
    members = itertools.product(range(options["groups_per_step"]), range(options["group_size"]))
    lengths = [LAW.draw(group, ticket(group, member)) for group, member in members]
    slots, num_replicas = rng.randint(1, 9), rng.randint(1, 2)
    curve = EngineCurve(((1, 10.0), (9, rng.choice([10.0, 2.0]))), 1e12, slots)
    worker = curve.scaled(replicas=num_replicas)
    hardware = {"steps": 1, "warmup": 0, "sync_s": 0.0}
    outcome = simulate(case(options, Workload(LAW, prompt_tokens=0), 1, worker, **hardware))
    rate = lambda n: curve.rate(n / num_replicas)  # noqa: E731
    sampled_s = processor_sharing_s(lengths, slots * num_replicas, rate)
    assert outcome.numbers["rollout_s"] == pytest.approx(sampled_s)


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
    "in step": {"scheduling": "lockstep", "drop_zero_variance": True},
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


def test_hosts_that_pull_share_the_uplink_and_leave_what_their_own_links_cannot_take():
    # 10 kB/s: the slow link takes 2, the fast one 8 until it has its 40 kB at 5 s; the slow one goes on to 10 s.
    assert pulled(1e4, [(0, 2e4, 2e3), (0, 4e4, 1e6)]) == pytest.approx([10.0, 5.0], rel=1e-3)
    # Alone to 2 s, 5 and 5 to 4 s, alone again.
    assert pulled(1e4, [(0, 4e4, 1e6), (2, 1e4, 1e6)]) == pytest.approx([5.0, 4.0], rel=1e-3)
    assert pulled(math.inf, [(0, 2e4, 2e3), (0, 4e4, 1e4)]) == pytest.approx([10.0, 4.0], rel=1e-3)


def swarm_case(options=None, steps=9, **changes):
    swarm = {"weight_bytes": 1e7, "delta_share": 0.02, "uplink_bytes_per_s": 1e7, "stay_s": 1e9}
    options = {"async_ratio": 1.0, "max_running_requests": 4, **(options or {})}
    swarm = Swarm(**swarm | changes)
    return case(options, workers=8, curve=slowing(4), steps=steps, swarm=swarm)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_hosts_that_join_and_leave_lose_no_group_and_break_no_bound(lag):
    outcome = simulate(swarm_case({"swarm.refresh_lag": lag}, stay_s=30.0))
    numbers = outcome.numbers
    assert numbers["reissued"] > 0 and outcome.ledger["groups_consumed"] == 10 * 3
    assert 0 < numbers["staleness_max"] <= 1 + lag == outcome.case.config.max_staleness
    assert 0.01 < numbers["cpu_ms_per_trajectory"] < 100


def test_weights_take_a_host_the_time_of_their_bytes_and_those_no_longer_kept_come_whole():
    quick, slow = (simulate(swarm_case(uplink_bytes_per_s=rate)).numbers for rate in (1e7, 1e4))
    assert 0.999 * 8 * 2e5 / 1e7 < quick["fetch_s"] < 1 and slow["fetch_s"] > 8 * 2e5 / 1e4 > 100
    assert quick["uplink_share"] < slow["uplink_share"] <= 1 and quick["step_s"] < slow["step_s"]
    lag = {"swarm.refresh_lag": KEPT}
    whole, files = (simulate(swarm_case(lag, uplink_bytes_per_s=rate)) for rate in (1e7, math.inf))
    assert whole.numbers["fetch_s"] > 10 * files.numbers["fetch_s"]


# Studies


def test_a_study_has_engines_and_a_trainer_as_fast_as_the_data_sheet_says():
    (setting,) = (s for s in studies.settings(["split of 40 GPUs"]) if s.name == "24 + 16")
    cluster = setting.case(seed=0).cluster
    kv_bytes = 2 * 36 * 8 * 128 * 2 * lengths_up_to(32768).means.context
    for n in (1, 16, 128):  # so few that reading takes longer than multiplying
        step_s = 0.003 + (16.4e9 + n * kv_bytes) / 0.7 / 3.35e12
        assert 1 / cluster.curve.rate(n) == pytest.approx(step_s)
    assert cluster.curve.prefill_tokens_per_s == pytest.approx(0.4 * 989e12 / 16.4e9)
    assert cluster.curve.max_running_requests == 128
    assert cluster.train_s_per_token == pytest.approx(8 * 8.2e9 / (0.4 * 989e12 * 16))


def test_every_setting_in_the_file_of_studies_is_a_valid_run():
    for setting in studies.settings():
        run = setting.case(seed=3)
        assert run.config and run.seed == 3
        assert run.steps % math.ceil(1 + run.config.async_ratio) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"on_update": "restart"},
        {"on_update": "wait"},
        {"scheduling": "batch"},
        {"replicate_prompts": False},
    ],
)
def test_options_that_are_not_simulated_are_refused(options):
    with pytest.raises(ValueError, match="not simulated"):
        simulate(case(options))


SIMULATED_AGAIN = [
    "environments, normal(10,1) s",
    pytest.param("environments, normal(10,10) s", marks=pytest.mark.slow),
    pytest.param("scale", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", SIMULATED_AGAIN)
def test_a_stored_record_is_what_is_simulated_now(name):
    setting = studies.settings([name])[-1]
    record = next(
        record
        for record in read(RESULTS / "simulation.jsonl")
        if (record["study"], record["setting"]) == (name, setting.name)
    )
    measured = script.run(setting, record["seed"])["numbers"]
    assert measured.pop("cpu_ms_per_trajectory") > 0
    record["numbers"].pop("cpu_ms_per_trajectory", None)  # the machine's, too
    assert measured | record["numbers"] == measured


def test_the_stored_page_is_made_of_the_stored_records_which_have_all_settings(tmp_path):
    shutil.copy(RESULTS / "simulation.jsonl", tmp_path)
    script.write(tmp_path)
    assert (tmp_path / "table.md").read_text() == (RESULTS / "table.md").read_text()
    keys = [
        tuple(record[key] for key in script.KEY) for record in read(RESULTS / "simulation.jsonl")
    ]
    settings = {(setting.study, setting.name) for setting in studies.settings()}
    assert len(set(keys)) == len(keys)
    recorded = {study for study, *_ in keys}
    assert recorded == {study for study, _ in settings} - {"swarm"}  # which takes minutes a run
    assert {key[:2] for key in keys} == {names for names in settings if names[0] in recorded}


@pytest.mark.parametrize("seed", range(8))
def test_the_realised_lag_is_between_both_predictions(seed):
    """The planner's arithmetic, beside the real controller under random rates. Lengths have a long tail."""
    rng = random.Random(seed)
    groups_per_step, alpha, slots = (
        rng.choice([4, 8, 16]),
        rng.choice([1, 2, 4, 8]),
        2 ** rng.randint(3, 7),
    )
    options = {"groups_per_step": groups_per_step, "group_size": rng.choice([2, 4, 8])}
    options |= {"async_ratio": float(alpha), "publish_delay": rng.choice([0, 2])}
    curve = EngineCurve(((1, 100.0), (64, 20.0)), 1e12, slots)
    hardware = {"train_s_per_token": rng.choice([0.0002, 0.001, 0.003]), "sync_s": 0.05}
    events = []
    simulation = Simulation(
        case(options, Workload(LAW, prompt_tokens=0), 2, curve, 30, 10, **hardware),
        lambda event, **fields: events.append((event, fields)),
    )
    realised = simulation.run().numbers["staleness_mean"]
    steps = [fields for event, fields in events if event == "step"][10:]
    started, ended = {}, {}
    for event, fields in events:
        if event == "trajectory":
            group = fields["group"]
            started[group] = min(fields["started_at"], started.get(group, math.inf))
            ended[group] = max(fields["ended_at"], ended.get(group, 0.0))
    took_s = [ended[group] - started[group] for step in steps for group in step["groups"]]
    spans = [step["spans"][0][1:] for step in steps]
    step_s = (spans[-1][1] - spans[0][1]) / (len(spans) - 1)
    busy_s = statistics.fmean(end - start for start, end in spans) + 0.05
    low, high = predicted_lag(
        alpha, options["publish_delay"], statistics.fmean(took_s) / step_s, busy_s / step_s
    )
    assert low - 0.25 <= realised <= high + 1e-9


def test_a_run_replaces_its_earlier_record(tmp_path):
    path = tmp_path / "simulation.jsonl"
    for seed, number in ((0, 1), (1, 1), (1, 2)):
        new = {"study": "scale", "setting": "128 GPUs", "seed": seed, "numbers": number}
        replace_record(new, path, script.KEY)
    assert [(record["seed"], record["numbers"]) for record in read(path)] == [(0, 1), (1, 2)]
