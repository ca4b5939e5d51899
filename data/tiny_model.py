"""What the tiny models have in common: the network, its supervised warm-up, what it is measured by, and their cache.

Each is a Qwen3 of 0.1 M parameters, a real checkpoint that transformers and vLLM load, warmed up in under a minute on
one core. It imitates a scripted player that is now and then wrong, so that its most likely answer is nearly always
right and a sampled one seldom is: that is left to reinforcement learning. data/tiny.py has the one that adds, and
data/tiny_agent.py those that act in environments.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from data.tasks import Problem, Task

PAD, EOS = "<pad>", "<eos>"
MAX_POSITIONS = 512
MATRIX_LR = 0.03
"""Learning rate of Muon, which needs half of AdamW's steps here."""
OTHER_LR = 5e-3
"""Learning rate of AdamW, for embeddings and norms."""
LR_WARMUP_STEPS = 50
SEED = 0
NUM_THREADS = 1
"""Fixed, as the order of float sums depends on it; a second one gains a third, and loses it all to busy neighbours."""
TOKENS_PER_STEP = 1024
NUM_EVAL_PROBLEMS = 256
NOT_IMITATED = -1
_REPORT_EVERY_S = 10.0

Distribution = tuple[tuple[int, float], ...]
"""Token ids and their probabilities; all others have none."""


class Game:
    """A problem, and what is said in turn from the prompt on: by a scripted player, or by the model."""

    tokens: list[int]
    """All so far, the prompt first."""
    reward = 0.0
    is_over = False

    def answer(self, response: list[int]) -> None:
        """Append the tokens of a turn and what follows on them; they lack an end of text where the turn was cut."""
        raise NotImplementedError


@dataclass(frozen=True)
class Demonstrations:
    """Games of the scripted player up to his last token, sorted by length so that a slice needs little padding."""

    tokens: torch.Tensor
    """[N, T] int64, padded on the right."""
    imitated: torch.Tensor
    """[N, T] int64: which of the distributions the player drew the token from; NOT_IMITATED where he did not write."""
    distributions: torch.Tensor
    """[D, vocabulary] float32. Imitating them and not what was drawn is the same optimum, reached with less noise."""
    lengths: list[int]
    """Tokens of each game."""

    @property
    def batches(self) -> list[slice]:
        """Rows of each batch of at most TOKENS_PER_STEP tokens, padding included."""
        batches, start = [], 0
        for row, length in enumerate(self.lengths):
            if (row + 1 - start) * length > TOKENS_PER_STEP:
                batches.append(slice(start, row))
                start = row
        return [*batches, slice(start, len(self.lengths))]

    def loss(self, model, rows: slice) -> torch.Tensor:
        """Mean cross-entropy of the player's tokens in these rows, nats."""
        width = self.lengths[rows.stop - 1]
        imitated = self.imitated[rows, 1:width]
        own = imitated != NOT_IMITATED
        # Padding stands on the right, so causal attention never sees it.
        logits = model(input_ids=self.tokens[rows, : width - 1], use_cache=False).logits[own]
        return torch.nn.functional.cross_entropy(logits, self.distributions[imitated[own]])


