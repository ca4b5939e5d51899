"""The tasks: where prompts and their answers come from, and how a prompt becomes tokens.

A task has `train_problem(index)`, `eval_problems(count)` and `encode_prompt(problem, tokenizer)`. Problems depend on
nothing but the task, the seed and the index, so a run that is resumed meets the same prompts. Scoring is in rewards.py,
except for environments, which give their own rewards.
"""

import difflib
import functools
import hashlib
import json
import os
import random
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import ClassVar, Protocol

from data.conversation import Conversation

GSM8K = "openai/gsm8k"
GSM8K_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
REASONING_GYM_INSTRUCTION = "Give the final answer, and nothing else, between <answer> and </answer>."

ADDITION_LABELS = "abcdefghijklmnopqrstuvwxyz"
ADDITION_MIN_COLUMNS = 2
ADDITION_MAX_COLUMNS = 18
"""Below the number of labels, as a final carry makes one more digit."""
ADDITION_TAIL_EXPONENT = 2.0
"""P(columns ≥ k) = (2/k)², up to the longest: long-tailed, as the lengths of reasoning traces are."""

_EVAL_SEED = "held-out"  # not the run's seed: every run is evaluated on the same problems
_HELD_OUT_SHARE = 1 / 8
_HUB_PROBE_S = 5.0
_GYM_CHUNK = 512  # reasoning_gym datasets prepare `size` entries, some of them eagerly
_GYM_ATTEMPTS = 64


@dataclass(frozen=True)
class Problem:
    """One prompt and what its response is compared with."""

    prompt: str
    """What is asked, before any chat template."""
    answer: str
    """In the task's own form, read by rewards.score; JSON for reasoning_gym."""
    environment_seed: int | None = None
    """Seed of the environment that asks; None for single-turn tasks. With one, prompt and answer are empty."""


class Task(Protocol):
    """What the rest of the system asks of a task."""

    def train_problem(self, index: int) -> Problem: ...

    def eval_problems(self, count: int) -> list[Problem]: ...

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]: ...


def load_task(name: str, seed: int, data_path: str | None = None) -> Task:
    """The task of that name: `addition`, `gsm8k`, `reasoning_gym:NAME`, `sums:LEVEL` or one of environments.py.

    Raises ValueError for a name that is none of these, and for a dataset that cannot be had.
    """
    if name == "addition":
        return Addition(seed)
    if name == "gsm8k":
        return Gsm8k(seed, data_path)
    if name.startswith("reasoning_gym:"):
        return ReasoningGym(name.removeprefix("reasoning_gym:"), seed)
    if name.startswith("sums:"):
        return Sums(name.removeprefix("sums:"), seed)
    from data.environments import ENVIRONMENTS

    if name in ENVIRONMENTS:
        return EnvironmentTask(name, seed)
    names = ", ".join(["addition", "gsm8k", *ENVIRONMENTS])
    raise ValueError(f"unknown task {name!r}; tasks are {names}, reasoning_gym:NAME and sums:LEVEL")


