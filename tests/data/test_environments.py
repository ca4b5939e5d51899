"""Environments: determinism, what they say and reward."""

import random

import pytest

from data import MULTI_TURN_TASKS
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber

MOVES = {
    "left": (0, -1), "I go RIGHT, not down.": (0, 1), "Down or right": (1, 0), "up": (-1, 0),
    "leftwards": (0, 0), "startup": (0, 0), "": (0, 0), "uphill": (0, 0),
}  # fmt: skip
"""Responses, and how far each moves the player, down and to the right."""
RESPONSES = [*MOVES, *4 * ["I go RIGHT, not down.", "Down or right"]]
"""Those that lead to the goal are said more often."""
every_environment = pytest.mark.parametrize("name", MULTI_TURN_TASKS)


@every_environment
def test_the_seed_and_the_responses_alone_decide_what_an_environment_says(name):
    assert tuple(ENVIRONMENTS) == MULTI_TURN_TASKS
    used = ENVIRONMENTS[name]()

    def play(environment, seed):
        return [environment.reset(seed=seed), *map(environment.step, ["left", "16"])]

    episodes = [play(used, seed) for seed in range(20)]
    assert episodes == [play(ENVIRONMENTS[name](), seed) for seed in range(20)]
    assert any(episode != episodes[0] for episode in episodes)


@every_environment
def test_what_is_no_action_takes_a_turn_and_the_last_turn_ends_the_episode(name):
    environment = ENVIRONMENTS[name]()
    responses = ["", "x", "0", "32", "9" * 5000, "half", "I do not know"] * 2
    environment.reset(seed=0)
    steps = [environment.step(response) for response in responses[: environment.max_turns]]
    ends = [(0.0, False, False)] * (environment.max_turns - 1) + [(0.0, False, True)]
    assert [step[1:4] for step in steps] == ends
    assert all(step[0].startswith(environment.NO_ACTION) for step in steps)


def test_the_lake_is_what_its_picture_says():
    """The player moves as the first word of direction says, up to the edge; anything else moves nothing."""
    rng, met, lake = random.Random(0), set(), FrozenLake()
    for seed in range(200):
        place = (0, 0)
        instruction, *rows = lake.reset(seed=seed)[0].splitlines()
        cells = {(y, x): cell for y, row in enumerate(rows) for x, cell in enumerate(row)}
        assert (instruction, cells[place], cells[3, 3]) == (FrozenLake.INSTRUCTION, "P", "G")
        cells[place] = "_"
        for turn in range(FrozenLake.max_turns):
            response = rng.choice(RESPONSES)
            said, reward, *ends, _ = lake.step(response)
            down, right = MOVES[response]
            beyond = place[0] + down, place[1] + right
            place = beyond if beyond in cells else place
            shown = [["P" if (y, x) == place else cells[y, x] for x in range(4)] for y in range(4)]
            expected = "\n".join(map("".join, shown))
            if (down, right) == (0, 0):
                expected = f"{FrozenLake.NO_ACTION}\n{expected}"
            expected = {"G": FrozenLake.ARRIVED, "O": FrozenLake.FELL}.get(cells[place], expected)
            has_ended = cells[place] in "GO"
            assert (said, reward) == (expected, float(cells[place] == "G"))
            assert ends == [has_ended, turn == FrozenLake.max_turns - 1 and not has_ended]
            met.add(cells[place])
            if has_ended:
                break
    assert met == {"_", "O", "G"}


def test_halving_always_finds_the_number():
    environment, secrets = GuessNumber(), set()
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
    assert secrets == set(range(1, GuessNumber.HIGHEST + 1))
