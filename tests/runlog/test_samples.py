"""Which responses of a step a run keeps for people to read."""

import dataclasses

import pytest
from trajectories import make_group

from asyncrl.runlog.samples import choose_samples, readable_answer


def samples_of(groups, answer_of=lambda group: f"answer {group.problem}", which="two"):
    text = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
    return list(choose_samples(3, groups, text, answer_of, which))


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("a6 b4", "a6 b4"),
        ("17", "17"),
        ('{"prompt": "3 + 4", "answer": 7}', 7),
        ('{"messages": [{"role": "user", "content": "above 5"}], "least": 5}', {"least": 5}),
    ],
)
def test_the_answer_of_a_row_is_shown_without_its_prompt(answer, shown):
    assert readable_answer(answer) == shown


def test_a_whole_group_or_all_responses_of_a_step_are_kept_if_asked():
    equal, unequal = make_group(4, [0.5, 0.5]), make_group(5, [0.0, 1.0, 0.25])
    kept = samples_of([equal, unequal], which="group")
    assert [(sample["group"], sample["reward"]) for sample in kept] == [
        (5, 0.0),
        (5, 1.0),
        (5, 0.25),
    ]
    kept = samples_of([equal, unequal], which="all")
    assert [sample["group"] for sample in kept] == [4, 4, 5, 5, 5]


def test_the_best_and_the_worst_member_of_a_group_are_kept_with_its_right_answer():
    group = dataclasses.replace(make_group(4, [0.5, 0.0, 1.0, 0.5]), problem=14)
    best, worst = samples_of([group])
    assert best == {
        "step": 3, "group": 4, "member": 2, "prompt": "0", "response": "0 0", "answer": "answer 14", "turns": 1,
        "finish_reason": "stop",
        "reward": 1.0, "reward_parts": {}, "group_reward": 0.5, "oldest_version": 0,
        "newest_version": 0, "staleness": 2,
    }  # fmt: skip
    assert worst == best | {"member": 1, "reward": 0.0}
    assert all("answer" not in sample for sample in samples_of([group], lambda group: ""))


def test_a_game_is_kept_with_the_reward_of_each_turn_and_the_last_observation():
    group = make_group(4, [1.0])
    last = dict(turn_rewards=(0.0, 1.0), last_observation="right")
    game = dataclasses.replace(group.trajectories[0], num_turns=2, **last)
    (sample,) = samples_of([dataclasses.replace(group, trajectories=(game,))])
    assert (sample["turn_rewards"], sample["last_observation"]) == ([0.0, 1.0], "right")
