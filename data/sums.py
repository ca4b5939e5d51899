"""Questions in plain words for a small chat model: sums of two numbers, or the largest of four.

A quarter is held out. Two questions with the same numbers in another order are in the same split. So 22 of the 100
one-digit sums are never trained on.
"""

import random
import re
from collections.abc import Iterator
from typing import ClassVar

from data.problem import Candidate, DrawnTask, Problem


class Sums(DrawnTask):
    """Questions of one level, asked through the chat template under a short system prompt."""

    LEVELS: ClassVar = {
        "one_digit": ("What is {} + {}?", range(10), sum),
        "two_digits": ("What is {} + {}?", range(10, 100), sum),
        "largest_of_four": ("Which is the largest of {}, {}, {} and {}?", range(100), max),
    }
    """Each level's question, what its numbers are drawn from, and how they make the answer."""
    system = "Answer briefly."
    held_out_share = 1 / 4

    def __init__(self, name: str, seed: int) -> None:
        """Raises ValueError if there is no level of that name."""
        if name not in self.LEVELS:
            raise ValueError(f"sums has no level {name!r}; levels are {', '.join(self.LEVELS)}")
        super().__init__(seed)
        self._question, self._values, self._answer = self.LEVELS[name]

    def candidates(self, rng: random.Random) -> Iterator[Candidate]:
        """Questions without end."""
        while True:
            numbers = rng.choices(self._values, k=self._question.count("{}"))
            problem = Problem(self._question.format(*numbers), str(self._answer(numbers)))
            yield str(sorted(numbers)), problem

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 if the last number of the response is the answer, else 0."""
        right = float(answer)
        numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
        return float(bool(numbers) and float(numbers[-1]) == right)
