import heapq
import itertools
import json
import math
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from data.records import Ticket
from scripts import simulate as script
from scripts.latency import LatencyLaw
from scripts.simulation import measure, report, scale, theory
from scripts.simulation.clock import Clock
from scripts.simulation.cluster import Case, Cluster, simulate
from scripts.simulation.engine import GPUS, MODELS, EngineCurve, Request, SimulatedEngine, roofline
from scripts.simulation.scenarios import MECHANISMS, QUICK, TAILS, Scenario, batch_of, train_gpus_of
from scripts.simulation.workload import LengthLaw, Turns, Workload, draws_of, lengths_up_to

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "results" / "simulation" / "simulation.jsonl"
LAW = lengths_up_to(400)


@dataclass(frozen=True)
class Table:
    """Lengths that are given, by member."""

    lengths: tuple[int, ...]

    def draw(self, problem, ticket, member):
        return self.lengths[member]


def ticket(group_id, attempt=0):
    return Ticket(0, group_id, 0, 1, attempt, (), "", None, 0, 0)


def steady(slots=4, rate=10.0):
    """An engine whose speed does not depend on how many run, and which needs no time for prompts."""
    return EngineCurve("steady", ((1, rate), (2, rate)), 1e12, slots)


def slowing(slots=8):
    return EngineCurve("slowing", ((1, 10.0), (64, 2.0)), 2000.0, slots)


def case(options=None, workload=None, workers=2, curve=None, steps=4, warmup=1, **cluster):
    options = {"groups_per_step": 3, "group_size": 4, **(options or {})}
    machines = Cluster(curve or slowing(), workers, **{"train_s_per_token": 0.002, "sync_s": 0.5, **cluster})
    return Case("case", options, workload or Workload(LAW, prompt_tokens=10), machines, steps, warmup)


# By hand


def test_three_responses_on_two_slots_take_what_they_take_by_hand():
    # 30, 10 and 20 tokens at 10 tokens/s: the first to 3 s, the second to 1 s, the third from then to 3 s. Then
    # 60 tokens are trained on for 0.6 s, and weights travel for 0.4 s.
    workload = Workload(Table((30, 10, 20)), prompt_tokens=0)
    outcome = simulate(
        case({"groups_per_step": 1, "group_size": 3}, workload, 1, steady(2), train_s_per_token=0.01, sync_s=0.4)
    )
    assert [step.wait_s for step in outcome.steps] == pytest.approx([3.0] * 4)
    assert outcome.step_s == pytest.approx(4.0)
    assert outcome.trained_tokens_per_s == pytest.approx(15.0)
    assert outcome.slot_share == pytest.approx(6 / 8)


def test_an_engine_that_slows_down_with_its_load_takes_what_it_takes_by_hand():
    # Alone 10 tokens/s, two together 5 each: 30 and 10 tokens to 2 s, then 20 and 20 tokens left to 6 s.
    curve = EngineCurve("halving", ((1, 10.0), (2, 5.0)), 1e12, 2)
    workload = Workload(Table((30, 10, 20)), prompt_tokens=0)
    outcome = simulate(case({"groups_per_step": 1, "group_size": 3}, workload, 1, curve, sync_s=0.0))
    assert [step.wait_s for step in outcome.steps] == pytest.approx([6.0] * 4)


def test_tokens_carry_the_version_under_which_they_were_decoded_and_a_rebuilt_cache_costs_its_prefill():
    # 10 tokens, half a second frozen, 15 tokens of context (5 of them prompt) computed anew at 15 tokens/s, 20 tokens.
    clock, ended = Clock(), []
    engine = SimulatedEngine(clock, replace(steady(), prefill_tokens_per_s=15.0))
    engine.resume(0, recompute=False)
    request = Request(30, 5, lambda r: ended.append((clock.now, engine.segments(r, 30))))
    engine.add(request)
    clock.at(5 / 15 + 1.0, engine.freeze)
    clock.at(5 / 15 + 1.5, lambda: engine.resume(1, recompute=True))
    clock.run_until(lambda: bool(ended))
    ((time_s, segments),) = ended
    assert time_s == pytest.approx(5 / 15 + 1.5 + 1.0 + 2.0)
    assert segments == [(0, 10), (1, 20)]


def test_a_request_that_is_aborted_leaves_its_slot_to_the_next():
    clock, ended = Clock(), []
    engine = SimulatedEngine(clock, steady(slots=1))
    requests = [Request(100, 0, lambda r: ended.append(clock.now)) for _ in range(3)]
    for request in requests:
        engine.add(request)
    counts = []
    clock.at(2.55, lambda: counts.append(engine.remove(requests[0])))
    clock.at(3.0, lambda: counts.append(engine.remove(requests[2])))
    clock.run_until(lambda: bool(ended))
    assert counts == [25, 0] and ended == pytest.approx([12.55])


