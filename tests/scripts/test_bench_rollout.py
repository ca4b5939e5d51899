import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from config import Config
from controller.tickets import PromptSource, TicketSource
from data.records import Trajectory
from data.tasks import Problem
from scripts import bench_rollout as bench
from scripts import bench_rollout_report as report
from scripts import bench_rollout_worker as worker

ROOT = Path(__file__).parent.parent.parent
CONFIG = Config(max_response_tokens=192)


def tickets_of(config, group_id):
    source = TicketSource(config, PromptSource(lambda index: Problem("p", "a"), [], lambda problem: [1]))
    for _ in range(group_id + 1):
        tickets = source.for_group(source.next_group_id(), 0)
    return tickets


def record(comparison, arm, repeat, **measured):
    made_by = {"size": "full", "command": "python bench", "commit": "c0ffee", "dirty": True, "hardware": "2 CPU cores"}
    made_by |= {"load_before": 0.1, "packages": {"torch": "2"}}
    return {"comparison": comparison, "arm": arm, "repeat": repeat, **measured, **made_by}


def run_bench(*options):
    command = [sys.executable, "scripts/bench_rollout.py", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)


def test_lengths_follow_the_law_with_the_longest_8_times_the_mean():
    lengths = [worker.forced_length(CONFIG, seed) for seed in range(4000)]
    assert lengths == [worker.forced_length(CONFIG, seed) for seed in range(4000)]
    assert min(lengths) >= 1 and max(lengths) == 192
    assert statistics.median(lengths) == pytest.approx(worker.MEDIAN_TOKENS, rel=0.05)
    assert 192 / statistics.fmean(lengths) == pytest.approx(8, rel=0.05)
    shorter = Config(max_response_tokens=20)
    assert [worker.forced_length(shorter, seed) for seed in range(4000)] == [min(n, 20) for n in lengths]


def test_a_turn_of_an_environment_has_always_the_same_length():
    config = Config(task="guess_number")
    assert {worker.forced_length(config, seed) for seed in range(50)} == {worker.TURN_TOKENS}


@pytest.mark.parametrize("group_id", [0, 7])
def test_one_request_for_a_group_has_the_lengths_of_the_tickets_that_its_members_would_have_been(group_id):
    replicated = tickets_of(CONFIG, group_id)
    lengths = worker.member_lengths(CONFIG, group_id)
    assert [worker.forced_length(CONFIG, ticket.seed) for ticket in replicated] == lengths
    assert len(set(lengths)) > 1
    (ticket,) = tickets_of(Config(max_response_tokens=192, replicate_prompts=False), group_id)
    assert ticket.group_id == group_id and ticket.num_members == len(lengths)


