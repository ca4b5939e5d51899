"""Reward functions from a user's file: what they are given, and what comes of what they return."""

import json

import pytest
import user_rewards
from user_rewards import FILE, texts

from asyncrl.engine.rewards import Failed, load_scorer

ROW = json.dumps(
    {"answer": "4", "length": 7, "colour": "blue", "response": "the row's own", "prompt": "2 + 2"}
)


@pytest.mark.parametrize(
    ("functions", "answer", "scored"),
    [
        (["exact"], ROW, (1.0, {})),
        (["exact"], '{"no": JSON', (0.0, {})),
        (["keywords"], ROW, (4.0, {})),
        (["by_columns"], ROW, (8.0, {})),
        (["exact*-0.5"], ROW, (-0.5, {})),
        (
            ["exact*2", "parts*0.5", "short"],
            "4",
            (
                3.75,
                {"exact": 1, "parts": 1.5, "parts.right": 1, "parts.short": 0.5, "short": 1},
            ),
        ),
    ],
)
def test_functions_get_the_columns_that_they_name_and_their_rewards_and_parts_are_weighted(
    functions, answer, scored
):
    assert load_scorer("addition", texts(*functions)).score(answer, "4") == scored


def test_a_users_task_scores_with_parts_and_its_failures_name_its_file():
    scorer = load_scorer(texts("UserTask")[0])
    assert scorer.score("4", "4") == (2.0, {"right": 1.0, "digits": 1.0})
    line = user_rewards.UserTask.score.__code__.co_firstlineno + 2
    with pytest.raises(Exception, match="ZeroDivisionError") as failed:
        scorer.score("", "4")
    assert str(failed.value).startswith(f"{FILE}:UserTask.score, line {line}: Zero")


def test_a_sum_beyond_the_largest_reward_fails():
    with pytest.raises(Failed, match=r"the sum of rewards is 2e\+12, allowed is -1e\+12 to 1e\+12"):
        load_scorer("addition", texts("evaluated*2")).score("", "1e12")