def test_a_barrier_costs_the_slowest_of_each_turn():
    # Without a barrier the batch takes the longest sum of turns; with one the sum of the longest turns.
    turns = Turns(4, 10, LatencyLaw.parse("normal:10,5"), 1e9)
    workload = Workload(LAW, turns, prompt_tokens=0)
    times = {}
    for barrier in (False, True):
        one = case(
            {"scheduling": "lockstep" if barrier else "queue"}, workload, 1, steady(100), steps=1, warmup=0, sync_s=0.0
        )
        times[barrier] = simulate(one).rollout_s
    draws = []
    for group, member in itertools.product(range(3), range(4)):
        rng = draws_of(group, ticket(group), member)
        draws.append([1.0 + turns.latency.draw(rng).seconds for _ in range(4)])
    assert times[False] == pytest.approx(max(map(sum, draws)))
    assert times[True] == pytest.approx(sum(map(max, zip(*draws, strict=True))))


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
}


@pytest.mark.parametrize("arm", ARMS)
def test_every_group_and_token_is_consumed_dropped_or_there_at_the_end(arm):
    outcome = simulate(case(ARMS[arm], steps=6))
    ledger = outcome.ledger
    for unit, source in (("groups", "issued"), ("tokens", "generated")):
        rest = [count for name, count in ledger.items() if name.startswith(unit) and not name.endswith(source)]
        assert ledger[f"{unit}_{source}"] == sum(rest)
    assert ledger["groups_consumed"] == 7 * 3
    assert [len(step.staleness) for step in outcome.steps] == [3 * 4] * 6


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "gate"])
def test_no_trained_token_is_older_than_the_bound(arm):
    outcome = simulate(case(ARMS[arm], steps=6))
    assert 0 <= outcome.staleness_max <= outcome.case.config.max_staleness
    if arm == "late":
        assert {value for step in outcome.steps[1:] for value in step.staleness} == {2}


def test_the_real_buffer_refuses_tokens_that_are_older_than_their_group(monkeypatch):
    monkeypatch.setattr(SimulatedEngine, "segments", lambda engine, request, num_tokens: [(0, num_tokens)])
    with pytest.raises(RuntimeError, match="has a token of version 0, but its group was started at version 1"):
        simulate(case())


def test_failing_environments_are_dropped_and_replaced():
    workload = Workload(LAW, Turns(3, 5, LatencyLaw.parse("constant:1 fail:0.05"), 10.0))
    outcome = simulate(case(workload=workload, steps=10))
    assert outcome.ledger["groups_dropped_failed"] > 0 and outcome.ledger["groups_consumed"] == 33


def test_a_seed_makes_the_run_and_another_seed_another():
    first, again = simulate(case(ARMS["asynchronous"])), simulate(case(ARMS["asynchronous"]))
    assert first.steps == again.steps and first.ledger == again.ledger
    assert simulate(replace(first.case, seed=1)).steps != first.steps


def test_a_controller_that_takes_longer_than_the_results_come_sets_the_pace():
    outcome = simulate(
        case(workload=Workload(LAW, prompt_tokens=0), message_s=100.0, train_s_per_token=0.0, sync_s=0.0)
    )
    assert outcome.step_s == pytest.approx(12 * 100.0, rel=0.2) and outcome.controller_share > 0.8


def test_what_is_not_simulated_is_refused():
    with pytest.raises(ValueError, match="on_update restart is not simulated; use keep, recompute or resume"):
        simulate(case({"on_update": "restart"}))


# Theory


def list_schedule(durations, slots):
    """When the last of these jobs ends, each in its order on the slot that is free first."""
    free = [0.0] * slots
    for duration in durations:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


@pytest.mark.parametrize("seed", range(8))
def test_rollout_at_a_steady_speed_is_list_scheduling(seed):
    rng = random.Random(seed)
    groups, size, slots = rng.randint(1, 6), rng.randint(2, 5), rng.randint(1, 9)
    one = case(batch_of(groups, size), Workload(LAW, prompt_tokens=0), 1, steady(slots), steps=1, warmup=0)
    durations = [LAW.draw(group, ticket(group), member) / 10 for group in range(groups) for member in range(size)]
    assert simulate(one).rollout_s == pytest.approx(list_schedule(durations, slots))


