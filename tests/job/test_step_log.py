"""What a run says while it goes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl import extras
from asyncrl.cluster.cluster import Cluster
from asyncrl.config import Config
from asyncrl.job.step_log import StepLog, say_where_time_went
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
    assert (
        out.count("\n") == 1
        and "in 3 steps no group had unequal rewards" in out
        and "runs/one/samples.jsonl" in out
    )
    assert "in 2 steps no group" in said([1.0] * 2, 2, capsys), "a shorter run says so at its end"


@pytest.mark.parametrize(
    "shares", [[0.9, 1.0, 1.0, 1.0], [1.0, 1.0, 0.97, 1.0], [0.2] * 3 + [1.0] * 7]
)
def test_a_run_that_has_learnt_from_any_group_says_nothing(shares, capsys):
    assert said(shares, 10, capsys) == ""


@pytest.mark.parametrize(
    ("advantage", "std", "warns"), [("grpo", 0.5, 1), ("gae", 0.5, 0), ("gae", 0.0, 1)]
)
def test_rewards_that_are_equal_within_groups_alone_teach_what_compares_all(
    advantage, std, warns, capsys
):
    assert said([1.0] * 10, 10, capsys, advantage=advantage, std=std).count("\n") == warns


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_names_the_command_for_advice_where_the_folder_is_there(
    is_there, monkeypatch, capsys
):
    if not is_there:
        monkeypatch.setitem(extras.MODULES, "advice", "extras.nowhere.advice")
    controller = SimpleNamespace(journal=SimpleNamespace(worker_time=dict))
    node = {
        "config": Config(),
        "clock": TrainerClock(),
        "run": SimpleNamespace(path=Path("runs/one")),
    }
    say_where_time_went(SimpleNamespace(**node, cluster=Cluster(), controller=controller))
    assert capsys.readouterr().out.count("python scripts/advise.py runs/one") == is_there
