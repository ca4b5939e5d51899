"""Scores of single-turn tasks."""

import pytest

from data.tasks import score_of


@pytest.mark.parametrize(("task", "answer"), [("addition", " "), ("gsm8k", "ten apples"), ("subtraction", "1")])
def test_a_malformed_answer_or_task_raises_and_never_scores_zero(task, answer):
    with pytest.raises(ValueError):
        score_of(task)(answer, "1")
