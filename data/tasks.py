"""The tasks: where prompts and their answers come from, and how a prompt becomes tokens.

A task has `train_problem(index)`, `eval_problems(count)`, `encode_prompt(problem, tokenizer)` and a static
`score(answer, response)`, but for environments, which give their own rewards. Problems depend on nothing but the task,
the seed and the index, so a run that is resumed meets the same prompts.
"""

import difflib
import functools
import hashlib
import inspect
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, ClassVar, Protocol

from asyncrl import user_code as own
from asyncrl.config import Config, is_environment, read_arguments
from data import tables
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
_GYM_CHUNK = 512  # reasoning_gym datasets prepare `size` entries, some of them eagerly
_ATTEMPTS = 64


@dataclass(frozen=True)
class Problem:
    """One prompt and what its response is compared with."""

    prompt: str | list[dict]
    """What is asked, before any chat template: a text, or chat messages."""
    answer: str
    """In the task's own form, read by its score; JSON for reasoning_gym and jsonl."""
    environment_seed: int | None = None
    """Seed of the environment that asks; None for single-turn tasks. With one, prompt and answer are empty."""


class Task(Protocol):
    """What the rest of the system asks of a task."""

    def train_problem(self, index: int) -> Problem: ...

    def eval_problems(self, count: int) -> list[Problem]: ...

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]: ...


def load_task(name: str, seed: int, data_path: str | None = None, task_args: Iterable[str] = ()) -> Task:
    """The task of that name, made with `--task-args`; an environment for one of environments.py or `environment:…`.

    Raises ValueError for what `prepare_task` does, and for data that cannot be had.
    """
    make = prepare_task(name, seed, data_path, task_args)
    if not own.is_own(name):
        return make()
    with own.blamed(name):
        return make() if is_environment(name) else OwnTask(name, make())


def prepare_task(
    name: str, seed: int, data_path: str | None = None, task_args: Iterable[str] = ()
) -> Callable[[], Task]:
    """What makes the task, and reads its data. Raises ValueError for a name or an argument that is none."""
    if is_environment(name):
        from data.environments import prepare_environment

        return functools.partial(EnvironmentTask, name, seed, prepare_environment(name, task_args))
    make = _maker_of(name)
    parameters = inspect.signature(make, eval_str=True).parameters
    taken = [parameter for parameter in parameters.values() if parameter.name not in ("seed", "data_path")]
    arguments = read_arguments("task-args", task_args, f"--task {name}", taken)
    if "data_path" in parameters and parameters["data_path"].default is inspect.Parameter.empty and data_path is None:
        raise ValueError(f"--task {name} needs --data-path, a file or folder of rows")
    arguments |= {k: value for k, value in (("seed", seed), ("data_path", data_path)) if k in parameters}
    return functools.partial(make, **arguments)


def check_rows(config: Config, task: Task) -> None:
    """Say how rows are scored without --reward. Raises ValueError, in one line, if they cannot be."""
    if config.task == "jsonl" and not config.reward:
        task.score(task.train_problem(0).answer, "")
        print("no --reward: a response is right if it is the column `answer` of its row", flush=True)


def encode(config: Config, task: Task, tokenizer, problem: Problem) -> list[int]:
    """Token ids of a prompt. Raises ValueError if the tokenizer does not know its words, as a tiny model's may not."""
    try:
        return task.encode_prompt(problem, tokenizer)
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises nothing more special
            raise
        raise ValueError(
            f"--model {config.model}: its tokenizer cannot encode {str(problem.prompt)[:60]!r} of --task {config.task} "
            f"({error}){'; there is no tiny model for this task' * (config.model == 'tiny')}; give another --model"
        ) from None


def score_of(name: str) -> Callable[[str, str], Any]:
    """What a single-turn task says a response is worth, from the answer of its problem and the response.

    A finite number, or for a user's own task a dict of parts. It runs in processes where no task is made, and meets
    whatever a policy writes. Raises ValueError if there is none.
    """
    make = _maker_of(name)
    make = make.func if isinstance(make, functools.partial) else make
    found = inspect.getattr_static(make, "score", None)
    if not isinstance(found, staticmethod):
        what = "its score is no static method" if found else "it has no score"
        raise ValueError(
            f"--task {name}: {what}; give it a @staticmethod score(answer, response), as it runs in processes where no "
            "task is made, or give --reward FILE.py:FUNCTION"
        )
    return make.score


def _maker_of(name: str) -> Callable[..., Task]:
    """What makes a task from its seed and arguments: its class, with the name of one of its kind where it has many."""
    kind, _, which = name.partition(":")
    if kind == "reasoning_gym":
        return ReasoningGym.named(which)
    if kind == "sums":
        return functools.partial(Sums, which)
    make = own.load(name, "--task", {"addition": Addition, "gsm8k": Gsm8k, "jsonl": Jsonl})
    if not isinstance(make, type):
        raise ValueError(f"--task {name} is a {type(make).__name__}; give a class with train_problem and eval_problems")
    return make


