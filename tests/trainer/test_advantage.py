"""An advantage estimator of the user's own. tests/errors.toml has the lines of mistakes that are seen at the start."""

import pytest
import torch

from asyncrl.config import Config
from asyncrl.trainer.advantage import choose_estimator


def test_what_is_wrong_with_a_real_batch_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text("def f(rewards):\n    return rewards / rewards.std()")
    estimate = choose_estimator(Config(advantage=f"{tmp_path}/mine.py:f"))
    rewards, zeros = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"mine\.py:f gave tensor\(\[nan, nan\].* for 2 responses"):
        estimate(rewards, zeros, zeros)
