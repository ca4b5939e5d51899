"""Grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168)."""

import re

from data.problem import HELD_OUT_SHARE, Problem
from data.tables import RowTask, load_splits

HUB_NAME = "openai/gsm8k"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
NUMBER = r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)"
"""A final answer that the score can read."""


class Gsm8k(RowTask):
    """Rows with `question` and `answer`. An answer ends with the number that counts: `#### 42`."""

    def __init__(self, seed: int, data_path: str | None = None) -> None:
        splits = load_splits(data_path, HUB_NAME, "main")
        super().__init__(
            seed, splits, read_row, source=data_path or HUB_NAME, held_out=HELD_OUT_SHARE
        )

    @staticmethod
    def score(answer: str, response: str) -> float:
        """Return 1 if math-verify finds that the last number of the response, boxed or not, is the answer; else 0."""
        from math_verify import parse, verify

        float(answer)  # ValueError: math-verify would parse anything
        # No time limits of math-verify: they use SIGALRM, and the process that scores has its own limit.
        options = {"parsing_timeout": None, "raise_on_error": True}
        gold = parse(f"\\boxed{{{answer}}}", **options)
        given = parse(response, **options)
        return float(verify(gold, given, timeout_seconds=None, raise_on_error=True))


def read_row(row: dict, place: str) -> Problem:
    """Return the problem of a row. Raises ValueError, with the row's place, if the row has no problem."""
    for name in ("question", "answer"):
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"{place} has no text as its {name}: {str(row)[:80]}; fix the row or leave it out"
            )
    _, marker, final = row["answer"].rpartition("####")
    number = final.strip().replace(",", "")
    if not marker or not re.fullmatch(NUMBER, number):
        raise ValueError(
            f"{place} has an answer without a final number after ####: {row['answer'][-80:]!r}; fix the row, or "
            "use --task jsonl with a --reward that reads such answers"
        )
    return Problem(f"{row['question']}\n{INSTRUCTION}", number)