class Addition:
    """Addition of two numbers, column by column with carry, least significant column first.

    Every column and every answer digit has a label, so that it can be found by its label and not by counting:
    385 + 494 = 879 is asked as `a54 b89 c34 =` and answered `a9 b7 c8`; a final carry makes one more digit.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split, generated from the seed."""
        rng = random.Random(f"{self._seed}/{index}")
        return addition_problem(rng, _addition_length(rng), held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems, the same for every seed."""
        rng = random.Random(_EVAL_SEED)
        return _distinct((addition_problem(rng, _addition_length(rng), held_out=True) for _ in repeat(None)), count)

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, as plain text."""
        return tokenizer.encode(problem.prompt)


class Gsm8k:
    """Grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), walked in a new order each epoch."""

    def __init__(self, seed: int, data_path: str | None = None) -> None:
        train, test = _gsm8k_splits(data_path)
        held_out = {problem.prompt for problem in test}
        self._train = [problem for problem in train if problem.prompt not in held_out]
        self._test = test
        self._order = functools.lru_cache(maxsize=2)(lambda epoch: _shuffled(len(self._train), f"{seed}/{epoch}"))

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0; each epoch meets every training problem once."""
        epoch, position = divmod(index, len(self._train))
        return self._train[self._order(epoch)[position]]

    def eval_problems(self, count: int) -> list[Problem]:
        """`count` distinct problems of the test split, the same for every seed; all of them if it is smaller."""
        order = _shuffled(len(self._test), _EVAL_SEED)
        return _distinct((self._test[i] for i in order), count)

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, through the chat template if the tokenizer has one."""
        return _encode_chat(problem.prompt, tokenizer)


class ReasoningGym:
    """One procedural dataset of the reasoning-gym library (arXiv 2505.24760), at its default difficulty."""

    def __init__(self, name: str, seed: int) -> None:
        from reasoning_gym.factory import DATASETS

        names = sorted(set(DATASETS) - {"composite"})
        if name not in names:
            close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
            near = f"close to it: {', '.join(close)}"
            hint = near if close else f"it has {len(names)}, such as {names[0]} and {names[-1]}"
            raise ValueError(f"reasoning_gym has no dataset {name!r}; {hint}")
        self._name = name
        self._seed = seed
        self._chunk = functools.lru_cache(maxsize=4)(functools.partial(_gym_chunk, name))
        _check_survives_json(name, self._chunk(f"{seed}/train", 0)[0])

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split, generated from the seed."""
        candidates = self._problems(f"{self._seed}/train", index * _GYM_ATTEMPTS)
        return self._first(candidates, held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems, the same for every seed; fewer where the dataset has no more."""
        draws = islice(self._problems(_EVAL_SEED, 0), _GYM_ATTEMPTS * count)
        return _distinct((p for p in draws if _is_held_out(p.prompt)), count)

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, through the chat template if the tokenizer has one."""
        return _encode_chat(problem.prompt, tokenizer)

    def _problems(self, stream: str, start: int) -> Iterator[Problem]:
        for index in count(start):
            entry = self._chunk(stream, index // _GYM_CHUNK)[index % _GYM_CHUNK]
            yield Problem(f"{entry['question']}\n\n{REASONING_GYM_INSTRUCTION}", json.dumps(entry))

    def _first(self, candidates: Iterator[Problem], held_out: bool) -> Problem:
        for problem in islice(candidates, _GYM_ATTEMPTS):
            if _is_held_out(problem.prompt) == held_out:
                return problem
        raise ValueError(
            f"reasoning_gym:{self._name} has too few distinct questions to hold any out: {_GYM_ATTEMPTS} draws all "
            "fell into the held-out split; take another dataset"
        )


class EnvironmentTask:
    """An environment of several turns; a problem is no more than the seed of its reset.

    Where the first observation shows what the seed drew (frozen_lake), no held-out one is met in training. Where it is
    hidden (guess_number, whose every game begins alike) the splits can only differ in their seeds.
    """

    def __init__(self, name: str, seed: int) -> None:
        from data.environments import make_environment

        self._environment = make_environment(name)
        self._seed = seed
        self._conversation = functools.lru_cache(maxsize=1)(Conversation)

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split, drawn from the seed."""
        return self._problem(random.Random(f"{self._seed}/{index}"), held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        """The first `count` held-out problems, the same for every seed; starts may come back, as in training."""
        rng = random.Random(_EVAL_SEED)
        return [self._problem(rng, held_out=True) for _ in range(count)]

    def first_observation(self, problem: Problem) -> str:
        """What the environment asks."""
        return self._environment.reset(seed=problem.environment_seed)[0]

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the first observation, through the chat template.

        Raises ValueError if the tokenizer has no chat template, or one that does not fit.
        """
        return self._conversation(tokenizer).first(self.first_observation(problem))

    def _problem(self, rng: random.Random, held_out: bool) -> Problem:
        while True:
            problem = Problem("", "", rng.getrandbits(31))
            shown = self._environment.seed_shows
            mark = self.first_observation(problem) if shown else str(problem.environment_seed)
            if _is_held_out(mark) == held_out:
                return problem


def addition_answer(columns: list[tuple[int, int]]) -> list[int]:
    """Digits of the sum, least significant first, from the columns of the two numbers in the same order."""
    digits, carry = [], 0
    for x, y in columns:
        carry, digit = divmod(x + y + carry, 10)
        digits.append(digit)
    return [*digits, 1] if carry else digits


def addition_problem(rng: random.Random, num_columns: int, held_out: bool) -> Problem:
    """A problem of that length and split."""
    while True:
        columns = [divmod(rng.randrange(100), 10) for _ in range(num_columns)]
        prompt = " ".join(f"{label}{x}{y}" for label, (x, y) in zip(ADDITION_LABELS, columns, strict=False)) + " ="
        if _is_held_out(prompt) == held_out:
            break
    digits = addition_answer(columns)
    return Problem(prompt, " ".join(f"{a}{d}" for a, d in zip(ADDITION_LABELS, digits, strict=False)))


def _addition_length(rng: random.Random) -> int:
    """Columns of a problem, drawn before the split rejects anything, so that both splits have the same law."""
    tail = ADDITION_MIN_COLUMNS * (1 - rng.random()) ** (-1 / ADDITION_TAIL_EXPONENT)
    return min(int(tail), ADDITION_MAX_COLUMNS)


def _is_held_out(text: str, share: float = _HELD_OUT_SHARE) -> bool:
    """The split of a problem, by a hash of its text that is the same in every process (Python's own is not)."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _distinct(problems: Iterator[Problem], count: int) -> list[Problem]:
    """The first `count` problems with different prompts, or all there are."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(problem.prompt, problem)
        if len(found) == count:
            break
    return list(found.values())


def _shuffled(length: int, seed: str) -> list[int]:
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return order


def _encode_chat(prompt: str, tokenizer) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def _gsm8k_splits(data_path: str | None) -> tuple[list[Problem], list[Problem]]:
    """Train and test problems; a copy without a test split is split by a hash of the question."""
    splits = _load_splits(data_path)
    source = data_path or GSM8K
    try:
        problems = {
            name: [_gsm8k_problem(row, f"{source}, row {number} of {name},") for number, row in enumerate(rows)]
            for name, rows in splits.items()
        }
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8: {error}") from None
    if "train" in problems and "test" in problems:
        train, test = problems["train"], problems["test"]
    else:
        everything = [problem for rows in problems.values() for problem in rows]
        train = [problem for problem in everything if not _is_held_out(problem.prompt)]
        test = [problem for problem in everything if _is_held_out(problem.prompt)]
    if not train or not test:
        raise ValueError(f"{source} gives {len(train)} training and {len(test)} held-out problems; both must have some")
    return train, test


def _gsm8k_problem(row: dict, source: str) -> Problem:
    missing = {"question", "answer"} - row.keys()
    if missing:
        raise ValueError(f"{source} has columns {sorted(row)}, and lacks {sorted(missing)}")
    for name in ("question", "answer"):
        if not isinstance(row[name], str):
            raise ValueError(f"{source} has no text as its {name}: {str(row[name])[:80]}; mend the row or leave it out")
    _, marker, final = row["answer"].rpartition("####")
    if not marker or not final.strip():
        raise ValueError(f"{source} has an answer without a final number after ####: {row['answer'][-80:]!r}")
    return Problem(f"{row['question']}\n{GSM8K_INSTRUCTION}", final.strip().replace(",", ""))


def _load_splits(data_path: str | None) -> dict:
    """Split name to rows, from a local copy or from the hub.

    Raises ValueError, in seconds also without a network, that says how to point at a local copy.
    """
    import datasets

    if data_path is not None and not os.path.exists(data_path):
        raise ValueError(f"--data-path {data_path} does not exist; {_data_path_hint()}")
    try:
        loaded = _load_from_hub() if data_path is None else _load_from_disk(data_path)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        empty = isinstance(error, StopIteration)  # pyarrow's end is what datasets meets first
        reason = "no rows" if empty else str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"dataset {data_path or GSM8K} cannot be had ({reason}); {_data_path_hint()}") from error
    return loaded if isinstance(loaded, dict) else {"all": loaded}


def _data_path_hint() -> str:
    return (
        f"--data-path takes a local copy of {GSM8K}: a folder of parquet or jsonl files (train*, test*), one such "
        "file, or a folder that datasets' save_to_disk wrote"
    )


def _load_from_hub():
    import datasets
    from huggingface_hub import constants

    if not _answers(constants.ENDPOINT):
        # Otherwise five retries with back-off (23 s) come before the look into the local cache.
        datasets.config.HF_HUB_OFFLINE = True
    return datasets.load_dataset(GSM8K, "main")


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=_HUB_PROBE_S).close()
    except urllib.error.HTTPError:
        return True  # it said no, but it spoke
    except OSError:
        return False
    return True


def _load_from_disk(path: str):
    import datasets

    if os.path.isfile(path):
        kind = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}.get(os.path.splitext(path)[1])
        if kind is None:
            raise ValueError("a single file must end in .parquet, .jsonl or .json")
        return datasets.load_dataset(kind, data_files=path)
    if any(os.path.exists(os.path.join(path, name)) for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(path)
    return datasets.load_dataset(path)


def _gym_chunk(name: str, stream: str, chunk: int):
    """Dataset number `chunk` of a stream; seeds are spread by a hash, as an entry depends on seed + index alone."""
    import reasoning_gym

    digest = hashlib.blake2b(f"{stream}/{chunk}".encode(), digest_size=4).digest()
    return reasoning_gym.create_dataset(name, seed=int.from_bytes(digest, "big") // 2, size=_GYM_CHUNK)


def _check_survives_json(name: str, entry: dict) -> None:
    """Refuse the few datasets whose score needs what JSON cannot hold (tuples): they would score 0, silently."""
    import reasoning_gym

    score: Callable[[str, dict], float] = reasoning_gym.get_score_answer_fn(name)
    before, after = score(entry["answer"], entry), score(entry["answer"], json.loads(json.dumps(entry)))
    if before != after:
        raise ValueError(
            f"reasoning_gym:{name} cannot be used here: its own answer scores {before}, and {after} once the entry has "
            "been through JSON, as it must be to reach the reward process"
        )


class Sums:
    """Questions in plain words that a small chat model can learn to answer: sums of two numbers, the largest of four.

    They are asked through the chat template, under the system prompt `Answer briefly.`. A quarter is held out; what
    differs in the order of its numbers alone is on one side of the split, so of 100 one-digit sums 22 are never met.
    """

    LEVELS: ClassVar = {
        "one_digit": ("What is {} + {}?", range(10), sum),
        "two_digits": ("What is {} + {}?", range(10, 100), sum),
        "largest_of_four": ("Which is the largest of {}, {}, {} and {}?", range(100), max),
    }
    """The question of each level, what its numbers are drawn from, and what of them is the answer."""
    SYSTEM = "Answer briefly."
    HELD_OUT = 1 / 4

    def __init__(self, level: str, seed: int) -> None:
        if level not in self.LEVELS:
            raise ValueError(f"sums has no level {level!r}; levels are {', '.join(self.LEVELS)}")
        self._question, self._values, self._answer = self.LEVELS[level]
        self._seed = seed

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split, drawn from the seed."""
        return self._draw(random.Random(f"{self._seed}/{index}"), held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems, the same for every seed; all of them if there are no more."""
        rng = random.Random(_EVAL_SEED)
        return _distinct((self._draw(rng, held_out=True) for _ in range(_GYM_ATTEMPTS * count)), count)

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of system prompt and question, through the chat template if the tokenizer has one."""
        if tokenizer.chat_template is None:
            return tokenizer.encode(f"{self.SYSTEM}\n{problem.prompt}")
        messages = [{"role": "system", "content": self.SYSTEM}, {"role": "user", "content": problem.prompt}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 if the last number of the response is the answer, else 0."""
        right, numbers = float(answer), re.findall(r"-?\d+(?:\.\d+)?", response)
        return float(bool(numbers) and float(numbers[-1]) == right)

    def _draw(self, rng: random.Random, held_out: bool) -> Problem:
        while True:
            numbers = rng.choices(self._values, k=self._question.count("{}"))
            if _is_held_out(f"{sorted(numbers)}", self.HELD_OUT) == held_out:
                return Problem(self._question.format(*numbers), str(self._answer(numbers)))
