import json
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest

from config import Config
from controller.ledger import COUNTS
from data.records import Ticket
from job.trust import mistake_in
from scripts.bench import swarm as bench
from scripts.bench import swarm_machines
from scripts.lines import read


class FakeMachine:
    def __init__(self):
        self.had = []

    def start(self):
        self.had.append("join")

    def signal(self, number):
        self.had.append(signal.Signals(number).name)


def churned(seed, monkeypatch, num_machines=3, steps=200):
    now = [1000.0]
    monkeypatch.setattr(bench.time, "monotonic", lambda: now[0])
    machines = [FakeMachine() for _ in range(num_machines)]
    churn = bench.Churn(machines, steps, {"num_events": 20, "stop_s": 20.0}, seed)
    for step in range(steps):
        now[0] += 5.0
        churn.turn(step)
        assert sum(at == 0.0 for at in churn.back_at.values()) >= 1
    return churn, machines


@pytest.mark.parametrize("seed", range(5))
def test_churn_touches_machines_so_often_and_leaves_one_up(seed, monkeypatch):
    churn, machines = churned(seed, monkeypatch)
    assert len(churn.events) == 20 and {step for step, _, _ in churn.events} <= set(range(10, 200))
    for index, machine in enumerate(machines):
        told = [what for what in machine.had if what != "SIGCONT"]
        assert told == [what for _, what, i in churn.events if i == index]
        gone = False
        for what in told:
            assert (what == "join") == gone  # only who has gone joins, and nothing happens to it before
            gone = what in ("SIGKILL", "SIGTERM")
        assert machine.had.count("SIGSTOP") - machine.had.count("SIGCONT") in (0, 1)


def test_the_same_seed_is_the_same_churn_and_a_local_run_has_none(monkeypatch):
    first, again, other = (churned(seed, monkeypatch)[0].events for seed in (3, 3, 4))
    assert first == again != other
    churn = bench.Churn([], 200, {"num_events": 20, "stop_s": 20.0}, 0)
    churn.turn(150)
    assert churn.events == []


def test_a_sleeping_machine_says_what_an_honest_one_may_say():
    ticket = Ticket(7, 2, 3, 1, 0, (5, 6, 8), "x", None, 11, 4)
    trajectory = swarm_machines.asleep(ticket, 4, 10)
    assert mistake_in(trajectory, ticket, Config(max_response_tokens=10), 4, 20) is None
    assert trajectory.tokens[:3].tolist() == [5, 6, 8]
    assert (trajectory.ticket_id, trajectory.group_id, trajectory.member) == (7, 2, 3)
    assert trajectory.num_generated == 10 and trajectory.min_version == 4 and trajectory.finish_reason == "length"
    assert (trajectory.policy_versions[:3] == -1).all() and (trajectory.behavior_logprobs[:3] == 0).all()


def write_run(path):
    counts = dict.fromkeys((f"ledger/{name}" for name in COUNTS), 0)
    step = {"time/step_s": 0.5, "reward/mean": 0.25, "staleness/max": 1, "staleness/mean": 0.5, **counts}
    metrics = [
        {"step": n, "samples": n, "eval/accuracy": n / 10, "eval/policy_version": n, **step} for n in range(1, 6)
    ]
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (path / "run.json").write_text(json.dumps({"config": Config(async_ratio=1.0).as_dict()}))


def test_a_run_is_known_by_its_last_three_accuracies_and_its_rewards(tmp_path):
    write_run(tmp_path / "run")
    found = bench.of_run(tmp_path / "run")
    assert found["accuracy"] == pytest.approx(0.4) and found["rewards"] == [0.25] * 5
    assert found["steps_per_s"] == 2.0 and found["staleness_max"] == 1


def test_runs_are_compared_with_the_local_one_of_their_ratio():
    names = ["α = 0, local", "α = 0, joined", "α = 1, local", "α = 1, joined, Δ = 2"]
    found = {name: {"accuracy": i / 10, "rewards": [i / 10, 0.0]} for i, name in enumerate(names)}
    gaps = {r["arm"]: (r["accuracy_gap"], r["reward_gap"]) for r in bench.against_first(found)}
    assert gaps[names[0]] == gaps[names[2]] == (0, 0)
    assert gaps[names[1]] == pytest.approx((0.1, 0.05)) and gaps[names[3]] == pytest.approx((0.1, 0.05))
    found = {"unbroken": {"accuracy": 0.9, "rewards": [1.0]}, "churn": {"accuracy": 0.8, "rewards": [1.0]}}
    assert [r["accuracy_gap"] for r in bench.against_first(found)] == pytest.approx([0, -0.1])


def test_a_response_of_forced_length_passes_and_one_of_another_ticket_does_not(monkeypatch):
    monkeypatch.setattr(bench.job_swarm, "mistake_in", bench.job_swarm.mistake_in)  # undone after the test
    bench.stop_where_forced()
    config, ticket = bench.LONG.config(), Ticket(7, 2, 3, 1, 0, (5, 6, 8), "x", None, 11, 4)
    forced = swarm_machines.asleep(ticket, 4, 30)
    assert bench.job_swarm.mistake_in(forced, ticket, config, 4, 20) is None
    assert bench.job_swarm.mistake_in(replace(forced, ticket_id=8), ticket, config, 4, 20)


def test_a_delta_arrives_as_the_whole_does_and_is_smaller(one_rank, tiny_models, tmp_path):
    with bench.pulling("tiny", 1e-6, tmp_path) as measure:
        measure()
        found = measure()
    assert 0 < found["delta_bytes"] < found["whole_bytes"] / 20


def test_machines_that_sleep_are_measured(tmp_path, tiny_models):
    part = bench.PARTS["sockets"] | {"machines": 4, "sleeps_s": [0.05], "seconds": 1.0}
    part["options"] = part["options"] | {"groups_per_step": 2}
    with bench.sleeping(part, tmp_path) as measure:
        found = measure()["0.05 s"]
    assert 10 < found["answers_per_s"] < 200 and found["messages_per_s"] > 2 * found["answers_per_s"]
    assert 0 < found["p50_s"] <= found["p99_s"] and 0 < found["busiest_thread_cpu_per_s"] <= found["leader_cpu_per_s"]
    events = [event["event"] for event in read(tmp_path / "rig" / "events.jsonl")]
    assert events.count("machine_joined") == 4 and "machine_shut_out" not in events


def test_every_part_has_cases_and_what_is_shown_of_it():
    cases = list(bench.cases(SimpleNamespace(models=["models/one"])))
    assert {case.name.split()[0] for case in cases} == set(bench.PARTS)
    assert [case.name for case in cases if case.name.startswith("churn")] == ["churn 0", "churn 1", "churn 2"]
    assert "delta one" in {case.name for case in cases}


def test_the_seeds_of_a_part_share_a_table_and_models_do_not():
    run = {"arm": "unbroken", "accuracy_gap": 0.0, "staleness_max": 1, "steps_per_s": 1.0}
    records = [run | {"case": f"churn {seed}", "seed": seed, "accuracy": 0.9 + seed / 100} for seed in range(3)]
    records += [{"case": f"refresh {model}", "arm": "lr 1", "bytes": 1e3, "refresh_s": 1.0} for model in ("a", "b2")]
    paragraphs = list(bench.report(records))
    assert [text.split(" | ")[0] for text in paragraphs] == ["| churn", "| refresh a", "| refresh b2"]
    assert "| unbroken | 3 | 0.910 [0.900–0.920] |" in paragraphs[0]
