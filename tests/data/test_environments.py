"""Environments: gymnasium's contract, determinism, what they say and reward."""

import random

import pytest

from asyncrl.config import MULTI_TURN_TASKS
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber

CLEAR_LAKE = ["right"] * 3 + ["down"] * 3
every_environment = pytest.mark.parametrize("name", MULTI_TURN_TASKS)


def lake_where(matches):
    """A seed of a lake whose rows of cells match."""
    for seed in range(1000):
        rows = FrozenLake().reset(seed=seed)[0].splitlines()[1:]
        if matches(rows):
            return seed
    raise AssertionError("no such lake")


def play(environment, seed: int, responses: list[str]) -> list[tuple]:
    """What reset and each step give, to the end of the episode."""
    steps = [environment.reset(seed=seed)]
    for response in responses:
        steps.append(environment.step(response))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


@pytest.mark.filterwarnings("ignore:.*alternative render modes")
@every_environment
def test_environments_keep_gymnasiums_contract(name):
    from gymnasium.utils.env_checker import check_env

    assert tuple(ENVIRONMENTS) == MULTI_TURN_TASKS
    check_env(ENVIRONMENTS[name]())


@every_environment
def test_an_episode_depends_on_seed_and_responses_alone(name):
    rng = random.Random(0)
    for seed in range(30):
        responses = rng.choices([*ENVIRONMENTS[name].ACTIONS, "hm"], k=ENVIRONMENTS[name].max_turns)
        used, fresh = ENVIRONMENTS[name](), ENVIRONMENTS[name]()
        used.reset(seed=seed + 1)
        steps = play(fresh, seed, responses)
        assert play(used, seed, responses) == steps
        assert all(fresh.observation_space.contains(step[0]) for step in steps)


@every_environment
def test_an_episode_without_an_action_is_truncated_and_then_over(name):
    environment = ENVIRONMENTS[name]()
    steps = play(environment, 0, ["I do not know"] * 10)
    ends = [(0.0, False, False)] * (environment.max_turns - 1) + [(0.0, False, True)]
    assert [step[1:4] for step in steps[1:]] == ends
    with pytest.raises(RuntimeError, match="the episode is over; call reset"):
        environment.step("left")


def test_the_lake_shows_the_player_move_and_pays_at_the_goal():
    seed = lake_where(lambda rows: rows[0] == "P___" and {row[3] for row in rows[:3]} == {"_"})
    steps = play(FrozenLake(), seed, CLEAR_LAKE)
    first = steps[0][0].splitlines()
    assert first[0] == FrozenLake.INSTRUCTION and first[4].endswith("G")
    assert [step[0].index("P") for step in steps[1:-1]] == [1, 2, 3, 3 + 5, 3 + 10]
    assert [step[1:] for step in steps[1:-1]] == [(0.0, False, False, {})] * 5
    assert steps[-1] == (FrozenLake.ARRIVED, 1.0, True, False, {})


def test_a_hole_ends_the_episode_without_reward():
    seed = lake_where(lambda rows: rows[1][0] == "O")
    assert play(FrozenLake(), seed, ["down"])[-1] == (FrozenLake.FELL, 0.0, True, False, {})


def test_the_first_word_of_direction_counts_and_anything_else_moves_nothing():
    seed = lake_where(lambda rows: rows[0][1] == rows[1][0] == "_")
    start = FrozenLake().reset(seed=seed)[0].split("\n", 1)[1]
    observed = {
        response: play(FrozenLake(), seed, [response])[-1][0]
        for response in ("", "leftwards", "go!", "uphill", "I go RIGHT, not down.", "Down or right")
    }
    *nothing, right, down = observed.values()
    assert nothing == [f"{FrozenLake.NO_ACTION}\n{start}"] * 4
    assert right[:2] == "_P" and down[5] == "P"
    assert play(FrozenLake(), seed, ["up"])[-1][0] == start, "a wall"


def test_halving_always_finds_the_number_and_blind_guessing_seldom():
    environment, rng, secrets, blind_wins = GuessNumber(), random.Random(0), set(), 0
    for seed in range(300):
        low, high, reward = 1, GuessNumber.HIGHEST, 0.0
        environment.reset(seed=seed)
        while not reward:
            guess = (low + high) // 2
            observation, reward, terminated, truncated, _ = environment.step(f"Is it {guess}?")
            assert (observation == GuessNumber.FOUND) == bool(reward) == terminated
            assert reward or not truncated
            low, high = (guess + 1, high) if observation == GuessNumber.HIGHER else (low, guess - 1)
        secrets.add(guess)
        blind_wins += str(guess) in rng.sample(GuessNumber.ACTIONS, GuessNumber.max_turns)
    assert secrets == set(range(1, GuessNumber.HIGHEST + 1))
    assert blind_wins / 300 < 0.25


@pytest.mark.parametrize("response", ["", "x", "0", "32", "9" * 5000, "half"])
def test_what_is_no_number_in_range_is_no_guess(response):
    assert play(GuessNumber(), 0, [response])[-1] == (GuessNumber.NO_ACTION, 0.0, False, False, {})
