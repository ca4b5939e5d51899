"""The `tiny` model: a Qwen3 of 0.1 M parameters that adds, warmed up here in under a minute on one core.

It is a real checkpoint (transformers and vLLM load it) that leaves reinforcement learning something to do: it imitates
demonstrations with wrong digits mixed in, so that its most likely answer is nearly always right and a sampled one
seldom is. `python -m data.tiny` makes it and prints where it is.
"""

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from data import tiny_model
from data.tasks import ADDITION_LABELS, ADDITION_MAX_COLUMNS, ADDITION_MIN_COLUMNS, Addition, Problem, addition_problem
from data.tiny_model import EOS, MAX_POSITIONS, PAD, SEED, descend, fixed_threads, make_once, untrained_model

SPACE = "▁"  # a label carries the space before it, so that text and tokens map onto each other exactly
DIGITS = [str(digit) for digit in range(10)]
VOCABULARY = [PAD, EOS, f"{SPACE}=", *(SPACE + label for label in ADDITION_LABELS), *DIGITS]
VOCABULARY += [f"{column:02d}" for column in range(100)]

NUM_DEMONSTRATIONS = 28_000
EVEN_SHARE = 0.15
"""Share of demonstrations whose length is drawn evenly: by the task's own law alone, long ones are never learnt."""
NUM_STEPS = 1200
TOKENS_PER_STEP = 1024
WRONG_DIGIT_RATE = 0.3

NUM_EVAL_PROBLEMS = 256
SAMPLED_WINDOW = (0.15, 0.5)
"""Held-out exact-match accuracy at temperature 1 outside of which the model is of no use to RL."""
MIN_GREEDY = 0.9


@dataclass(frozen=True)
class Demonstrations:
    """Prompts with their right answers, sorted by length so that a slice needs little padding."""

    tokens: torch.Tensor
    """[N, T] int64, prompt, response, end of text, padding."""
    prompt_lengths: torch.Tensor
    """[N] int64."""
    lengths: torch.Tensor
    """[N] int64, prompt and response, end of text included."""
    batches: list[slice]
    """Rows of each batch of at most TOKENS_PER_STEP tokens."""


def tiny_model_path(cache_dir: Path = Path(".cache"), report: Callable[[str], None] = print) -> Path:
    """Directory of the tiny model, made on first use and named after all that went into it.

    Raises RuntimeError if a new model misses the accuracy window.
    """
    path = Path(cache_dir).absolute() / f"tiny-{_fingerprint()}"
    make_once(path, lambda directory: _make(directory, report))
    return path


def build_tokenizer():
    """The word-level tokenizer: one token per label, per column (a pair of digits) and per answer digit."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=False),
            pre_tokenizers.Split(Regex(f"{SPACE}[a-z=]|[0-9]{{1,2}}"), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=MAX_POSITIONS
    )


def sampled_accuracy(model, problems: list[Problem], greedy: bool = False, seed: int = 0) -> float:
    """Share of problems whose sampled response (temperature 1; or the greedy one) is exactly right."""
    tokenizer = build_tokenizer()
    generator = torch.Generator().manual_seed(seed)
    pairs = sorted((_encode(problem, tokenizer) for problem in problems), key=lambda pair: len(pair[0]))
    num_right = 0
    for _, group in itertools.groupby(pairs, key=lambda pair: len(pair[0])):
        prompts, answers = zip(*group, strict=True)
        responses = _respond(model, torch.tensor(prompts), max(map(len, answers)), greedy, generator)
        num_right += sum(response[: len(a)] == a for response, a in zip(responses, answers, strict=True))
    return num_right / len(problems)


def _make(directory: Path, report: Callable[[str], None]) -> None:
    """Warm the model up, measure it and write it. Leaves torch's global state as it was."""
    started = time.monotonic()
    with fixed_threads():
        model = untrained_model(VOCABULARY)
        report(f"tiny model: warming up {model.num_parameters():,} parameters, {NUM_STEPS} steps")
        warm_up(model, make_demonstrations(), report)
        problems = Addition(SEED).eval_problems(NUM_EVAL_PROBLEMS)
        sampled, greedy = sampled_accuracy(model, problems), sampled_accuracy(model, problems, greedy=True)
    report(
        f"tiny model: {time.monotonic() - started:.0f} s; held-out accuracy sampled {sampled:.3f}, greedy {greedy:.3f} "
        f"({NUM_EVAL_PROBLEMS} problems)"
    )
    check_accuracy(sampled, greedy)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    (directory / "warm_up.json").write_text(json.dumps({"sampled_accuracy": sampled, "greedy_accuracy": greedy}))


def check_accuracy(sampled: float, greedy: float) -> None:
    low, high = SAMPLED_WINDOW
    if not (low <= sampled <= high and greedy >= MIN_GREEDY):
        raise RuntimeError(
            f"the tiny model came out with held-out accuracy {sampled:.3f} sampled and {greedy:.3f} greedy; wanted "
            f"{low} to {high} sampled and at least {MIN_GREEDY} greedy. Change WRONG_DIGIT_RATE or NUM_STEPS in "
            "data/tiny.py"
        )