def test_vllm_gives_each_response_of_one_request_its_length(monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.engine.parallel_sampling import ParentRequest

    name = "_get_child_sampling_params"
    monkeypatch.setattr(ParentRequest, name, getattr(ParentRequest, name))  # undone after the test
    worker.force_member_lengths({5: [3, 1, 2]})
    params = SamplingParams(n=3, seed=5, max_tokens=192)
    request = ParentRequest(SimpleNamespace(request_id="r", external_req_id="r", params=params))
    assert [request.get_child_info(index)[1].max_tokens for index in range(3)] == [3, 1, 2]
    assert params.max_tokens == 192


def test_recomputed_tokens_are_those_before_each_change_of_version_with_the_prompt():
    versions = np.array([-1, -1, 0, 0, 1, 1, 3])
    mask = versions >= 0
    trajectory = Trajectory(
        0, 0, 0, np.zeros(7), mask, np.zeros(7), versions, 0.0, "length", "", 1, started_at=0.0, ended_at=0.0, worker=0
    )
    assert bench.recomputed_tokens(trajectory) == 4 + 6


@pytest.mark.parametrize("comparison", bench.COMPARISONS, ids=lambda comparison: comparison.name)
def test_every_arm_is_a_valid_config_that_differs_from_the_others(comparison):
    for one in (comparison, bench.tiny(comparison)):
        configs = [one.config(arm) for arm in one.arms]
        assert len(set(configs)) == len(configs)
    assert comparison.name in report.NOTES


def test_only_picks_mechanisms_and_single_comparisons():
    assert [c.name for c in bench.chosen(["replication"], "full")] == ["replication 8x8", "replication 16x16"]
    assert [c.name for c in bench.chosen(["replication 8x8"], "full")] == ["replication 8x8"]
    assert len(bench.chosen(None, "full")) == len(bench.COMPARISONS)


def test_engines_that_do_not_fit_into_memory_are_refused_with_the_arithmetic(monkeypatch):
    bench.check_memory([])
    monkeypatch.setattr(bench, "ENGINE_BYTES", 10**15)
    with pytest.raises(ValueError, match=r"6 engines of 1000000.0 GB each need 6000000 GB of memory, \d+ GB are"):
        bench.check_memory(bench.chosen(["scheduling"], "full"))


def test_a_comparison_that_is_run_again_replaces_its_own_lines_alone(tmp_path):
    path = tmp_path / "rollout.jsonl"
    report.forget("scheduling", path)
    for name in ("scheduling", "redundancy", "redundancy failing"):
        report.append({"comparison": name}, path)
    report.forget("redundancy", path)
    assert [line["comparison"] for line in map(json.loads, path.read_text().splitlines())] == [
        "scheduling",
        "redundancy failing",
    ]


def test_the_table_has_medians_spread_n_and_how_many_times_better_an_arm_is(tmp_path):
    path = tmp_path / "rollout.jsonl"
    for repeat, (batch, queue) in enumerate([(4.0, 2.0), (6.0, 1.0), (5.0, 3.0)]):
        report.append(record("scheduling", "batch", repeat, seconds_per_step=batch), path)
        report.append(record("scheduling", "queue", repeat, seconds_per_step=queue), path)
        rates = {"trained_tokens_per_s": 50.0, "resumed_share": 0.3, "inherited_share": 0.6}
        report.append(record("over-sampling", "R = 1", repeat, new_tokens_per_s=100.0, **rates), path)
        report.append(record("over-sampling", "R = 2", repeat, new_tokens_per_s=150.0 + repeat, **rates), path)
    report.write(tmp_path)
    text = (tmp_path / "table.md").read_text()
    scheduling, *over_sampling = [line for line in text.splitlines() if line.startswith(("| sched", "| over"))]
    cells = [cell.strip() for cell in scheduling.split("|")[1:-1]]
    assert cells[:4] == [
        "scheduling",
        "batch → queue",
        "s per step: 5.00 [4.00–6.00] → 2.00 [1.00–3.00], n = 3",
        "1.00 → 2.50 (n = 3)",
    ]
    assert "125 s → 58 s" in cells[4] and cells[5]
    assert len(over_sampling) == 4 and "1.00 → 1.51 (n = 3)" in over_sampling[0]
    assert "0.60 [0.60–0.60], n = 3 | – |" in over_sampling[3]
    assert "commit c0ffee, with changes; 2 CPU cores; load 0.1" in text
    assert (tmp_path / "rollout.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--only", "nothing"], r"--only 'nothing' is none of 'environments'"),
        (["--repeats", "0"], r"--repeats must be at least 1, got 0"),
        (["--report"], r"rollout\.jsonl has no records; run python scripts/bench_rollout\.py first"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, options, error):
    done = run_bench("--out", str(tmp_path), *options)
    assert done.returncode == 2 and re.search(error, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
def test_one_request_and_replicated_prompts_sample_the_same_tokens_on_real_engines(tmp_path):
    options = ["--only", "replication 8x8", "--size", "tiny", "--repeats", "2", "--out", str(tmp_path)]
    done = run_bench(*options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warning" not in done.stdout, done.stdout
    records = [json.loads(line) for line in (tmp_path / "rollout.jsonl").read_text().splitlines()]
    assert [(r["arm"], r["repeat"]) for r in records] == [(a, i) for i in (0, 1) for a in ("one request", "replicated")]
    assert [r["tokens"] for r in records[::2]] == [r["tokens"] for r in records[1::2]]
    for r in records:
        assert r["groups"] == r["ledger"]["groups_consumed"] == 2 and r["seconds"] > 0
        assert r["ledger"]["tokens_consumed"] == r["tokens"] and r["inherited_share"] == 0
    assert "Size tiny: the numbers mean nothing" in (tmp_path / "table.md").read_text()
