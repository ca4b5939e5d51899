"""A problem, and what tasks share: how a prompt becomes tokens, and which problems are held out.

A task has `train_problem(index)`, `eval_problems(count)`, `encode_prompt(problem, tokenizer)` and a static
`score(answer, response)`. Its problems depend only on the task, the seed and the index, so a resumed run meets the same
prompts.
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

HELD_OUT_SEED = "held-out"
"""Seed of held-out problems. It is not the run's: every run is evaluated on the same problems."""
HELD_OUT_SHARE = 1 / 8
ATTEMPTS = 64
"""Draws for each problem that is asked for, after which a task counts as having no more."""
CONTINUE = "continue_final_message"
"""Option of transformers: the policy continues a last message of the assistant."""
OPTIONS_OF_ALL_TEMPLATES = (
    CONTINUE,
    "add_generation_prompt",
    "chat_template",
    "tools",
    "documents",
)


@dataclass(frozen=True)
class Problem:
    """One prompt, and the answer that its response is compared with."""

    prompt: str | list[dict]
    """The question, before any chat template: a text, or chat messages."""
    answer: str
    """In the task's own form, read by its score: JSON for reasoning_gym and jsonl."""
    environment_seed: int | None = None
    """Seed of the environment that asks; None for single-turn tasks. With a seed, prompt and answer are empty."""
    place: str = field(default="", compare=False)
    """Source of the problem, a file and the number of a row; errors begin with it."""


Candidate = tuple[str, Problem]
"""A text and a problem. The hash of the text decides the split of the problem."""


class Task:
    """A task whose prompts go through the chat template, if the tokenizer has one."""

    system = ""
    """System message before each prompt."""
    template: ClassVar[dict] = {}
    """Options of the chat template."""
    rows: Sequence[Problem] = ()
    """All problems, if they are rows of a table."""
    summary = ""
    """Numbers of rows trained on and held out, for people."""

    def train_problem(self, index: int) -> Problem:
        """Problem number `index` ≥ 0 of the training split."""
        raise NotImplementedError

    def eval_problems(self, count: int) -> list[Problem]:
        """Return up to `count` distinct held-out problems, the same for every seed."""
        raise NotImplementedError

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Return the token ids of the prompt.

        Raises ValueError for chat messages without a chat template, and for messages or options that the template
        leaves out. It also refuses a last message of the assistant that is not to be continued.
        """
        prompt = problem.prompt
        if tokenizer.chat_template is None:
            if not isinstance(prompt, str):
                raise ValueError(
                    "prompts of chat messages need a chat template; give texts, or a --model that has one"
                )
            return encode_text(f"{self.system}\n\n{prompt}" if self.system else prompt, tokenizer)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.system:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.template:
            check_options(self.template, tokenizer)
        last = messages[-1]
        is_continued = last["role"] == "assistant"
        if is_continued and not self.template.get(CONTINUE):
            raise ValueError(
                f"the last message is the assistant's, {str(last.get('content'))[-40:]!r}; leave out an answer; a "
                f"beginning is continued with --task-args 'template={{\"{CONTINUE}\": true}}'"
            )
        options = {"add_generation_prompt": True, **self.template, CONTINUE: is_continued}
        if self.template.get(CONTINUE):
            options["add_generation_prompt"] = not is_continued
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        check_written(messages, text, is_continued)
        return tokenizer.encode(text, add_special_tokens=False)


def check_options(options: dict, tokenizer) -> None:
    """Raise ValueError for an option that neither the chat template nor transformers has."""
    template = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    known = {*re.findall(r"\w+", template), *OPTIONS_OF_ALL_TEMPLATES}
    for name in options.keys() - known:
        raise ValueError(
            f"--task-args template: the model's chat template has no {name}; correct it, or leave it out"
        )


def check_written(messages: list[dict], text: str, is_continued: bool) -> None:
    """Raise ValueError if a chat template left a message out of a text, or changed its end.

    Templates often shorten earlier messages of the assistant, so these are not checked.
    """
    for message in messages:
        content = message.get("content")
        is_asked = isinstance(content, str) and message["role"] not in ("assistant", "tool")
        if is_asked and content.strip() not in text:
            raise ValueError(
                f"the model's chat template leaves out or changes the message of role {message['role']}, "
                f"{content[:40]!r}; give another role, or another --model"
            )
    if is_continued and not text.endswith(messages[-1]["content"]):
        raise ValueError(
            f"the model's chat template changes the end of the last message, {messages[-1]['content'][-40:]!r}; leave "
            "out spaces there, or the message"
        )


def encode_text(text: str, tokenizer) -> list[int]:
    """Return the token ids of a text, with the tokenizer's tokens before it, and without its tokens behind it."""
    encoded = tokenizer(text, return_special_tokens_mask=True)
    tokens, is_added = encoded["input_ids"], encoded["special_tokens_mask"]
    while tokens and is_added[len(tokens) - 1]:
        tokens.pop()
    return tokens


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
    """Yield the problems of the candidates that are held out, or of the other candidates."""
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


def check_unicode(problem: Problem) -> None:
    """Raise ValueError if prompt or answer has half of a character. No file can have one."""
    prompt = problem.prompt
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False)
    try:
        f"{prompt}{problem.answer}".encode()
    except UnicodeEncodeError as error:
        text = ascii(error.object[max(0, error.start - 30) : error.end])
        raise ValueError(
            f"{text} ends with half of a character, which is no Unicode; fix the row or leave it out"
        ) from None


def split_hash(prompt: str | list) -> float:
    """A number in [0, 1) that depends on the prompt only. (Python's own hash differs between processes.)"""
    digest = hashlib.blake2b(prompt_key(prompt).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
