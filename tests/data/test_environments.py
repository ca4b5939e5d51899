"""Environments: gymnasium's contract, determinism, what they say and reward; and the law of simulated latency."""

import random

import pytest

from asyncrl.config import MULTI_TURN_TASKS
from asyncrl.tasks import prepare_environment
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber

CLEAR_LAKE = ["right"] * 3 + ["down"] * 3


def lake_without(cells: str):
    """A seed of a lake whose map has ice wherever `cells` lists (row, column)."""
    for seed in range(1000):
        rows = ENVIRONMENTS["frozen_lake"]().reset(seed=seed)[0].splitlines()[1:]
        if all(rows[int(c[0])][int(c[1])] != "O" for c in cells.split()):
            return seed
    raise AssertionError("no such lake")


def play(environment, seed: int, responses: list[str]) -> list[tuple]:
    steps = [environment.reset(seed=seed)]
    return steps + [environment.step(response) for response in responses]


@pytest.mark.filterwarnings("ignore:.*alternative render modes")
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments_keep_gymnasiums_contract(name):
    from gymnasium.utils.env_checker import check_env

    check_env(ENVIRONMENTS[name]())


def test_the_command_line_knows_all_environments():
    assert tuple(ENVIRONMENTS) == MULTI_TURN_TASKS


def test_an_unknown_environment_is_an_error_with_the_list():
    with pytest.raises(
        ValueError, match=r"'frozen_lakes' is none of frozen_lake, guess_number, nor FILE.py:NAME"
    ):
        prepare_environment("frozen_lakes")


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_episode_depends_on_seed_and_responses_alone(name):
    rng = random.Random(0)
    for seed in range(30):
        responses = rng.choices([*ENVIRONMENTS[name].ACTIONS, "hm"], k=ENVIRONMENTS[name].max_turns)
        used, fresh = ENVIRONMENTS[name](), ENVIRONMENTS[name]()
        used.reset(seed=seed + 1)
        episodes = []
        for environment in (used, fresh):
            steps = [environment.reset(seed=seed)]
            for response in responses:
                steps.append(environment.step(response))
                if steps[-1][2] or steps[-1][3]:
                    break
            episodes.append(steps)
        assert episodes[0] == episodes[1]
        spaces = fresh.observation_space
        assert all(spaces.contains(step[0]) for step in episodes[1])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_episode_without_an_action_is_truncated_and_then_over(name):
    environment = ENVIRONMENTS[name]()
    environment.reset(seed=0)
    ends = [environment.step("I do not know")[1:4] for _ in range(environment.max_turns)]
    assert ends == [(0.0, False, False)] * (environment.max_turns - 1) + [(0.0, False, True)]
    with pytest.raises(RuntimeError, match="the episode is over; call reset"):
        environment.step("left")


def test_the_lake_shows_the_player_move_and_pays_at_the_goal():
    seed = lake_without("01 02 03 13 23")
    steps = play(ENVIRONMENTS["frozen_lake"](), seed, CLEAR_LAKE)
    first = steps[0][0].splitlines()
    assert (
        first[0] == FrozenLake.INSTRUCTION and first[1].startswith("P") and first[4].endswith("G")
    )
    assert [step[0].index("P") for step in steps[1:-1]] == [1, 2, 3, 3 + 5, 3 + 10]
    assert [step[1:] for step in steps[1:]] == [(0.0, False, False, {})] * 5 + [
        (1.0, True, False, {})
    ]
    assert steps[-1][0] == FrozenLake.ARRIVED


def test_a_hole_ends_the_episode_without_reward():
    environment = ENVIRONMENTS["frozen_lake"]()
    seed = next(s for s in range(100) if environment.reset(seed=s)[0].splitlines()[2][0] == "O")
    assert play(environment, seed, ["down"])[-1] == (FrozenLake.FELL, 0.0, True, False, {})


def test_the_first_word_of_direction_counts_and_anything_else_moves_nothing():
    environment, seed = ENVIRONMENTS["frozen_lake"](), lake_without("01 10")
    start = environment.reset(seed=seed)[0].split("\n", 1)[1]
    for response in ("", "leftwards", "go!", "uphill"):
        assert play(environment, seed, [response])[-1][0] == f"{FrozenLake.NO_ACTION}\n{start}"
    assert play(environment, seed, ["I go RIGHT, not down."])[-1][0][:2] == "_P"
    assert play(environment, seed, ["Down or right"])[-1][0][5] == "P"
    assert play(environment, seed, ["up"])[-1][0] == start  # a wall


def test_halving_always_finds_the_number_and_blind_guessing_seldom():
    environment, rng, secrets, blind_wins = (
        ENVIRONMENTS["guess_number"](),
        random.Random(0),
        set(),
        0,
    )
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
        guesses = rng.sample(GuessNumber.ACTIONS, GuessNumber.max_turns)
        blind_wins += str(guess) in guesses
    assert secrets == set(range(1, GuessNumber.HIGHEST + 1))
    assert blind_wins / 300 < 0.25


def test_what_is_no_number_in_range_is_no_guess():
    environment = ENVIRONMENTS["guess_number"]()
    for response in ("", "x", "0", "32", "9" * 5000, "half"):
        assert play(environment, 0, [response])[-1] == (
            GuessNumber.NO_ACTION,
            0.0,
            False,
            False,
            {},
        )
