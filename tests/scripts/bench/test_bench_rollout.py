import statistics
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl.config import Config
from asyncrl.controller.tickets import PromptSource
from asyncrl.records import Trajectory
from data.problem import Problem
from extras.baselines import BaselineTickets
from scripts.bench import harness, work
from scripts.bench import rollout as bench
from scripts.lines import read

CONFIG = Config(max_response_tokens=192)


def tickets_of(config, group_id):
    source = BaselineTickets(
        config, PromptSource(lambda index: Problem("p", "a"), [], lambda problem: [1])
    )
    for _ in range(group_id + 1):
        tickets = source.for_group(*source.next_group(), 0)
    return tickets


def test_lengths_follow_the_law_with_the_longest_8_times_the_mean():
    lengths = [work.TAIL.length(seed) for seed in range(4000)]
    assert lengths == [work.TAIL.length(seed) for seed in range(4000)]
    assert min(lengths) >= 1 and max(lengths) == 192
    assert statistics.median(lengths) == pytest.approx(15, rel=0.05)
    assert 192 / statistics.fmean(lengths) == pytest.approx(8, rel=0.05)


def test_a_turn_of_an_environment_has_always_the_same_length():
    assert {work.work_of(64).length(seed) for seed in range(50)} == {4}


@pytest.mark.parametrize("group_id", [0, 7])
def test_one_request_for_a_group_has_the_lengths_of_the_tickets_that_its_members_would_have_been(
    group_id,
):
    lengths = work.member_lengths(CONFIG, group_id)
    assert [work.TAIL.length(ticket.seed) for ticket in tickets_of(CONFIG, group_id)] == lengths
    assert len(set(lengths)) > 1
    (ticket,) = tickets_of(Config(max_response_tokens=192, replicate_prompts=False), group_id)
    assert ticket.group_id == group_id and ticket.num_members == len(lengths)


def test_vllm_gives_each_response_of_one_request_its_length(monkeypatch):
    from vllm import SamplingParams
    from vllm.v1.engine.parallel_sampling import ParentRequest

    name = "_get_child_sampling_params"
    monkeypatch.setattr(ParentRequest, name, getattr(ParentRequest, name))  # undone after the test
    work.force_member_lengths({5: [3, 1, 2]})
    params = SamplingParams(n=3, seed=5, max_tokens=192)
    request = ParentRequest(SimpleNamespace(request_id="r", external_req_id="r", params=params))
    assert [request.get_child_info(index)[1].max_tokens for index in range(3)] == [3, 1, 2]
    assert params.max_tokens == 192


def test_recomputed_tokens_are_those_before_each_change_of_version_with_the_prompt():
    versions = np.array([-1, -1, 0, 0, 1, 1, 3])
    of = np.zeros(7), versions >= 0, np.zeros(7), versions
    trajectory = Trajectory(
        0, 0, 0, *of, 0.0, "length", "", 1, started_at=0.0, ended_at=0.0, worker=0
    )
    assert bench.recomputed_tokens(trajectory) == 4 + 6


@pytest.mark.parametrize("comparison", bench.COMPARISONS, ids=lambda comparison: comparison.name)
def test_every_arm_is_a_valid_config_that_differs_from_the_others(comparison):
    for one in (comparison, comparison.tiny()):
        configs = [one.config(arm) for arm in one.arms]
        assert len(set(configs)) == len(configs)
        assert len({work.work_of(config.max_response_tokens) for config in configs}) == 1
    assert comparison.paper and comparison.why


def test_a_comparison_asks_for_the_memory_of_all_its_engines():
    cases = bench.cases(SimpleNamespace(size="full"))
    (scheduling,) = harness.chosen(cases, ["scheduling"])
    assert scheduling.memory == 3 * 2 * bench.ENGINE_BYTES
    names = [case.name for case in harness.chosen(cases, ["replication"])]
    assert names == ["replication 8x8", "replication 16x16"]


def test_the_records_of_the_repository_give_their_page():
    folder = harness.ROOT / "results/rollout"
    text = "\n\n".join(bench.report(read(folder / "rollout.jsonl")))
    assert (folder / "table.md").read_text().endswith(f"{text}\n")
    assert text.count("Papers: ") == len(bench.COMPARISONS)


@pytest.mark.e2e
@pytest.mark.study
def test_one_request_and_replicated_prompts_sample_the_same_tokens_on_real_engines(tmp_path):
    options = ["--only", "replication 8x8", "--size", "tiny", "--repeats", "2", "--out", tmp_path]
    command = [sys.executable, "scripts/bench/rollout.py", *options]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "warning" not in done.stdout, done.stdout
    records = read(tmp_path / "rollout.jsonl")
    for of_round in harness.rounds(records, "repeat").values():
        assert {r["arm"] for r in of_round} == {"one request", "replicated"}
        assert len({r["tokens"] for r in of_round}) == 1
    for r in records:
        assert r["groups"] == r["ledger"]["groups_consumed"] == 2
        assert r["ledger"]["tokens_consumed"] == r["tokens"] and r["inherited_share"] == 0
        assert r["seconds"] > 0 and r["update_s"] > 0
    assert "Size tiny: the numbers mean nothing" in (tmp_path / "table.md").read_text()
