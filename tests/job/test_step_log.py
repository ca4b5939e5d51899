"""What a run says while it goes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl.config import Config
from asyncrl.job.step_log import StepLog
from asyncrl.runlog.time_ledger import TrainerClock

RUN = SimpleNamespace(path=Path("runs/one"))


@pytest.mark.parametrize(
    ("shares", "advantage", "std", "num_steps"),
    [
        ([1.0] * 10, "grpo", 0.5, 3),
        ([1.0] * 2, "grpo", 0.0, 2),
        ([0.9, 1.0, 1.0, 1.0], "grpo", 0.0, None),
        ([1.0] * 10, "gae", 0.5, None),
        ([1.0] * 10, "gae", 0.0, 3),
    ],
)
def test_a_run_whose_groups_all_had_equal_rewards_says_once_that_it_learns_nothing(
    shares, advantage, std, num_steps, capsys
):
    """Unless the advantage compares all rewards, and they differ between groups; a short run says so at its end."""
    config = Config(steps=len(shares), advantage=advantage)
    log = StepLog(SimpleNamespace(config=config, clock=TrainerClock(), run=RUN))
    for step, share in enumerate(shares, start=1):
        rewards = {"reward/zero_variance_groups": share, "reward/mean": 0.0, "reward/std": std}
        log.warn_of_equal_rewards(step, rewards)
    text = capsys.readouterr().out
    assert text.count("\n") == (num_steps is not None)
    if num_steps:
        assert f"in {num_steps} steps no group had unequal rewards" in text
        assert "runs/one/samples.jsonl" in text
