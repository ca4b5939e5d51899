import json
import statistics
import sys

import numpy as np
import pytest
import torch
from tiny_policy import load, random_sequences, save_tiny_model

from config import Config
from data.records import Group, Ticket, check_trajectory
from scripts import bench_parts, bench_parts_echo, bench_parts_job, bench_parts_rollout, bench_parts_trainer
from scripts import bench_parts_report as report
from scripts.bench_rollout_report import append
from scripts.bench_work import WORKS, work_of
from trainer.packing import bundle, pack

MADE_BY = {"size": "full", "command": "python bench", "commit": "c0ffee", "dirty": False, "hardware": "2 CPU cores"}
MADE_BY |= {"load_before": 0.1, "packages": {"torch": "2"}}


@pytest.fixture
def model_path(tmp_path):
    return save_tiny_model(str(tmp_path / "model"))


def test_forced_lengths_follow_their_law():
    long = [WORKS["long"].length(seed) for seed in range(4000)]
    assert long == [WORKS["long"].length(seed) for seed in range(4000)]
    assert min(long) >= 1 and max(long) == 256
    assert statistics.median(long) == pytest.approx(30, rel=0.05)
    assert statistics.fmean(long) == pytest.approx(47, rel=0.05)
    assert {WORKS["short"].length(seed) for seed in range(100)} == {4}


def test_a_work_is_known_by_its_longest_response():
    assert all(work_of(work.config().max_response_tokens) is work for work in WORKS.values())


def test_the_plain_step_moves_the_weights_as_our_step_does_with_plain_policy_gradient(one_rank, model_path):
    config = Config(model=model_path, algo="reinforce", warmup=0, lr=1e-2)
    sequences = random_sequences(12)
    policy, plain = load(config), bench_parts_trainer.PlainStep(config, model_path)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    version = int(max(s.policy_versions.max() for s in sequences))
    policy.train_step([[bundle(sequences[:5]), bundle(sequences[5:])]], policy_version=version)
    plain.step([pack(bundle(half), one_row=False) for half in (sequences[:5], sequences[5:])])
    for (name, ours), (_, theirs) in zip(policy.named_full_parameters(), plain.model.named_parameters(), strict=True):
        assert not torch.equal(theirs, before[name])
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_sequences_of_a_work_have_its_lengths(model_path):
    config = WORKS["long"].config(model=model_path)
    sequences = bench_parts_trainer.make_sequences(config, model_path, count=16)
    assert [s.num_trained for s in sequences] == [WORKS["long"].length(i) for i in range(16)]
    assert not any(s.loss_mask[0] for s in sequences)


def test_tickets_are_those_of_a_run(model_path):
    tickets = bench_parts_rollout.make_tickets(WORKS["natural"].config(model=model_path), model_path, 11)
    assert [(t.group_id, t.member) for t in tickets] == [(0, i) for i in range(8)] + [(1, i) for i in range(3)]


def test_memcpy_is_timed_for_all_bytes():
    assert 1e7 < bench_parts_rollout.memcpy_bytes_per_s(10**6) < 1e12


def test_an_echoed_response_is_one_that_the_trainer_takes():
    ticket = Ticket(3, 1, 2, 1, 0, (5, 6, 7), "a", None, seed=0, min_version=0)
    trajectory = bench_parts_echo.echo(ticket, version=4)
    check_trajectory(trajectory)
    assert trajectory.num_generated == 9 and trajectory.min_version == 4 and trajectory.tokens[:3].tolist() == [5, 6, 7]


def test_the_queue_alone_consumes_all_groups_of_all_steps(tmp_path, model_path):
    config = Config(
        model=model_path, async_ratio=1.0, groups_per_step=2, group_size=2, runs_dir=str(tmp_path), run_name="q"
    )
    with bench_parts_job.echoing(config, per_message=3) as loop:
        measured = loop.measure(steps=5)
        ledger = loop.node.controller.take_report().ledger
    assert ledger["groups_consumed"] == 10 and loop.version == 5
    assert measured["cpu_us"] > 0 and measured["wall_us"] > 0


def test_a_ratio_is_ours_by_the_limit_and_a_speed_up_the_other_way_round():
    assert report.record("rollout long", 0, 90.0, 100.0)["ratio"] == pytest.approx(0.9)
    assert report.record("speed-up natural α=1", 0, 0.4, 0.5)["ratio"] == pytest.approx(1.25)
    assert report.record("queue 1 per message", 0, 80.0, None)["ratio"] is None


def test_the_table_has_medians_spread_and_which_targets_are_reached(tmp_path):
    for repeat, (ours, limit) in enumerate([(90.0, 100.0), (99.0, 100.0), (98.0, 100.0)]):
        append({**report.record("rollout long", repeat, ours, limit), **MADE_BY}, tmp_path / "parts.jsonl")
        append({**report.record("overlap α=1", repeat, 0.4 + 0.1 * repeat, 0.4), **MADE_BY}, tmp_path / "parts.jsonl")
        append({**report.record("queue 1 per message", repeat, 80.0, None), **MADE_BY}, tmp_path / "parts.jsonl")
    report.write(tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert "rollout worker, tokens/s: 98 [90–99], n = 3 | plain AsyncLLM: 100 [100–100] | 0.980 [0.900–0.990] " in text
    assert "| 0.980 [0.900–0.990] | ≥ 0.95 | yes |" in text and "| 1.250 [1.000–1.500] | ≤ 1.1 | no |" in text
    assert "µs: 80 [80–80], n = 3 | – | – |" in text and "commit c0ffee" in text


def test_cpu_time_of_a_step_is_given_by_process():
    records = [report.record("overlap α=1", i, 0.4, 0.4, cpu_s={"trainer": 0.1 * i, "engine": 0.3}) for i in range(3)]
    assert report.cpu_lines([*records, report.record("rollout long", 0, 1.0, 1.0)]) == [
        "CPU time per step, ms, overlap α=1: trainer 100, engine 300; sum 400"
    ]


def test_a_part_that_is_measured_again_replaces_its_own_lines_alone(tmp_path, monkeypatch):
    def measure(size, repeats, folder):
        yield from (report.record("trainer long", repeat, float(repeat), 1.0) for repeat in range(repeats))

    for name in ("trainer long", "rollout long"):
        append(report.record(name, 0, 7.0, 7.0), tmp_path / "parts.jsonl")
    monkeypatch.setitem(bench_parts.GROUPS, "trainer", measure)
    bench_parts.run(["trainer"], "tiny", 2, tmp_path)
    found = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert [(r["part"], r["ours"]) for r in found] == [
        ("rollout long", 7.0),
        ("trainer long", 0.0),
        ("trainer long", 1.0),
    ]
    assert found[2]["size"] == "tiny" and found[2]["commit"]


@pytest.mark.parametrize(
    ("options", "error"),
    [(["--repeats", "0"], "--repeats must be at least 1, got 0"), (["--report"], "parts.jsonl has no records")],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, monkeypatch, capsys, options, error):
    monkeypatch.setattr(sys, "argv", ["bench_parts.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit):
        bench_parts.main()
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_tokens_of_groups_are_those_that_the_policy_wrote():
    ticket = Ticket(3, 1, 0, 1, 0, (5, 6, 7), "a", None, seed=0, min_version=0)
    group = Group(1, (bench_parts_echo.echo(ticket, 0, 4), bench_parts_echo.echo(ticket, 0, 5)))
    assert bench_parts_job.group_tokens([group, group]) == 18
    assert np.isfinite(group.trajectories[0].behavior_logprobs).all()
