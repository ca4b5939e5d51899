"""Which responses of a step a run keeps for people to read."""

import dataclasses

from trajectories import make_group

from asyncrl.runlog.samples import readable_samples


def samples_of(groups, answer="12"):
    return list(
        readable_samples(3, groups, lambda tokens: " ".join(map(str, tokens)), lambda group: answer)
    )


def test_the_best_and_the_worst_member_of_a_group_are_kept_with_its_right_answer():
    best, worst = samples_of([make_group(4, [0.5, 0.0, 1.0, 0.5])])
    assert (best["member"], best["reward"], worst["member"], worst["reward"]) == (2, 1.0, 1, 0.0)
    for sample in (best, worst):
        assert (sample["step"], sample["group"], sample["answer"], sample["group_reward"]) == (
            3,
            4,
            "12",
            0.5,
        )
        assert (sample["prompt"], sample["response"], sample["min_version"]) == ("0", "0 0", 0)


def test_a_group_whose_rewards_differ_is_taken_before_one_whose_do_not():
    assert {
        sample["group"] for sample in samples_of([make_group(1, [1, 1]), make_group(2, [0, 1])])
    } == {2}
    (only,) = samples_of([make_group(1, [1, 1]), make_group(2, [0, 0])])
    assert (only["group"], only["member"]) == (1, 0)


def test_the_answer_is_asked_of_the_group_that_is_shown_and_left_out_where_there_is_none():
    asked = []
    groups = [dataclasses.replace(make_group(i, [i, 0]), problem=10 + i) for i in (0, 1)]
    list(readable_samples(1, groups, str, lambda group: asked.append(group.problem) or ""))
    assert asked == [11] and all("answer" not in sample for sample in samples_of(groups, answer=""))
