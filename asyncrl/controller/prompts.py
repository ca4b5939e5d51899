"""Prompts of the run's task as token ids."""

import functools
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.config import Config
from data.problem import Problem, prompt_key

NUM_CHECKED = 512
"""Training prompts that are checked before the run starts, if the task makes them. Rows of a table are all checked."""
CHECK_S = 60.0
"""Longest time for the check, seconds. 100,000 rows of 100 tokens take about that on one core."""


@dataclass(frozen=True)
class PromptSource:
    """Prompts of one task."""

    train_problem: Callable[[int], Problem]
    eval_problems: list[Problem]
    encode: Callable[[Problem], list[int]]
    rows: Sequence[Problem] = ()
    """All problems, if they are rows of a table."""
    vocab_size: int = sys.maxsize
    """Size of the model's vocabulary."""

    @functools.cached_property
    def compared_problems(self) -> Sequence[Problem]:
        """All rows, or the first training problems of a task that makes them."""
        return self.rows or [self.train_problem(index) for index in range(NUM_CHECKED)]

    @functools.cached_property
    def digest(self) -> str:
        """BLAKE2 of `compared_problems`. A resume compares it."""
        digest = hashlib.blake2b(digest_size=16)
        for problem in self.compared_problems:
            seed = problem.environment_seed
            digest.update(repr((prompt_key(problem.prompt), problem.answer, seed)).encode())
        return digest.hexdigest()

    def tokens_of(self, problem: Problem, config: Config) -> tuple[int, ...]:
        """Return the token ids of a prompt; () if an environment makes it.

        Raises ValueError if it is too long, empty, or has a token that the model lacks.
        """
        if problem.environment_seed is not None:
            return ()
        tokens = self._tokens(problem)
        self._check_length(problem, len(tokens), config)
        return tokens

    def check(self, config: Config) -> None:
        """Raise ValueError if a held-out prompt, a row or one of the first training prompts does not fit.

        The longest texts come first. Prompts that are not checked within CHECK_S are checked when they are issued.
        """
        problems = [*self.compared_problems, *([] if self.rows else self.eval_problems)]
        problems.sort(key=lambda problem: len(str(problem.prompt)), reverse=True)
        ends_at = time.monotonic() + CHECK_S
        lengths: list[int] = []
        for problem in problems:
            lengths.append(len(self._tokens(problem)))
            if time.monotonic() > ends_at:
                print(
                    f"prompts: {len(lengths)} of {len(problems)} were checked in {CHECK_S:g} s, longest texts first; "
                    "the rest is checked when it is issued",
                    flush=True,
                )
                break
        longest = max(lengths)
        num_longer = sum(length > config.max_prompt_tokens for length in lengths)
        note = f" ({num_longer} of {len(problems)} prompts are too long)"
        self._check_length(problems[lengths.index(longest)], longest, config, note)

    def _tokens(self, problem: Problem) -> tuple[int, ...]:
        """Return the token ids of a prompt. Raises ValueError if it is empty, or has a token that the model lacks."""
        tokens = tuple(self.encode(problem))
        if not tokens and problem.environment_seed is None:
            raise ValueError(
                f"{_begin(problem)} has no tokens; give another prompt, or another --model"
            )
        missing = max(tokens, default=0)
        if missing >= self.vocab_size:
            raise ValueError(
                f"{_begin(problem)} has the token {missing}, and the model's config.json has a vocabulary of "
                f"{self.vocab_size}; resize its embeddings, or remove the text of that token"
            )
        return tokens

    def _check_length(self, problem: Problem, length: int, config: Config, note: str = "") -> None:
        if length > config.max_prompt_tokens:
            raise ValueError(
                f"{_begin(problem)} has {length} tokens, --max-prompt-tokens is {config.max_prompt_tokens}{note}; "
                f"raise it to at least {length}, or remove longer prompts"
            )


def _begin(problem: Problem) -> str:
    """Return the place of a problem and the beginning of its prompt."""
    return f"{problem.place or 'the task'}: the prompt {str(problem.prompt)[:60]!r}"
