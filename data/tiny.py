"""The `tiny` model that adds. `python -m data.tiny` makes it and prints where it is; data/tiny_model.py says how."""

import functools
import random

from data.tasks import ADDITION_LABELS, ADDITION_MAX_COLUMNS, ADDITION_MIN_COLUMNS, Addition, Problem, addition_problem
from data.tiny_model import EOS, PAD, SEED, Distribution, Game, TinyModel, word_tokenizer

SPACE = "▁"  # a label carries the space before it, so that text and tokens map onto each other exactly
DIGITS = [str(digit) for digit in range(10)]
VOCABULARY = [PAD, EOS, f"{SPACE}=", *(SPACE + label for label in ADDITION_LABELS), *DIGITS]
VOCABULARY += [f"{column:02d}" for column in range(100)]

EVEN_SHARE = 0.15
"""Share of demonstrations whose length is drawn evenly: by the task's own law alone, long ones are never learnt."""
WRONG_DIGIT_RATE = 0.3


def build_tokenizer():
    """The word-level tokenizer: one token per label, per column (a pair of digits) and per answer digit."""
    from tokenizers import Regex, decoders, pre_tokenizers

    spaces = {"replacement": SPACE, "prepend_scheme": "always", "split": False}
    words = pre_tokenizers.Split(Regex(f"{SPACE}[a-z=]|[0-9]{{1,2}}"), behavior="isolated")
    pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(**spaces), words])
    return word_tokenizer(VOCABULARY, pre_tokenizer, decoders.Metaspace(**spaces))


class TinyAdder(TinyModel):
    """It imitates right answers in which a digit is wrong at WRONG_DIGIT_RATE, any other one as likely as the next."""

    name, task, build_tokenizer = "tiny", Addition(SEED), staticmethod(build_tokenizer)
    num_demonstrations, num_steps = 28_000, 1200
    max_turn_tokens = 2 * (ADDITION_MAX_COLUMNS + 1) + 1
    sampled_window, min_greedy = (0.15, 0.5), 0.9

    def begin(self, problem: Problem) -> "_Sum":
        """A problem of one turn."""
        return _Sum(problem, self.tokenizer)

    def play(self, game: "_Sum", rng: random.Random) -> tuple[list[int], list[Distribution]]:
        """The right answer, and for its digits the odds of wrong ones."""
        return game.right, [self._odds.get(token, ((token, 1.0),)) for token in game.right]

    @functools.cached_property
    def _odds(self) -> dict[int, Distribution]:
        digits, wrong = self.tokenizer.convert_tokens_to_ids(DIGITS), WRONG_DIGIT_RATE / 9
        return {right: tuple((d, 1 - WRONG_DIGIT_RATE if d == right else wrong) for d in digits) for right in digits}

    def training_problems(self, count: int) -> list[Problem]:
        """Problems of the training split, some of them of any length."""
        rng, num_even = random.Random(SEED), int(count * EVEN_SHARE)
        lengths = [rng.randint(ADDITION_MIN_COLUMNS, ADDITION_MAX_COLUMNS) for _ in range(num_even)]
        even = [addition_problem(rng, length, held_out=False) for length in lengths]
        return even + super().training_problems(count - num_even)


class _Sum(Game):
    """A problem of addition, won by exactly the right answer."""

    def __init__(self, problem: Problem, tokenizer) -> None:
        self.tokens = tokenizer.encode(problem.prompt)
        self.right = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]

    def answer(self, response: list[int]) -> None:
        self.tokens += response
        self.reward, self.is_over = float(response == self.right), True


if __name__ == "__main__":
    print(TinyAdder().path())