def test_more_slots_or_a_faster_engine_never_take_longer():
    # Independent jobs in a fixed order: with one more slot none starts later.
    def rollout_s(slots, rate=10.0):
        workload = Workload(LAW, prompt_tokens=0)
        return simulate(case(batch_of(6, 4), workload, 1, steady(slots, rate), steps=1, warmup=0)).rollout_s

    times = [rollout_s(slots) for slots in range(1, 25)]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(times))
    assert times[0] > 5 * times[-1]
    assert rollout_s(5, rate=20.0) == pytest.approx(times[4] / 2)


@pytest.mark.parametrize("seed", range(12))
def test_the_propositions_hold_where_their_assumptions_do(seed):
    rng = random.Random(seed)
    options = batch_of(rng.randint(2, 8), rng.randint(2, 6), async_ratio=rng.choice((0.0, 0.0, 1.0, 2.0, 4.0)))
    law = lengths_up_to(400, rng.choice((5.0, 20.0)))
    one = case(
        options,
        Workload(law, prompt_tokens=10),
        rng.randint(1, 3),
        slowing(rng.randint(1, 8)),
        steps=5,
        warmup=2 + int(options["async_ratio"]),
        train_s_per_token=rng.choice((0.001, 0.01, 0.05)),
    )
    bounds = theory.check(simulate(one))
    assert {bound.proposition for bound in bounds} <= {"1", "2 sync", "2 async", "2 async, no overlap"}
    for bound in bounds:
        assert bound.holds or bound.unmet, bound
    assert any(not bound.unmet for bound in bounds)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scheduling": "batch"}, "placed in advance"),
        ({"drop_zero_variance": True}, "not there at the start"),
        ({"over_sampling": 2.0}, "suspended"),
        ({"async_ratio": 0.5}, "rollout may stop: 4 places beside the batch that is trained, 16 slots"),
    ],
)
def test_an_assumption_that_a_case_does_not_meet_is_named(options, reason):
    assert reason in theory.check(simulate(case(options, steps=1)))[0].unmet


def test_the_train_share_of_proposition_2_makes_its_branch_equal_to_the_bound():
    rollout_s, longest_s, train_s, ratio = 30.0, 50.0, 20.0, 2.0
    share = theory.best_train_share(rollout_s, longest_s, train_s, ratio)
    assert train_s / share == pytest.approx(rollout_s + longest_s / (ratio + 1) + train_s)
    assert rollout_s / (1 - share) + longest_s / (ratio + 1) <= train_s / share
    assert 1 <= train_gpus_of(simulate(case()), 16, 2.0) <= 15


# Curves and laws


def test_a_roofline_is_its_formula_and_holds_as_many_requests_as_fit():
    curve = roofline(MODELS["Qwen3-8B"], GPUS["H800"], 10_000)
    kv_bytes = 2 * 36 * 8 * 128 * 2 * 10_000
    for n in (1, 16, 128):
        seconds = 0.003 + max(2 * 8.2e9 * n / (0.4 * 989e12), (16.4e9 + n * kv_bytes) / (0.7 * 3.35e12))
        assert curve.rate(n) == pytest.approx(1 / seconds)
    assert curve.max_running_requests == math.floor((0.9 * 80e9 - 16.4e9) / kv_bytes) == 37
    with pytest.raises(ValueError, match="cannot hold Qwen3-8B"):
        roofline(MODELS["Qwen3-8B"], GPUS["H800"], 1_000_000)


def test_a_curve_is_read_as_it_was_written_and_a_broken_one_is_refused(tmp_path):
    path = tmp_path / "curve.json"
    slowing().save(path, {"command": "by hand"})
    assert EngineCurve.load(path) == slowing()
    assert slowing().rate(1) == 10.0 and slowing().rate(64) == pytest.approx(2.0)
    assert 1 / slowing().rate(127) == pytest.approx(0.1 + 2 * 0.4)
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no engine curve"):
        EngineCurve.load(path)
    with pytest.raises(ValueError, match="requests rising"):
        EngineCurve("x", ((2, 1.0), (1, 1.0)), 1.0, 1)


