"""An advantage estimator of the user's own: what is wrong with it is one line."""

import pytest
import torch

from asyncrl.config import Config
from asyncrl.trainer.advantage import choose_estimator, try_estimator

MISTAKES = {
    "def f(rewards, versions): return rewards": (
        "TypeError: it takes rewards, versions; name rewards, group_ids or lags"
    ),
    "def f(rewards): return rewards[:2]": (
        "gave tensor([1., 0.], dtype=torch.float64) for 4 responses; give a finite tensor [4]"
    ),
    "def f(rewards): return rewards / 0": "for 4 responses; give a finite tensor [4]",
    "def f(lags): return 1 // 0": "mine.py, line 1: ZeroDivisionError",
    "f = 1": "TypeError: 1 is not a callable object",
}


@pytest.mark.parametrize("source", MISTAKES)
def test_a_mistake_in_an_estimator_is_one_line(source, tmp_path):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ValueError, match=r"^--advantage .*mine\.py:f") as error:
        try_estimator(Config(advantage=f"{tmp_path}/mine.py:f"))
    assert MISTAKES[source] in str(error.value) and "\n" not in str(error.value)


def test_what_is_wrong_with_a_real_batch_is_one_line_too(tmp_path):
    (tmp_path / "mine.py").write_text("def f(rewards):\n    return rewards / rewards.std()")
    estimate = choose_estimator(Config(advantage=f"{tmp_path}/mine.py:f"))
    rewards, zeros = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"mine\.py:f gave tensor\(\[nan, nan\].* for 2 responses"):
        estimate(rewards, zeros, zeros)