class TinyModel:
    """A tiny model by what it learns from and is measured on; whatever changes that gives it another directory."""

    name: str
    """Of its directory, before the fingerprint."""
    task: Task
    build_tokenizer: Callable
    """Makes a tokenizer of the words that it knows."""
    num_demonstrations: int
    num_steps: int
    max_turn_tokens: int
    """Where a turn is cut when the model is measured."""
    sampled_window: tuple[float, float]
    """Held-out share of games won at temperature 1 outside of which the model is of no use to RL."""
    min_greedy: float
    """The least when it takes its most likely tokens."""
    sources: tuple[str, ...] = ()
    """Files beside its own and this one of which it depends."""

    def begin(self, problem: Problem) -> Game:
        """A game on a problem."""
        raise NotImplementedError

    def play(self, game: Game, rng: random.Random) -> tuple[list[int], list[Distribution]]:
        """The scripted player's next turn in a game: its tokens, and what the model is to imitate for each."""
        raise NotImplementedError

    def training_problems(self, count: int) -> list[Problem]:
        """Problems of the training split to demonstrate; deterministic."""
        return [self.task.train_problem(index) for index in range(count)]

    @functools.cached_property
    def tokenizer(self):
        """The tokenizer, made once."""
        return self.build_tokenizer()

    def path(self, cache_dir: Path = Path(".cache")) -> Path:
        """Directory of the model, made on first use and named after all that went into it.

        Raises RuntimeError if a new model is of no use to RL.
        """
        path = Path(cache_dir).absolute() / f"{self.name}-{self._fingerprint()}"
        make_once(path, self._make)
        return path

    def demonstrate(self, count: int) -> Demonstrations:
        """Games of the scripted player; deterministic."""
        rng, games, known = random.Random(SEED), [], {}
        for problem in self.training_problems(count):
            game, imitated = self.begin(problem), []
            while not game.is_over:
                imitated += [NOT_IMITATED] * (len(game.tokens) - len(imitated))
                response, drawn_from = self.play(game, rng)
                imitated += [known.setdefault(distribution, len(known)) for distribution in drawn_from]
                game.answer(response)
            games.append((torch.tensor(game.tokens[: len(imitated)]), torch.tensor(imitated)))
        games.sort(key=lambda game: len(game[0]))
        tokens, imitated = zip(*games, strict=True)
        distributions = torch.zeros(len(known), len(self.tokenizer))
        for row, distribution in zip(distributions, known, strict=True):
            ids, probs = zip(*distribution, strict=True)
            row[list(ids)] = torch.tensor(probs)
        return Demonstrations(
            pad_sequence(tokens, batch_first=True, padding_value=self.tokenizer.pad_token_id),
            pad_sequence(imitated, batch_first=True, padding_value=NOT_IMITATED),
            distributions,
            [len(game) for game in tokens],
        )

    def success_rate(self, model, problems: list[Problem], greedy: bool = False, seed: int = 0) -> float:
        """Share of games that the model wins when it samples (temperature 1; or takes its most likely tokens)."""
        games = [self.begin(problem) for problem in problems]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            while running := [game for game in games if not game.is_over]:
                responses = self._respond(model, [game.tokens for game in running], greedy)
                for game, response in zip(running, responses, strict=True):
                    game.answer(response)
        return sum(game.reward for game in games) / len(games)

    def _respond(self, model, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
        """The model's next turn after each prompt, to its end of text or until it is cut."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        inputs = pad_sequence([torch.tensor(p) for p in prompts], True, pad, padding_side="left")
        how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        seen = (inputs != pad).long()
        written = model.generate(inputs, attention_mask=seen, max_new_tokens=self.max_turn_tokens, **how)
        written = written[:, inputs.shape[1] :]
        return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in written.tolist()]

    def _make(self, directory: Path) -> None:
        """Warm the model up, measure it and write it. Leaves torch's global state as it was."""
        started = time.monotonic()
        with fixed_threads():
            model = untrained_model(self.tokenizer)
            print(f"{self.name}: warming up {model.num_parameters():,} parameters, {self.num_steps} steps")
            warm_up(model, self.demonstrate(self.num_demonstrations), self.num_steps)
            problems = self.task.eval_problems(NUM_EVAL_PROBLEMS)
            sampled, greedy = (self.success_rate(model, problems, greedy=is_greedy) for is_greedy in (False, True))
        print(
            f"{self.name}: {time.monotonic() - started:.0f} s; held-out accuracy sampled {sampled:.3f}, greedy "
            f"{greedy:.3f} ({NUM_EVAL_PROBLEMS} problems)"
        )
        self.check(sampled, greedy)
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        (directory / "warm_up.json").write_text(json.dumps({"sampled_accuracy": sampled, "greedy_accuracy": greedy}))

    def check(self, sampled: float, greedy: float) -> None:
        """Raise RuntimeError if a model that wins these shares of its games is of no use to RL."""
        low, high = self.sampled_window
        if not (low <= sampled <= high and greedy >= self.min_greedy):
            raise RuntimeError(
                f"the model {self.name} came out with held-out accuracy {sampled:.3f} sampled and {greedy:.3f} greedy; "
                f"wanted {low} to {high} sampled and at least {self.min_greedy} greedy. Change num_steps, or how often "
                f"its player is wrong, in {inspect.getfile(type(self))}"
            )

    def _fingerprint(self) -> str:
        """Hash of the code, the problems it learns from and is measured on, and the libraries that compute with it."""
        parts = [Path(file).read_text() for file in (__file__, inspect.getfile(type(self)), *self.sources)]
        parts += map(repr, self.training_problems(512) + self.task.eval_problems(NUM_EVAL_PROBLEMS))
        parts += [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers", "gymnasium", "numpy")]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Fill the directory `path` unless it exists; it appears whole, and of several processes one makes it."""
    from filelock import FileLock

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.parent / "tiny.lock"):
        if not path.exists():
            making = path.parent / "tiny-making"
            shutil.rmtree(making, ignore_errors=True)  # of a process that was killed half-way
            making.mkdir()
            make(making)
            making.rename(path)


def word_tokenizer(vocabulary: list[str], pre_tokenizer, decoder, **options):
    """A tokenizer with a token per word of the vocabulary, which `pre_tokenizer` splits a text into."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    ends = {"eos_token": EOS, "pad_token": PAD, "model_max_length": MAX_POSITIONS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends, **options)


def untrained_model(tokenizer):
    """A Qwen3 of 0.1 M parameters, the same each time; torch's own random state stays as it was."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # vLLM's CPU attention takes head sizes 32, 64, 80, 96, 128 and a few larger ones.
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.08,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return Qwen3ForCausalLM(config)


def warm_up(model, demonstrations: Demonstrations, num_steps: int) -> None:
    """A fixed number of supervised steps, through all batches in a new order each epoch."""
    optimizers, order, batches = _optimizers(model), random.Random(SEED), []
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _lr_factor(step, num_steps)) for o in optimizers]
    reported = time.monotonic()
    for step in range(num_steps):
        batches = batches or order.sample(demonstrations.batches, len(demonstrations.batches))
        loss = demonstrations.loss(model, batches.pop(0))
        model.zero_grad()
        loss.backward()
        for stepper in (*optimizers, *schedules):
            stepper.step()
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"tiny model: step {step + 1}/{num_steps}, loss {loss.item():.3f} nats")


def _optimizers(model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for everything else."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr_factor(step: int, num_steps: int) -> float:
    return min(1.0, (step + 1) / LR_WARMUP_STEPS) * max(0.02, 1 - step / num_steps)


@contextlib.contextmanager
def fixed_threads() -> Iterator[None]:
    """NUM_THREADS threads of torch in here, as many as before afterwards."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