class _Asked:
    """Problems whose prompts go through the chat template, if the tokenizer has one."""

    _system = ""
    """What the system says before each prompt."""
    _template: ClassVar[dict] = {}
    """Options of the chat template."""

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt."""
        return _encode_chat(problem.prompt, tokenizer, self._system, **self._template)


class _Drawn(_Asked):
    """Problems that are drawn, each by the run's seed and its number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split."""
        return self._draw(random.Random(f"{self._seed}/{index}"), held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems, the same for every seed; all of them if there are no more."""
        rng = random.Random(_EVAL_SEED)
        return _distinct((self._draw(rng, held_out=True) for _ in range(_ATTEMPTS * count)), count)

    def _draw(self, rng: random.Random, held_out: bool) -> Problem:
        raise NotImplementedError


class Addition(_Drawn):
    """Addition of two numbers, column by column with carry, least significant column first.

    Every column and every answer digit has a label, so that it can be found by its label and not by counting:
    385 + 494 = 879 is asked as `a54 b89 c34 =` and answered `a9 b7 c8`; a final carry makes one more digit.
    """

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, as plain text."""
        return tokenizer.encode(problem.prompt)

    def _draw(self, rng: random.Random, held_out: bool) -> Problem:
        return addition_problem(rng, _addition_length(rng), held_out)

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 for the exact labelled digits, 0 for anything else; spaces do not count, as detokenizers differ in them."""
        if not answer.strip():
            raise ValueError("the answer of an addition problem is empty")
        return float("".join(response.split()) == "".join(answer.split()))


class _Rows(_Asked):
    """Problems that are rows, walked in a new order each epoch."""

    def __init__(self, seed: int, train: list[Problem], test: list[Problem], shuffle: bool = True) -> None:
        self._train, self._test, everything = train, test, range(len(train))
        order = (lambda epoch: _shuffled(len(train), f"{seed}/{epoch}")) if shuffle else lambda _: everything
        self._order = functools.lru_cache(maxsize=2)(order)

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0; each epoch meets every training problem once."""
        epoch, position = divmod(index, len(self._train))
        return self._train[self._order(epoch)[position]]

    def eval_problems(self, count: int) -> list[Problem]:
        """`count` distinct held-out problems, the same for every seed; all of them if there are fewer."""
        order = _shuffled(len(self._test), _EVAL_SEED)
        return _distinct((self._test[i] for i in order), count)


class Gsm8k(_Rows):
    """Grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168)."""

    def __init__(self, seed: int, data_path: str | None = None) -> None:
        source, splits = data_path or GSM8K, tables.load_splits(data_path, GSM8K, "main")
        rows = {
            name: [_gsm8k_row(row, f"{source}, row {number} of {name},") for number, row in enumerate(rows)]
            for name, rows in splits.items()
        }
        parts = tables.split(rows, lambda row: row["prompt"], _HELD_OUT_SHARE, source)
        super().__init__(seed, *([Problem(**row) for row in part] for part in parts))

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 if the last number of the response, boxed or not, equals the answer, by math-verify."""
        from math_verify import parse, verify

        float(answer)  # ValueError: math-verify would parse anything
        # No time-outs of its own: they use SIGALRM, and the pool has one.
        gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None, raise_on_error=True)
        found = parse(response, parsing_timeout=None, raise_on_error=True)
        return float(verify(gold, found, timeout_seconds=None, raise_on_error=True))


class Jsonl(_Rows):
    """Rows of the user's: `prompt` is a text or chat messages, and the whole row, as JSON, is the answer."""

    def __init__(
        self,
        seed: int,
        data_path: str,
        *,
        prompt: str = "prompt",
        system: str = "",
        test: str = "",
        held_out: float = 0.1,
        shuffle: bool = True,
        template: str = "{}",
    ) -> None:
        """`prompt` is the column that asks; `system` a system message before it; `test` a file of held-out rows,
        without which the share `held_out` is, by hash; `template` options of the chat template, as JSON."""
        if not 0 < held_out < 1:
            raise ValueError(f"--task-args held_out must be above 0 and below 1, got {held_out}")
        self._system, self._template = system, _json_object(template)
        splits = tables.load_splits(data_path)
        if test:
            rows_of = lambda of: [row for rows in of.values() for row in rows]  # noqa: E731
            splits = {"train": rows_of(splits), "test": rows_of(tables.load_splits(test))}
        for name, rows in splits.items():
            for number, row in enumerate(rows):
                _check_row(row, prompt, f"{data_path}, row {number} of {name},")
        parts = tables.split(splits, lambda row: row[prompt], held_out, data_path)
        problems = ([Problem(row[prompt], json.dumps(row, ensure_ascii=False)) for row in part] for part in parts)
        super().__init__(seed, *problems, shuffle)

    @staticmethod
    def score(answer: str, response: str) -> float:
        """1 if the response is the row's column `answer`, spaces around both aside; where no --reward is given."""
        row = json.loads(answer)
        if "answer" not in row:
            raise ValueError(f"rows have columns {', '.join(row)}, and no `answer`; give --reward FILE.py:FUNCTION")
        return float(response.strip() == str(row["answer"]).strip())


class ReasoningGym(_Asked):
    """One procedural dataset of the reasoning-gym library (arXiv 2505.24760), at its default difficulty."""

    @classmethod
    def named(cls, name: str) -> Callable[..., "ReasoningGym"]:
        """What makes the dataset of that name from a seed. Raises ValueError if there is none."""
        from reasoning_gym.factory import DATASETS

        names = sorted(set(DATASETS) - {"composite"})
        if name not in names:
            close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
            near = f"close to it: {', '.join(close)}"
            hint = near if close else f"it has {len(names)}, such as {names[0]} and {names[-1]}"
            raise ValueError(f"reasoning_gym has no dataset {name!r}; {hint}")
        return functools.partial(cls, name)

    def __init__(self, name: str, seed: int) -> None:
        self._name = name
        self._seed = seed
        self._chunk = functools.lru_cache(maxsize=4)(functools.partial(_gym_chunk, name))
        _check_survives_json(name, self._chunk(f"{seed}/train", 0)[0])

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split, generated from the seed."""
        candidates = self._problems(f"{self._seed}/train", index * _ATTEMPTS)
        return self._first(candidates, held_out=False)

    def eval_problems(self, count: int) -> list[Problem]:
        """Up to `count` distinct held-out problems, the same for every seed; fewer where the dataset has no more."""
        draws = islice(self._problems(_EVAL_SEED, 0), _ATTEMPTS * count)
        return _distinct((p for p in draws if _is_held_out(p.prompt)), count)

    @staticmethod
    def score(answer: str, response: str) -> float:
        """The dataset's own score, in [0, 1], of what stands between the last <answer> tags."""
        from reasoning_gym import get_score_answer_fn
        from reasoning_gym.utils import extract_answer

        entry = json.loads(answer)
        return float(get_score_answer_fn(entry["reasoning_gym"])(extract_answer(response), entry))

    def _problems(self, stream: str, start: int) -> Iterator[Problem]:
        for index in count(start):
            entry = self._chunk(stream, index // _GYM_CHUNK)[index % _GYM_CHUNK]
            answer = json.dumps(entry | {"reasoning_gym": self._name})
            yield Problem(f"{entry['question']}\n\n{REASONING_GYM_INSTRUCTION}", answer)

    def _first(self, candidates: Iterator[Problem], held_out: bool) -> Problem:
        for problem in islice(candidates, _ATTEMPTS):
            if _is_held_out(problem.prompt) == held_out:
                return problem
        raise ValueError(
            f"reasoning_gym:{self._name} has too few distinct questions to hold any out: {_ATTEMPTS} draws all "
            "fell into the held-out split; take another dataset"
        )


class OwnTask:
    """A task of the user's own; what it raises, and what it gives that is none, is a ValueError with file and line."""

    def __init__(self, text: str, task: Any) -> None:
        self._text, self._task = text, task
        if missing := [name for name in ("train_problem", "eval_problems") if not callable(getattr(task, name, None))]:
            raise TypeError(f"{type(task).__name__} has no {' and no '.join(missing)}")

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split."""
        with own.blamed(self._text):
            return _checked(self._task.train_problem(index), "train_problem")

    def eval_problems(self, count: int) -> list[Problem]:
        """At most `count` held-out problems."""
        with own.blamed(self._text):
            return [_checked(problem, "eval_problems") for problem in islice(self._task.eval_problems(count), count)]

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the prompt, by the task's own encode_prompt or through the chat template."""
        if not hasattr(self._task, "encode_prompt"):
            return _encode_chat(problem.prompt, tokenizer)
        with own.blamed(self._text):
            return [int(token) for token in self._task.encode_prompt(problem, tokenizer)]


def _checked(problem: Any, method: str) -> Problem:
    if not isinstance(problem, Problem) or not isinstance(problem.answer, str):
        raise TypeError(f"{method} gave {str(problem)[:80]!r}; give data.tasks.Problem(prompt, answer), answer a str")
    return problem


class EnvironmentTask(_Drawn):
    """An environment of several turns; a problem is no more than the seed of its reset.

    Where the first observation shows what the seed drew (frozen_lake), no held-out one is met in training. Where it is
    hidden (guess_number, whose every game begins alike) the splits can only differ in their seeds.
    """

    def __init__(self, name: str, seed: int, make: Callable[[], Any]) -> None:
        """`make()` gives a new environment of that name."""
        super().__init__(seed)
        self._environment, self._name = make(), name
        self._seed_shows = getattr(self._environment, "seed_shows", False)
        self._conversation = functools.lru_cache(maxsize=1)(Conversation)

    def eval_problems(self, count: int) -> list[Problem]:
        """The first `count` held-out problems, the same for every seed; starts may come back, as in training."""
        rng = random.Random(_EVAL_SEED)
        return [self._draw(rng, held_out=True) for _ in range(count)]

    def first_observation(self, problem: Problem) -> str:
        """What the environment asks. Raises ValueError, in one line, for a user's own that does not."""
        if not own.is_own(self._name):
            return self._environment.reset(seed=problem.environment_seed)[0]
        with own.blamed(self._name):
            observation, _ = self._environment.reset(seed=problem.environment_seed)
        if not isinstance(observation, str):
            raise ValueError(
                f"--task {own.typed(self._name)}: reset gives {type(observation).__name__} to observe; give a str"
            )
        return observation

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Token ids of the first observation, through the chat template.

        Raises ValueError if the tokenizer has no chat template, or one that does not fit.
        """
        return self._conversation(tokenizer).first(self.first_observation(problem))

    def _draw(self, rng: random.Random, held_out: bool) -> Problem:
        while True:
            problem = Problem("", "", rng.getrandbits(31))
            mark = self.first_observation(problem) if self._seed_shows else str(problem.environment_seed)
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
    """The split of a problem, by a hash of its text."""
    return tables.hashed(text) < share


def _distinct(problems: Iterator[Problem], count: int) -> list[Problem]:
    """The first `count` problems with different prompts, or all there are."""
    found: dict[str, Problem] = {}
    for problem in problems:
        found.setdefault(tables.key_of(problem.prompt), problem)
        if len(found) == count:
            break
    return list(found.values())


def _shuffled(length: int, seed: str) -> list[int]:
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return order


def _encode_chat(prompt: str | list, tokenizer, system: str = "", **how) -> list[int]:
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ValueError("a prompt of chat messages needs a chat template; give texts, or a --model that has one")
        return tokenizer.encode(f"{system}\n\n{prompt}" if system else prompt)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [{"role": "system", "content": system}, *messages] if system else messages
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **how)


def _json_object(text: str) -> dict:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f'--task-args template takes a JSON object, as {{"enable_thinking": false}}, got {text!r}')
    return value


def _check_row(row: dict, prompt: str, source: str) -> None:
    """Raise ValueError for a row that cannot become a problem, or whose columns cannot reach a reward function."""
    if prompt not in row:
        raise ValueError(f"{source} has columns {sorted(row)}, none is {prompt!r}; name it: --task-args prompt=COLUMN")
    asked = row[prompt]
    messages = asked if isinstance(asked, list) and asked else [{"role": "user", "content": asked}]
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) and m["content"].strip() for m in messages):
        what = f"{str(asked)[:80]!r}, neither a text nor a list of chat messages with role and content"
        raise ValueError(f"{source} has as its {prompt} {what}; mend the row or leave it out")
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source} has what cannot be written as JSON: {error}; leave that column out") from None


def _gsm8k_row(row: dict, source: str) -> dict[str, str]:
    missing = {"question", "answer"} - row.keys()
    if missing:
        raise ValueError(f"{source} has columns {sorted(row)}, and lacks {sorted(missing)}")
    for name in ("question", "answer"):
        if not isinstance(row[name], str):
            raise ValueError(f"{source} has no text as its {name}: {str(row[name])[:80]}; mend the row or leave it out")
    _, marker, final = row["answer"].rpartition("####")
    if not marker or not final.strip():
        raise ValueError(f"{source} has an answer without a final number after ####: {row['answer'][-80:]!r}")
    return {"prompt": f"{row['question']}\n{GSM8K_INSTRUCTION}", "answer": final.strip().replace(",", "")}


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


class Sums(_Drawn):
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
    HELD_OUT = 1 / 4
    _system = "Answer briefly."

    def __init__(self, level: str, seed: int) -> None:
        if level not in self.LEVELS:
            raise ValueError(f"sums has no level {level!r}; levels are {', '.join(self.LEVELS)}")
        super().__init__(seed)
        self._question, self._values, self._answer = self.LEVELS[level]

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
