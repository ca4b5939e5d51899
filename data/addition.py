"""Addition of two numbers, column by column with carry, least significant column first.

Every column and every digit of the answer has a label, so a model need not count. 385 + 494 = 879 is asked as
`a54 b89 c34 =` and answered `a9 b7 c8`. A final carry makes one more digit.
"""

import random
import string
from collections.abc import Iterable, Iterator

from data.problem import Candidate, DrawnTask, Problem, encode_text

LABELS = string.ascii_lowercase
MIN_COLUMNS = 2
MAX_COLUMNS = 18
"""Below the number of labels, because a final carry makes one more digit."""
TAIL_EXPONENT = 2.0
"""P(columns ≥ k) = (2/k)², up to the longest: long-tailed, as the lengths of reasoning traces are."""


class Addition(DrawnTask):
    """Sums whose lengths have a long tail."""

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, as plain text."""
        return encode_text(problem.prompt, tokenizer)

    def candidates(self, rng: random.Random) -> Iterator[Candidate]:
        """Problems of one length. It is drawn before a split rejects anything, so both splits have the same law."""
        tail = MIN_COLUMNS * (1 - rng.random()) ** (-1 / TAIL_EXPONENT)
        return addition_problems(rng, min(int(tail), MAX_COLUMNS))

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 for the exact labelled digits, else 0. Spaces do not count, because detokenizers differ in them."""
        if not answer.strip():
            raise ValueError("the answer of an addition problem is empty")
        return float("".join(response.split()) == "".join(answer.split()))


def addition_problems(rng: random.Random, num_columns: int) -> Iterator[Candidate]:
    """Problems of that length, without end."""
    while True:
        columns = [f"{rng.randrange(100):02d}" for _ in range(num_columns)]
        numbers = [int("".join(digits)) for digits in zip(*reversed(columns), strict=True)]
        total = str(sum(numbers)).zfill(num_columns)
        prompt = f"{with_labels(columns)} ="
        yield prompt, Problem(prompt, with_labels(reversed(total)))


def with_labels(columns: Iterable[str]) -> str:
    """Columns or digits, least significant first, each after its label."""
    return " ".join(label + column for label, column in zip(LABELS, columns, strict=False))
