"""Environments of several turns, through gymnasium's API: text in, text out.

`reset(seed=…)` gives the first observation, `step(response)` the next one. Both depend only on the seed and the
responses. `step` takes any text, so `action_space` and `observation_space` are not set. Observations are short, because
each stays in the context.
"""

import re
import textwrap

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map


class TextEnvironment(gymnasium.Env[str, str]):
    """An environment that counts turns and truncates an episode after max_turns."""

    max_turns: int
    """Turns of the policy after which the episode is truncated."""
    seed_shows: bool
    """True if the first observation shows all that the seed drew, so that it tells two seeds apart."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Start the episode of a seed ≥ 0. Returns the first observation and an empty dict."""
        super().reset(seed=seed)
        self._turns_left = self.max_turns
        return self._start(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Take the action in a response. Returns observation, reward, terminated, truncated, {}.

        The reward is 1 for success, else 0.
        """
        observation, reward, terminated = self._act(action)
        self._turns_left -= 1
        return observation, reward, terminated, self._turns_left == 0 and not terminated, {}

    def _start(self) -> str:
        """Start an episode from `self.np_random`. Returns the first observation."""
        raise NotImplementedError

    def _act(self, response: str) -> tuple[str, float, bool]:
        """Take the action in a response. Returns observation, reward, and whether the episode has ended."""
        raise NotImplementedError


class FrozenLake(TextEnvironment):
    """gymnasium's FrozenLake-v1 without slipping, on a random 4x4 map with a path to the goal.

    The observation is the map with the player on it, one row per line. The action is the first of the words left, down,
    right and up in the response. Without one the player stays. The goal gives reward 1, and a hole ends the episode.
    """

    max_turns = 8
    seed_shows = True

    INSTRUCTION = (
        "Go from P to the goal G, a step each turn. _ is ice, O is a hole: stay out. "
        "Answer left, down, right or up."
    )
    NO_ACTION = "Answer left, down, right or up."
    FELL = "You fell into a hole."
    ARRIVED = "You reached the goal."
    ACTIONS = ("left", "down", "right", "up")
    """In the order of gymnasium's action numbers."""
    SIZE = 4

    def _start(self) -> str:
        map_seed = int(self.np_random.integers(2**31))
        rows = generate_random_map(self.SIZE, seed=map_seed)
        self._lake = FrozenLakeEnv(desc=rows, is_slippery=False)
        self._lake.reset(seed=map_seed)
        self._cells = "".join(rows).translate(str.maketrans("SFHG", "__OG"))
        return f"{self.INSTRUCTION}\n{self._map()}"

    def _act(self, response: str) -> tuple[str, float, bool]:
        word = re.search(rf"\b({'|'.join(self.ACTIONS)})\b", response, re.IGNORECASE)
        if word is None:
            return f"{self.NO_ACTION}\n{self._map()}", 0.0, False
        _, reward, terminated, _, _ = self._lake.step(self.ACTIONS.index(word[0].lower()))
        if terminated:
            return self.ARRIVED if reward else self.FELL, float(reward), True
        return self._map(), 0.0, False

    def _map(self) -> str:
        """The map with the player on it, one row per line."""
        player = int(self._lake.s)
        cells = self._cells[:player] + "P" + self._cells[player + 1 :]
        return "\n".join(textwrap.wrap(cells, self.SIZE))


class GuessNumber(TextEnvironment):
    """A secret number. Each guess is answered `higher`, if the secret is higher, or `lower`.

    The guess is the first number in the response. Halving always finds the secret: 2⁵ − 1 = 31. Blind guessing finds it
    with probability 5/31.
    """

    max_turns = 5
    seed_shows = False

    HIGHEST = 2**max_turns - 1
    INSTRUCTION = (
        f"I think of a number from 1 to {HIGHEST}. Find it in {max_turns} guesses; I say if it is higher or lower than "
        "your guess. Answer with a number."
    )
    NO_ACTION = f"Answer with a number from 1 to {HIGHEST}."
    HIGHER = "higher"
    LOWER = "lower"
    FOUND = "correct"
    ACTIONS = tuple(str(number) for number in range(1, HIGHEST + 1))

    def _start(self) -> str:
        self._secret = int(self.np_random.integers(1, self.HIGHEST + 1))
        return self.INSTRUCTION

    def _act(self, response: str) -> tuple[str, float, bool]:
        digits = re.search(r"[0-9]+", response)
        if digits is None or digits[0] not in self.ACTIONS:
            return self.NO_ACTION, 0.0, False
        guess = int(digits[0])
        if guess == self._secret:
            return self.FOUND, 1.0, True
        return self.HIGHER if guess < self._secret else self.LOWER, 0.0, False


ENVIRONMENTS: dict[str, type[TextEnvironment]] = {
    "frozen_lake": FrozenLake,
    "guess_number": GuessNumber,
}
