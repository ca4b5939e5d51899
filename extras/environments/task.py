"""A task that is an environment of several turns; its problems are seeds."""

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from asyncrl import user_code
from asyncrl.tasks import with_arguments
from data.environments import ENVIRONMENTS
from data.problem import Candidate, DrawnTask, Problem, of_split
from extras.conversation import Conversation

MAX_TRIES = 1000
"""Seeds that are tried for a problem of a split. One of eight is held out."""


def prepare_environment(name: str, task_args: Iterable[str] = ()) -> Callable[[], Any]:
    """A function that makes gymnasium environments of that name, or of `environment:FILE.py:CLASS`.

    Raises ValueError for an unknown name and for an argument that the class does not take.
    """
    return with_arguments(user_code.load(name, "--task", ENVIRONMENTS), name, task_args, {})


class EnvironmentTask(DrawnTask):
    """A task that is an environment. A problem is no more than the seed of a reset.

    If the first observation shows what the seed drew (frozen_lake), no held-out one appears in training. If it hides it
    (guess_number, where every game begins alike), the splits can only differ in their seeds. Two problems of one split
    may begin alike.
    """

    def __init__(self, name: str, seed: int, make_environment: Callable[[], Any]) -> None:
        super().__init__(seed)
        self._name = name
        with user_code.errors_as_value_error(name):
            self._environment = make_environment()
        self._seed_shows = getattr(self._environment, "seed_shows", False)
        self._conversation = functools.cache(Conversation)

    def first_observation(self, problem: Problem) -> str:
        """Return the environment's first question. Raises ValueError, in one line, if user code gives no text."""
        with user_code.errors_as_value_error(self._name):
            observation, _ = self._environment.reset(seed=problem.environment_seed)
        if not isinstance(observation, str):
            raise ValueError(
                f"--task {self._name}: reset gives {type(observation).__name__} to observe; give "
                "a str"
            )
        return observation

    def try_step(self) -> None:
        """Make a step with an empty action. Raises ValueError, in one line, if user code does not give five values."""
        with user_code.errors_as_value_error(self._name):
            self._environment.reset(seed=0)
            returned = self._environment.step("")
        if not isinstance(returned, tuple | list) or len(returned) != 5:
            raise ValueError(
                f"--task {self._name}: step gives {str(returned)[:80]}; give observation, reward, terminated, "
                "truncated, info"
            )

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the first observation. Raises ValueError for a tokenizer without a fitting chat template."""
        return self._conversation(tokenizer).first(self.first_observation(problem))

    def draw(self, rng: random.Random, held_out: bool) -> Problem:
        """Return a problem of one split. Raises ValueError if observations are too few to be split."""
        tries = itertools.islice(self.candidates(rng), MAX_TRIES)
        problem = next(of_split(tries, held_out, self.held_out_share), None)
        if problem is None:
            part = "held out" if held_out else "trained on"
            raise ValueError(
                f"--task {self._name}: {MAX_TRIES} seeds show no first observation that is {part}; let the seed draw "
                "from more, or leave seed_shows out"
            )
        return problem

    def candidates(self, rng: random.Random) -> Iterator[Candidate]:
        """Seeds without end."""
        while True:
            problem = Problem("", "", rng.getrandbits(31))
            yield (
                self.first_observation(problem)
                if self._seed_shows
                else str(problem.environment_seed),
                problem,
            )