def test_lengths_have_the_tail_that_is_stated_and_members_of_a_group_are_alike():
    law = lengths_up_to(8192)
    drawn = [[law.draw(problem, ticket(problem), member) for member in range(8)] for problem in range(1500)]
    flat = sorted(itertools.chain(*drawn))
    assert flat[-1] == 8192 and flat[len(flat) // 2] == pytest.approx(8192 / 20, rel=0.07)
    assert sum(flat) / len(flat) == pytest.approx(law.mean, rel=0.07)
    logs = [[math.log(length / law.median) / law.sigma for length in group] for group in drawn]
    within = sum(sum((z - sum(g) / 8) ** 2 for z in g) / 7 for g in logs) / len(logs)
    assert within == pytest.approx(1 / 3, rel=0.07)
    assert LengthLaw(15, 1.0, 192).mean == pytest.approx(24, abs=1)  # bench_rollout's, an eighth of the longest


def test_a_problem_that_is_issued_again_is_as_hard_and_its_response_is_new():
    law = replace(LAW, within_share=0.01)
    first, second = law.draw(7, ticket(1), 0), law.draw(7, ticket(2), 0)
    assert first != second and first == pytest.approx(second, rel=0.5)
    assert law.draw(7, ticket(1), 0) == first


# What is measured, recorded and shown


def test_the_cost_of_a_trajectory_is_measured_on_the_real_controller(tmp_path):
    points = measure.measure_controller([2], groups=4)
    assert points[0]["trajectories"] >= 3 * 4 * 16 and 0 < points[0]["handling_s"] < 0.1
    assert 0 < points[0]["reading_s"] < 0.01
    measure.save_controller(points, {"commit": "c0ffee"}, tmp_path / "controller.json")
    costs = scale.read_message_s(tmp_path / "controller.json")
    assert scale.message_s(costs, 1000) == points[0]["seconds_per_trajectory"]


def tiny_scenario():
    never_waits = case({"async_ratio": 4.0}, warmup=5, train_s_per_token=1.0)
    arms = {"sync": case(), "async": case({"async_ratio": 1.0}), "slow trainer": never_waits}
    return Scenario("tiny", "trained_tokens_per_s", "tokens/s", 1, arms, {"async": 2.0}, "2x", "sure", "small")


def test_a_record_has_ours_and_the_papers_ratio_and_is_replaced_by_its_next_run(tmp_path):
    made_by = {"command": "python x", "commit": "c0ffee", "dirty": False, "hardware": "2 CPU cores"}
    made = script.run(tiny_scenario(), 20.0) | made_by
    gain = made["arms"]["async"]["gain"]
    assert gain > 1 and made["arms"]["async"]["paper_gain"] == 2.0
    for _ in range(2):
        report.replace(made, tmp_path / "simulation.jsonl")
    report.replace(made | {"longest_to_median": 5.0}, tmp_path / "simulation.jsonl")
    assert len((tmp_path / "simulation.jsonl").read_text().splitlines()) == 2
    report.write(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert f"| 2.00 → – | {gain:.2f} → " in text and f"| {gain / 2:.2f} → – |" in text and "commit c0ffee" in text
    assert (tmp_path / "simulation.png").read_bytes().startswith(b"\x89PNG")


def test_another_engine_changes_the_result():
    slower = script.run(tiny_scenario(), 20.0, steady(rate=1.0))["arms"]["sync"]
    assert (
        slower["engine"] == "steady" and slower["step_s"] > script.run(tiny_scenario(), 20.0)["arms"]["sync"]["step_s"]
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_arm_of_a_default_comparison_is_a_valid_config(mechanism):
    for scenario in MECHANISMS[mechanism](20.0):
        assert set(scenario.paper) <= set(scenario.arms) and scenario.why and scenario.certainty
        for one in scenario.arms.values():
            assert callable(one) or one.config


def recorded():
    return [json.loads(line) for line in RECORDS.read_text(encoding="utf-8").splitlines()]


def test_the_committed_table_has_every_comparison():
    expected = {
        (scenario.name, tail)
        for tail in TAILS
        for mechanism in (MECHANISMS if tail == TAILS[0] else QUICK)
        for scenario in MECHANISMS[mechanism](tail)
    }
    assert expected <= {(r["scenario"], r["longest_to_median"]) for r in recorded()}


def test_the_propositions_hold_on_every_committed_run_that_meets_their_assumptions():
    found = [p for r in recorded() for arm in r["arms"].values() for p in arm["propositions"]]
    claimed = [p for p in found if not p["unmet"]]
    assert {p["proposition"] for p in claimed} == {"1", "2 sync", "2 async", "2 async, no overlap"}
    assert [p for p in claimed if not p["measured_s"] <= p["bound_s"] + theory.ROUNDING_S] == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--only", "nothing"], r"--only 'nothing' is none of scheduling"),
        (["--report"], r"simulation.jsonl has no records; run python scripts/simulate.py first"),
        (["--only", "scale"], r"controller.json holds no costs of the controller"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, monkeypatch, capsys, options, error):
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and error in capsys.readouterr().err.splitlines()[-1]
