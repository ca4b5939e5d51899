"""What a run says while it goes."""

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from trajectories import make_trajectory

from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.job.step_log import StepLog
from asyncrl.messages import SampledTokens
from asyncrl.records import Group
from asyncrl.runlog.metrics import RolloutReport
from asyncrl.runlog.time_ledger import TrainerClock


def said(shares, steps, capsys, advantage="grpo", std=0.0):
    """What is printed after steps in which these shares of the groups had equal rewards."""
    config, run = Config(steps=steps, advantage=advantage), SimpleNamespace(path=Path("runs/one"))
    log = StepLog(SimpleNamespace(config=config, clock=TrainerClock(), run=run))
    for step, share in enumerate(shares, start=1):
        rewards = {"reward/zero_variance_groups": share, "reward/mean": 0.0, "reward/std": std}
        log.warn_of_equal_rewards(step, rewards)
    return capsys.readouterr().out


def test_a_run_whose_groups_all_had_equal_rewards_says_once_that_it_learns_nothing(capsys):
    out = said([1.0] * 10, 10, capsys)
    assert out.count("\n") == 1 and "in 3 steps no group had unequal rewards" in out and "runs/one/samples.jsonl" in out
    assert "in 2 steps no group" in said([1.0] * 2, 2, capsys), "a shorter run says so at its end"


@pytest.mark.parametrize("shares", [[0.9, 1.0, 1.0, 1.0], [1.0, 1.0, 0.97, 1.0], [0.2] * 3 + [1.0] * 7])
def test_a_run_that_has_learnt_from_any_group_says_nothing(shares, capsys):
    assert said(shares, 10, capsys) == ""


@pytest.mark.parametrize(("advantage", "std", "warns"), [("grpo", 0.5, 1), ("gae", 0.5, 0), ("gae", 0.0, 1)])
def test_rewards_that_are_equal_within_groups_alone_teach_what_compares_all(advantage, std, warns, capsys):
    assert said([1.0] * 10, 10, capsys, advantage=advantage, std=std).count("\n") == warns


def advised(options, groups, capsys):
    """What is printed over 8 steps of 2 s, in which the trainer waits 0.5 s, and weights take 0.25 s to a worker."""
    records, config = [], Config(steps=8, groups_per_step=2, group_size=2, **options).checked()
    run = SimpleNamespace(record=lambda event, **fields: records.append(fields))
    node = {"config": config, "clock": TrainerClock(), "run": run, "cluster": Cluster(), "placement": None}
    log = StepLog(SimpleNamespace(**node))
    metrics = {"time/step_s": 2.0, "time/wait_s": 0.5, "tokens/generated": 50}
    for step in range(1, 9):
        report = RolloutReport([], SampledTokens(new=50), Counter(decoding=10**9), Counter(), 0, [0.25])
        log._advise(step, groups, metrics, report)
    return capsys.readouterr().out, records


def test_a_run_that_machines_may_join_is_told_after_its_first_steps_how_many_are_enough(capsys):
    trajectories = [make_trajectory(0, member) for member in (0, 1)]
    group = Group(0, tuple(dataclasses.replace(t, worker=4, started_at=0.0, ended_at=1.6) for t in trajectories))
    out, records = advised({"listen": "127.0.0.1:5000", "async_ratio": 1.0}, [group], capsys)
    assert "1 workers give Σμ = 10 responses/s" in out, "8 steps of 2 responses in the same 1.6 s"
    assert "1·4/10 + 0.250 = 0.650 s must fit into κ·T_train = 1·1.500" in out and records == [{"text": out.strip()}]
    assert advised({"listen": "127.0.0.1:5000", "async_ratio": 0.0}, [group], capsys) == ("", [])
