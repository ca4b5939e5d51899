"""Addition of two numbers, column by column with carry, least significant column first.

Every column and every answer digit has a label, so a model can find it by its label and need not count: 385 + 494 = 879
is asked as `a54 b89 c34 =` and answered `a9 b7 c8`. A final carry makes one more digit.
"""

import random
import string
from collections.abc import Iterator

from data.problem import Candidate, DrawnTask, Problem

LABELS = string.ascii_lowercase
MIN_COLUMNS = 2
MAX_COLUMNS = 18
"""Below the number of labels, as a final carry makes one more digit."""
TAIL_EXPONENT = 2.0
"""P(columns ≥ k) = (2/k)², up to the longest: long-tailed, as the lengths of reasoning traces are."""


class Addition(DrawnTask):
    """Sums whose lengths have a long tail."""

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, as plain text."""
        return tokenizer.encode(problem.prompt)

    def candidates(self, rng: random.Random) -> Iterator[Candidate]:
        """Problems of one length. It is drawn before a split rejects anything, so both splits have the same law."""
        tail = MIN_COLUMNS * (1 - rng.random()) ** (-1 / TAIL_EXPONENT)
        return addition_problems(rng, min(int(tail), MAX_COLUMNS))

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 for the exact labelled digits, else 0. Spaces do not count, as detokenizers differ in them."""
        if not answer.strip():
            raise ValueError("the answer of an addition problem is empty")
        return float("".join(response.split()) == "".join(answer.split()))


def addition_problems(rng: random.Random, num_columns: int) -> Iterator[Candidate]:
    """Problems of that length, without end."""
    while True:
        columns = [divmod(rng.randrange(100), 10) for _ in range(num_columns)]
        prompt = " ".join(f"{label}{x}{y}" for label, (x, y) in zip(LABELS, columns, strict=False)) + " ="
        answer = " ".join(f"{label}{digit}" for label, digit in zip(LABELS, add(columns), strict=False))
        yield prompt, Problem(prompt, answer)


def add(columns: list[tuple[int, int]]) -> list[int]:
    """Digits of the sum, least significant first, from the columns of the two numbers in the same order."""
    digits = []
    carry = 0
    for x, y in columns:
        carry, digit = divmod(x + y + carry, 10)
        digits.append(digit)
    return [*digits, 1] if carry else digits
