import itertools
import math
import random
from statistics import mean, stdev

import pytest
import torch

from algos import ADVANTAGES
from algos.advantages import EPS


def deviation(rewards):
    return stdev(rewards) + EPS


# Of a reward, the rewards of its group, those of the step, and those of the step less the means of their groups.
FORMULAS = {
    "grpo": lambda reward, group, step, centered: (reward - mean(group)) / deviation(group),
    "dr_grpo": lambda reward, group, step, centered: reward - mean(group),
    "rloo": lambda reward, group, step, centered: reward - (sum(group) - reward) / (len(group) - 1),
    "reinforce": lambda reward, group, step, centered: (reward - mean(step)) / deviation(step),
    "reinforce_baseline": lambda reward, group, step, centered: (
        (reward - mean(group)) / deviation(centered)
    ),
    "gae": lambda reward, group, step, centered: reward,
}


def estimate(name, rewards, group_ids):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return ADVANTAGES[name](rewards, torch.tensor(group_ids)).tolist()


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("sizes", [(2,), (6, 3), (2, 5, 3, 4)])
def test_advantages_equal_the_formula_for_groups_of_any_size_and_order(name, sizes):
    rng = random.Random(0)
    # no group is all equal
    groups = [
        [rng.choice([0.0, 1.0, 0.3, rng.gauss(0, 2)]) + i / 10 for i in range(size)]
        for size in sizes
    ]
    step = list(itertools.chain(*groups))
    centered = [reward - mean(group) for group in groups for reward in group]
    rows = [
        (reward, group_id, FORMULAS[name](reward, group, step, centered))
        for group_id, group in zip((7, -3, 100, 0), groups, strict=False)
        for reward in group
    ]
    rng.shuffle(rows)
    rewards, group_ids, expected = map(list, zip(*rows, strict=True))
    assert estimate(name, rewards, group_ids) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", sorted(ADVANTAGES.keys() - {"gae"}))
def test_rewards_that_are_all_equal_in_a_group_or_a_step_or_have_no_others_get_exactly_zero(name):
    for reward in (0.0, 1.0, 0.1, -0.1, -7.3, 1e9):
        advantages = estimate(name, [reward] * 3 + [0.7, 0.0, 1.0], [5, 5, 5, 4, 6, 6])
        is_by_group = name != "reinforce"
        assert (advantages[:4] == [0.0] * 4) == is_by_group and advantages[4] < advantages[5]
        assert estimate(name, [reward] * 3, [1, 1, 2]) == [0.0] * 3
    assert estimate(name, [0.7], [3]) == [0.0] and estimate(name, [], []) == []


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_reward_that_is_not_finite_is_refused(name):
    with pytest.raises(RuntimeError, match=r"^rewards must be finite, got \[nan, -inf\]$"):
        estimate(name, [1.0, math.nan, -math.inf], [0, 0, 1])
