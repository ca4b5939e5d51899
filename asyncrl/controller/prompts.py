"""Prompts of the run's task as token ids, of which each must fit."""

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config import Config
from data.problem import Problem

NUM_CHECKED = 512
"""Training prompts whose length is checked before anything starts; the others are when their turn comes."""


@dataclass(frozen=True)
class PromptSource:
    """Prompts of one task."""

    train_problem: Callable[[int], Problem]
    eval_problems: list[Problem]
    encode: Callable[[Problem], list[int]]

    def tokens_of(self, problem: Problem, config: Config) -> tuple[int, ...]:
        """Return the prompt, token ids; none where an environment makes its own.

        Raises ValueError if it is too long.
        """
        return () if problem.environment_seed is not None else self._encode(problem, config)

    def check(self, config: Config) -> None:
        """Raise ValueError if a held-out prompt or one of the first training prompts does not fit."""
        checked = [*self.eval_problems, *map(self.train_problem, range(NUM_CHECKED))]
        longest = max(checked, key=lambda problem: len(self.encode(problem)))
        self._encode(longest, config)

    def _encode(self, problem: Problem, config: Config) -> tuple[int, ...]:
        tokens = tuple(self.encode(problem))
        if len(tokens) > config.max_prompt_tokens:
            raise ValueError(
                f"a prompt of {config.task} has {len(tokens)} tokens, --max-prompt-tokens is "
                f"{config.max_prompt_tokens}; raise it to at least {len(tokens)}. "
                f"The prompt begins {problem.prompt[:60]!r}"
            )
        return tokens
