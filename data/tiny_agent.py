"""The `tiny` models of the environments, one for each. `python -m data.tiny_agent` makes them and prints where.

They imitate a scripted player that knows the best actions and now and then takes any other, and have a chat template.
data/tiny_model.py says how they are made.
"""

import functools
import itertools
import random
import re

import gymnasium

from data import conversation, environments
from data.conversation import Conversation
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber, make_environment
from data.tasks import Problem, load_task
from data.tiny_model import EOS, PAD, SEED, Distribution, Game, TinyModel, word_tokenizer

ASSISTANT = "<assistant>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<assistant>{{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Nothing stands before the user's message, as it is always the first or follows an end of turn."""
ANY_ACTION_RATE = {"frozen_lake": 0.4, "guess_number": 0.5}
"""Share of turns in which the scripted player takes any action, each as likely as the next."""


def vocabulary() -> list[str]:
    """Every token: all that an environment says or understands, in the longest pieces that come back."""
    rows = ["".join(cells) for cells in itertools.product("_OP", repeat=FrozenLake.SIZE) if cells.count("P") <= 1]
    last_rows = [row[:-1] + "G" for row in rows if row.endswith("_")]
    lake = [f"{FrozenLake.INSTRUCTION}\n", f"{FrozenLake.NO_ACTION}\n", FrozenLake.FELL, FrozenLake.ARRIVED]
    lake += [*(f"{row}\n" for row in rows), *last_rows, *FrozenLake.ACTIONS]
    number = [GuessNumber.INSTRUCTION, GuessNumber.NO_ACTION, GuessNumber.FOUND, GuessNumber.HIGHER, GuessNumber.LOWER]
    return [PAD, EOS, ASSISTANT, *lake, *number, *GuessNumber.ACTIONS]


def build_tokenizer():
    """The tokenizer of all environments: a token per action, per row of a map, and per phrase."""
    from tokenizers import Regex, decoders, pre_tokenizers

    tokens = vocabulary()
    longest_first = sorted(tokens, key=len, reverse=True)
    words = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    options = {"extra_special_tokens": [ASSISTANT], "chat_template": CHAT_TEMPLATE}
    return word_tokenizer(tokens, words, decoders.Fuse(), **options)


class TinyAgent(TinyModel):
    """It imitates the distributions that the scripted player's actions are drawn from, not what was drawn."""

    build_tokenizer = staticmethod(build_tokenizer)
    num_demonstrations, num_steps = 1500, 300
    max_turn_tokens = 4
    """A good turn has an action and the end of turn."""
    sampled_window, min_greedy = (0.2, 0.5), 0.85
    sources = (environments.__file__, conversation.__file__)

    def __init__(self, environment: str) -> None:
        self.environment, self.name = environment, f"tiny-{environment}"
        self.task = load_task(environment, SEED)

    @functools.cached_property
    def talk(self) -> Conversation:
        """How turns become tokens, the same in all episodes."""
        return Conversation(self.tokenizer)

    def begin(self, problem: Problem) -> "_Episode":
        """An episode of the environment."""
        return _Episode(make_environment(self.environment), problem, self.tokenizer, self.talk)

    def play(self, game: "_Episode", rng: random.Random) -> tuple[list[int], list[Distribution]]:
        """An action and the end of the turn."""
        chances = player_distribution(self.environment, game.actions, game.observations)
        ids, odds = self.tokenizer.convert_tokens_to_ids(list(chances)), list(chances.values())
        end = self.tokenizer.eos_token_id
        return [*rng.choices(ids, odds), end], [tuple(zip(ids, odds, strict=True)), ((end, 1.0),)]


class _Episode(Game):
    """An episode of an environment; a turn that is cut is played as it is."""

    def __init__(self, environment: gymnasium.Env, problem: Problem, tokenizer, talk: Conversation) -> None:
        self._environment, self._tokenizer, self._talk = environment, tokenizer, talk
        self.actions: list[str] = []
        self.observations = [environment.reset(seed=problem.environment_seed)[0]]
        self.tokens = self._talk.first(self.observations[0])

    def answer(self, response: list[int]) -> None:
        self.actions.append(self._tokenizer.decode(response, skip_special_tokens=True))
        observation, self.reward, terminated, truncated, _ = self._environment.step(self.actions[-1])
        self.observations.append(observation)
        self.is_over = terminated or truncated
        ended = response[-1] == self._talk.end_of_turn
        self.tokens += response + self._talk.reply(observation, ended)


def best_moves(observation: str) -> list[str]:
    """The moves of frozen_lake that lie on a shortest way to the goal."""
    rows = observation.splitlines()[-FrozenLake.SIZE :]
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    cells = {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    start, goal = (next(place for place, cell in cells.items() if cell == mark) for mark in "PG")
    distance, queue = {goal: 0}, [goal]
    for place in queue:
        for i, j in steps.values():
            near = place[0] + i, place[1] + j
            if cells.get(near, "O") != "O" and near not in distance:
                distance[near] = distance[place] + 1
                queue.append(near)
    after = {move: distance.get((start[0] + i, start[1] + j), len(cells)) for move, (i, j) in steps.items()}
    return [move for move, left in after.items() if left == min(after.values())]


def best_guess(guesses: list[str], answers: list[str]) -> str:
    """The middle of what the answers to former guesses leave open."""
    low = max([int(g) + 1 for g, a in zip(guesses, answers, strict=True) if a == GuessNumber.HIGHER], default=1)
    high = [int(g) - 1 for g, a in zip(guesses, answers, strict=True) if a == GuessNumber.LOWER]
    return str((low + min(high, default=GuessNumber.HIGHEST)) // 2)


def player_distribution(name: str, actions: list[str], observations: list[str]) -> dict[str, float]:
    """Probability of each action of the scripted player, after these actions and one more observation than that."""
    every, rate = ENVIRONMENTS[name].ACTIONS, ANY_ACTION_RATE[name]
    best = best_moves(observations[-1]) if name == "frozen_lake" else [best_guess(actions, observations[1:])]
    return {action: rate / len(every) + (1 - rate) / len(best) * (action in best) for action in every}


if __name__ == "__main__":
    for environment_name in ENVIRONMENTS:
        print(TinyAgent(environment_name).path())
