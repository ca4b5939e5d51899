"""A problem, and what tasks share: how a prompt becomes tokens, and which problems are held out.

A task has `train_problem(index)`, `eval_problems(count)`, `encode_prompt(problem, tokenizer)` and a static
`score(answer, response)`. Its problems depend only on the task, the seed and the index, so a resumed run meets the same
prompts.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

HELD_OUT_SEED = "held-out"
"""Seed of held-out problems. It is not the run's: every run is evaluated on the same problems."""
HELD_OUT_SHARE = 1 / 8
ATTEMPTS = 64
"""Draws for each problem that is asked for, after which a task counts as having no more."""


@dataclass(frozen=True)
class Problem:
    """One prompt, and what its response is compared with."""

    prompt: str | list[dict]
    """What is asked, before any chat template: a text, or chat messages."""
    answer: str
    """In the task's own form, read by its score: JSON for reasoning_gym and jsonl."""
    environment_seed: int | None = None
    """Seed of the environment that asks; None for single-turn tasks. With a seed, prompt and answer are empty."""


Candidate = tuple[str, Problem]
"""A problem, after the text whose hash says which split it belongs to."""


class Task:
    """A task whose prompts go through the chat template, if the tokenizer has one."""

    system = ""
    """What the system says before each prompt."""
    template: ClassVar[dict] = {}
    """Options of the chat template."""

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split."""
        raise NotImplementedError

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems, the same for every seed. Fewer if the task has fewer."""
        raise NotImplementedError

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt.

        Raises ValueError for chat messages without a chat template, and for options that the template does not have.
        """
        prompt = problem.prompt
        if tokenizer.chat_template is None:
            if not isinstance(prompt, str):
                raise ValueError(
                    "prompts of chat messages need a chat template; give texts, or a --model that has one"
                )
            return tokenizer.encode(f"{self.system}\n\n{prompt}" if self.system else prompt)
        for name in self.template:
            if name not in tokenizer.chat_template:
                raise ValueError(
                    f"--task-args template: the model's chat template has no {name}; correct it, or leave it out"
                )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        options = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": False,
            **self.template,
        }
        return tokenizer.apply_chat_template(messages, **options)


class DrawnTask(Task):
    """A task whose problems are drawn, each from the run's seed and the problem's number."""

    held_out_share = HELD_OUT_SHARE

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def train_problem(self, index: int) -> Problem:
        return self.draw(random.Random(f"{self.seed}/{index}"), held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        rng = random.Random(HELD_OUT_SEED)
        return distinct((self.draw(rng, held_out=True) for _ in range(ATTEMPTS * count)), count)

    def draw(self, rng: random.Random, held_out: bool) -> Problem:
        """A problem of one split."""
        return next(of_split(self.candidates(rng), held_out, self.held_out_share))

    def candidates(self, rng: random.Random) -> Iterator[Candidate]:
        """Problems without end; the first that belongs to the split is taken."""
        raise NotImplementedError


def of_split(
    candidates: Iterable[Candidate], held_out: bool, share: float = HELD_OUT_SHARE
) -> Iterator[Problem]:
    """Yield the problems of those candidates that are held out, or of those that are not."""
    return (problem for text, problem in candidates if (split_hash(text) < share) == held_out)


def distinct(problems: Iterable[Problem], count: int) -> list[Problem]:
    """The first `count` problems with different prompts or seeds, or all if there are fewer."""
    by_prompt: dict[tuple, Problem] = {}
    for problem in problems:
        by_prompt.setdefault((prompt_key(problem.prompt), problem.environment_seed), problem)
        if len(by_prompt) == count:
            break
    return list(by_prompt.values())


def prompt_key(prompt: str | list) -> str:
    """A text that is equal for equal prompts only."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


def split_hash(prompt: str | list) -> float:
    """A number in [0, 1) that depends on the prompt only. (Python's own hash differs between processes.)"""
    digest = hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