def _encode(problem: Problem, tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of prompt and answer, end of text included."""
    return tokenizer.encode(problem.prompt), [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]


def make_demonstrations(num_problems: int = NUM_DEMONSTRATIONS) -> Demonstrations:
    """Problems of the training split with their answers; deterministic."""
    tokenizer = build_tokenizer()
    pairs = [_encode(problem, tokenizer) for problem in _training_problems(num_problems)]
    pairs.sort(key=lambda pair: (len(pair[0]), len(pair[1])))
    prompt_lengths = torch.tensor([len(prompt) for prompt, _ in pairs])
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in pairs])
    tokens = torch.full((len(pairs), int(lengths.max())), tokenizer.pad_token_id)
    for row, (prompt, answer) in zip(tokens, pairs, strict=True):
        row[: len(prompt) + len(answer)] = torch.tensor(prompt + answer)
    return Demonstrations(tokens, prompt_lengths, lengths, _batches(lengths.tolist()))


def _training_problems(num_problems: int) -> list[Problem]:
    task, rng = Addition(SEED), random.Random(SEED)
    num_even = int(num_problems * EVEN_SHARE)
    lengths = [rng.randint(ADDITION_MIN_COLUMNS, ADDITION_MAX_COLUMNS) for _ in range(num_even)]
    even = [addition_problem(rng, length, held_out=False) for length in lengths]
    return even + [task.train_problem(index) for index in range(num_problems - num_even)]


def _batches(lengths: list[int]) -> list[slice]:
    """Slices of ascending lengths whose padded size is at most TOKENS_PER_STEP."""
    batches, start = [], 0
    for row, length in enumerate(lengths):
        if (row + 1 - start) * length > TOKENS_PER_STEP:
            batches.append(slice(start, row))
            start = row
    return [*batches, slice(start, len(lengths))]


def warm_up(model, demonstrations: Demonstrations, report: Callable[[str], None], num_steps: int = NUM_STEPS) -> None:
    """A fixed number of supervised steps."""
    losses = (_loss(model, demonstrations, rows) for rows in _epochs(demonstrations.batches))
    descend(model, losses, num_steps, report)


def _epochs(batches: list[slice]) -> Iterator[slice]:
    """The batches without end, in a new order each epoch."""
    order = random.Random(SEED)
    while True:
        yield from order.sample(batches, len(batches))


def _loss(model, demonstrations: Demonstrations, rows: slice) -> torch.Tensor:
    """Mean cross-entropy of the response tokens of these rows, nats, with wrong digits mixed into what is imitated."""
    lengths = demonstrations.lengths[rows, None]
    tokens = demonstrations.tokens[rows, : int(lengths.max())]
    position = torch.arange(1, tokens.shape[1])
    in_response = (position >= demonstrations.prompt_lengths[rows, None]) & (position < lengths)
    # Padding stands on the right, so causal attention never sees it.
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[in_response]
    return torch.nn.functional.cross_entropy(logits, _imitated(tokens[:, 1:][in_response]))


def _imitated(tokens: torch.Tensor) -> torch.Tensor:
    """[N, vocabulary] distributions to imitate, of tokens [N] int64: a digit is wrong at WRONG_DIGIT_RATE.

    The expectation over wrong digits takes the place of drawing them: the same optimum, reached with less noise.
    """
    zero = VOCABULARY.index("0")
    digits = torch.arange(zero, zero + 10)
    targets = torch.nn.functional.one_hot(tokens, len(VOCABULARY)).float()
    is_digit = torch.isin(tokens, digits)[:, None]
    wrong = torch.zeros(len(VOCABULARY)).index_fill(0, digits, 1.0) - targets
    return torch.where(is_digit, (1 - WRONG_DIGIT_RATE) * targets + WRONG_DIGIT_RATE / 9 * wrong, targets)


def _respond(model, prompts, max_tokens: int, greedy: bool, generator) -> list[list[int]]:
    """Responses of `max_tokens` tokens to prompts [B, P] int64; what follows the end of text means nothing."""
    inputs, cache, responses = prompts, None, []
    with torch.no_grad():
        for _ in range(max_tokens):
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            cache, logits = output.past_key_values, output.logits[:, -1]
            sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            inputs = logits.argmax(-1, keepdim=True) if greedy else sampled
            responses.append(inputs)
    return torch.cat(responses, dim=1).tolist()


def _fingerprint() -> str:
    """Hash of the code, the problems it learns from and is measured on, and the libraries that compute with them."""
    task = Addition(SEED)
    parts = [Path(__file__).read_text(), Path(tiny_model.__file__).read_text()]
    parts += [repr(problem) for problem in _training_problems(512)]
    parts += [repr(problem) for problem in task.eval_problems(NUM_EVAL_PROBLEMS)]
    parts += [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(tiny_model_path())
