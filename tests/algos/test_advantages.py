import math
import random
import typing

import pytest
import torch

from algos import ADVANTAGES, KL_ESTIMATORS
from algos.advantages import EPS
from asyncrl.config import Advantage, KlEstimator

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_baseline")


def mean(values):
    return sum(values) / len(values)


def std(values):
    return math.sqrt(sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def batch(groups):
    return [reward for members in groups for reward in members]


def centered(groups):
    """Every reward of the batch less the mean of its group; `groups` are lists of rewards."""
    return [reward - mean(members) for members in groups for reward in members]


# Of a reward, the rewards of its group, those of the group's other members, and the lists of rewards of all groups.
FORMULAS = {
    "grpo": lambda reward, members, others, groups: (reward - mean(members)) / (std(members) + EPS),
    "dr_grpo": lambda reward, members, others, groups: reward - mean(members),
    "rloo": lambda reward, members, others, groups: reward - mean(others),
    "reinforce": lambda reward, members, others, groups: (
        (reward - mean(batch(groups))) / (std(batch(groups)) + EPS)
    ),
    "reinforce_baseline": lambda reward, members, others, groups: (
        (reward - mean(members)) / (std(centered(groups)) + EPS)
    ),
    "gae": lambda reward, members, others, groups: reward,
}


def oracle(name, rewards, groups):
    """Advantage of each sequence, from the formula, one loop per sequence."""
    of_group = {k: [r for r, g in zip(rewards, groups, strict=True) if g == k] for k in groups}
    advantages = []
    for i, reward in enumerate(rewards):
        others = [
            r
            for j, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if g == groups[i] and j != i
        ]
        advantages.append(
            FORMULAS[name](reward, of_group[groups[i]], others, list(of_group.values()))
        )
    return advantages


def estimate(name, rewards, groups):
    return ADVANTAGES[name](
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)
    ).tolist()


@pytest.mark.parametrize("name", list(ADVANTAGES))
@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_the_formula_for_groups_of_any_size_and_order(name, seed):
    rng = random.Random(seed)
    groups = [g for g in (7, -3, 100, 0) for _ in range(rng.randint(2, 6))]
    rng.shuffle(groups)
    rewards = [rng.choice([0.0, 1.0, 0.3, rng.gauss(0, 2)]) for _ in groups]
    rewards[0] += 1e-3  # no group may be all equal here
    if any(len({r for r, g in zip(rewards, groups, strict=True) if g == k}) == 1 for k in groups):
        rewards = [r + i / 10 for i, r in enumerate(rewards)]
    assert estimate(name, rewards, groups) == pytest.approx(
        oracle(name, rewards, groups), rel=1e-12, abs=1e-12
    )


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -7.3, 1e9])
def test_a_group_of_equal_rewards_gets_exactly_zero(name, reward):
    advantages = estimate(name, [reward] * 3 + [0.0, 1.0], [5, 5, 5, 6, 6])
    assert advantages[:3] == [0.0, 0.0, 0.0]
    assert advantages[3] < 0 < advantages[4]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_group_of_one_gets_exactly_zero(name):
    assert estimate(name, [0.7, 0.0, 1.0], [1, 2, 2])[0] == 0.0


def test_reinforce_gives_an_equal_group_an_advantage_but_an_equal_batch_exactly_zero():
    assert estimate("reinforce", [1.0, 1.0, 0.0, 0.0], [1, 1, 2, 2])[0] > 0
    assert estimate("reinforce", [0.1] * 3, [1, 1, 2]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_reward_that_is_not_finite_is_refused(name):
    with pytest.raises(RuntimeError, match=r"finite, got .*nan"):
        estimate(name, [0.0, math.nan], [0, 0])


def test_the_dicts_hold_exactly_the_names_that_config_offers():
    assert set(ADVANTAGES) == set(typing.get_args(Advantage))
    assert set(KL_ESTIMATORS) == set(typing.get_args(KlEstimator))
