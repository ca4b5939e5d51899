"""One procedural dataset of the reasoning-gym library (arXiv 2505.24760), at its default difficulty."""

import difflib
import functools
import hashlib
import json
import warnings
from collections.abc import Iterator
from itertools import count, islice

from data.problem import ATTEMPTS, HELD_OUT_SEED, Candidate, Problem, Task, distinct, of_split

INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."
CHUNK = 512
"""Entries of a dataset that is made at once. Some datasets prepare all of their entries eagerly."""


class ReasoningGym(Task):
    """Problems of the dataset, each generated from the seed and the problem's number."""

    def __init__(self, name: str, seed: int) -> None:
        """Raises ValueError if the library has no dataset of that name, or one that cannot be used here."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
            from reasoning_gym.factory import DATASETS

        names = DATASETS.keys() - {"composite"}
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=5, cutoff=0)
            raise ValueError(
                f"reasoning_gym has no dataset {name!r}; of {len(names)} the nearest are {nearest}"
            )
        self._name = name
        self._seed = seed
        check_survives_json(name, dataset(name, f"{seed}/train", 0)[0])

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split."""
        draws = islice(self._candidates(f"{self._seed}/train", index * ATTEMPTS), ATTEMPTS)
        for problem in of_split(draws, held_out=False):
            return problem
        raise ValueError(
            f"reasoning_gym:{self._name} has too few distinct questions to hold any out: {ATTEMPTS} draws all fell "
            "into the held-out split; take another dataset"
        )

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems, the same for every seed. Fewer if the dataset has fewer."""
        draws = islice(self._candidates(HELD_OUT_SEED, 0), ATTEMPTS * count)
        return distinct(of_split(draws, held_out=True), count)

    @staticmethod
    def score(answer: str, response: str) -> float:
        """The dataset's own score, in [0, 1], of the text between the last <answer> tags."""
        import reasoning_gym

        entry = json.loads(answer)
        score = reasoning_gym.get_score_answer_fn(entry["reasoning_gym"])
        return float(score(reasoning_gym.utils.extract_answer(response), entry))

    def _candidates(self, stream: str, start: int) -> Iterator[Candidate]:
        """Problems of a stream from a number on."""
        for index in count(start):
            entry = dataset(self._name, stream, index // CHUNK)[index % CHUNK]
            prompt = f"{entry['question']}\n\n{INSTRUCTION}"
            yield prompt, Problem(prompt, json.dumps(entry | {"reasoning_gym": self._name}))


@functools.lru_cache(maxsize=4)
def dataset(name: str, stream: str, chunk: int):
    """Dataset number `chunk` of a stream. A hash spreads the seeds, because an entry depends on seed + index only."""
    import reasoning_gym

    digest = hashlib.blake2b(f"{stream}/{chunk}".encode(), digest_size=4).digest()
    return reasoning_gym.create_dataset(name, seed=int.from_bytes(digest, "big") // 2, size=CHUNK)


def check_survives_json(name: str, entry: dict) -> None:
    """Raise ValueError for a dataset whose score needs what JSON cannot hold, as tuples: it would score 0 silently."""
    import reasoning_gym

    score = reasoning_gym.get_score_answer_fn(name)
    before = score(entry["answer"], entry)
    after = score(entry["answer"], json.loads(json.dumps(entry)))
    if before != after:
        raise ValueError(
            f"reasoning_gym:{name} cannot be used here: its own answer scores {before}, and {after} once the entry has "
            "been through JSON, as it must be to reach the reward process"
        )
