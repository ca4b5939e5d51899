"""What a run says while it goes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from config import Config
from job.step_log import StepLog
from records.time_ledger import TrainerClock


def said(shares, steps, capsys):
    """What is printed after steps in which these shares of the groups had equal rewards."""
    node = SimpleNamespace(config=Config(steps=steps), clock=TrainerClock(), run=SimpleNamespace(path=Path("runs/one")))
    log = StepLog(node)
    for step, share in enumerate(shares, start=1):
        log.warn_of_equal_rewards(step, {"reward/zero_variance_groups": share, "reward/mean": 0.0})
    return capsys.readouterr().out


def test_a_run_whose_groups_all_had_equal_rewards_says_once_that_it_learns_nothing(capsys):
    out = said([1.0] * 10, 10, capsys)
    assert out.count("\n") == 1 and "in 3 steps no group had unequal rewards" in out and "runs/one/samples.jsonl" in out
    assert "in 2 steps no group" in said([1.0] * 2, 2, capsys), "a shorter run says so at its end"


@pytest.mark.parametrize("shares", [[0.9, 1.0, 1.0, 1.0], [1.0, 1.0, 0.97, 1.0], [0.2] * 3 + [1.0] * 7])
def test_a_run_that_has_learnt_from_any_group_says_nothing(shares, capsys):
    assert said(shares, 10, capsys) == ""
