"""Make the tiny models of data/tiny: `python scripts/make_tiny.py [NAME …]`; with --check only compare with them.

Each is a Qwen3 of 0.1 M parameters, a real checkpoint that transformers and vLLM load. A supervised warm-up of a minute
on one core teaches it to imitate a scripted player who is sometimes wrong. So its most likely answer is nearly always
right and a sampled one seldom is: reinforcement learning has something to do. The same code, libraries and kind of CPU
make the same weights to the bit.
"""

import argparse
import functools
import itertools
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from asyncrl.tasks import load_task
from data.addition import LABELS, MAX_COLUMNS, MIN_COLUMNS, addition_problems
from data.conversation import Conversation
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber
from data.problem import Problem, of_split

TINY_MODELS = Path(__file__).resolve().parents[1] / "data" / "tiny"
SEED = 0
PAD, EOS, ASSISTANT = "<pad>", "<eos>", "<assistant>"
MAX_POSITIONS = 512
MATRIX_LR = 0.03
"""Learning rate of Muon, which needs half of AdamW's steps here."""
OTHER_LR = 5e-3
"""Learning rate of AdamW, for embeddings and norms."""
LR_WARMUP_STEPS = 50
TOKENS_PER_STEP = 1024
NUM_EVAL_PROBLEMS = 256
NOT_IMITATED = -1
REPORT_EVERY_S = 10.0

Distribution = tuple[tuple[int, float], ...]
"""Token ids and their probabilities; all other tokens have none."""


class Game:
    """A problem, and what is said in turn from the prompt on: by the scripted player, or by the model."""

    tokens: list[int]
    """All tokens so far, the prompt first."""
    reward = 0.0
    is_over = False

    def answer(self, response: list[int]) -> None:
        """Append the tokens of a turn and what follows on them. A turn that was cut has no end of text."""
        raise NotImplementedError


class Recipe:
    """What a tiny model learns from, and how well it must do."""

    num_demonstrations: int
    num_steps: int
    max_turn_tokens: int
    """Where a turn is cut when the model is measured."""
    sampled_window: tuple[float, float]
    """Share of held-out games that the model must win at temperature 1, to be of use to RL."""
    min_greedy: float
    """Least share when the model takes its most likely tokens."""

    def __init__(self, name: str, tokenizer) -> None:
        self.name = name
        self.task = load_task(name, SEED)
        self.tokenizer = tokenizer

    def begin(self, problem: Problem) -> Game:
        """A game on a problem."""
        raise NotImplementedError

    def play(self, game: Game, rng: random.Random) -> tuple[list[int], list[Distribution]]:
        """The scripted player's next turn: its tokens, and what the model is to imitate for each token."""
        raise NotImplementedError

    def training_problems(self, count: int) -> list[Problem]:
        """Problems of the training split to demonstrate; deterministic."""
        return [self.task.train_problem(index) for index in range(count)]

    def check(self, sampled: float, greedy: float) -> None:
        """Raise RuntimeError if a model that wins these shares of its games is of no use to RL."""
        low, high = self.sampled_window
        if not (low <= sampled <= high and greedy >= self.min_greedy):
            raise RuntimeError(
                f"the tiny model {self.name} has held-out accuracy {sampled:.3f} sampled and {greedy:.3f} greedy; "
                f"wanted {low} to {high} sampled and at least {self.min_greedy} greedy. Change num_steps, or how often "
                "its player is wrong"
            )


# The model that adds

# a label carries the space before it, so that text and tokens map onto each other exactly
SPACE = "▁"
DIGITS = [str(digit) for digit in range(10)]
EVEN_SHARE = 0.15
"""Share of demonstrations whose length is drawn evenly. By the task's own law alone, long ones are never learnt."""
WRONG_DIGIT_RATE = 0.3


def addition_tokenizer():
    """The tokenizer of addition: one token per label, per column (a pair of digits) and per answer digit."""
    from tokenizers import Regex, decoders, pre_tokenizers

    vocabulary = [PAD, EOS, f"{SPACE}=", *(SPACE + label for label in LABELS), *DIGITS]
    vocabulary += [f"{column:02d}" for column in range(100)]
    spaces = {"replacement": SPACE, "prepend_scheme": "always", "split": False}
    words = pre_tokenizers.Split(Regex(f"{SPACE}[a-z=]|[0-9]{{1,2}}"), behavior="isolated")
    pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(**spaces), words])
    return word_tokenizer(vocabulary, pre_tokenizer, decoders.Metaspace(**spaces))


class Sum(Game):
    """A problem of addition, won by exactly the right answer."""

    def __init__(self, problem: Problem, tokenizer) -> None:
        self.tokens = tokenizer.encode(problem.prompt)
        self.right = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]

    def answer(self, response: list[int]) -> None:
        self.tokens += response
        self.reward = float(response == self.right)
        self.is_over = True


class Adder(Recipe):
    """Imitates right answers in which a digit is wrong at WRONG_DIGIT_RATE, any other one as likely as the next."""

    num_demonstrations = 28_000
    num_steps = 1200
    max_turn_tokens = 2 * (MAX_COLUMNS + 1) + 1
    sampled_window = (0.15, 0.5)
    min_greedy = 0.9

    def __init__(self, name: str = "addition") -> None:
        super().__init__(name, addition_tokenizer())
        digits = self.tokenizer.convert_tokens_to_ids(DIGITS)
        wrong = WRONG_DIGIT_RATE / 9
        self._odds = {
            right: tuple(
                (digit, 1 - WRONG_DIGIT_RATE if digit == right else wrong) for digit in digits
            )
            for right in digits
        }

    def begin(self, problem: Problem) -> Sum:
        return Sum(problem, self.tokenizer)

    def play(self, game: Sum, rng: random.Random) -> tuple[list[int], list[Distribution]]:
        return game.right, [self._odds.get(token, ((token, 1.0),)) for token in game.right]

    def training_problems(self, count: int) -> list[Problem]:
        rng = random.Random(SEED)
        num_even = int(count * EVEN_SHARE)
        lengths = [rng.randint(MIN_COLUMNS, MAX_COLUMNS) for _ in range(num_even)]
        even = [
            next(of_split(addition_problems(rng, length), held_out=False)) for length in lengths
        ]
        return even + super().training_problems(count - num_even)


# The models that act in environments

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<assistant>{{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Nothing stands before the user's message, as it is always the first or follows an end of turn."""
ANY_ACTION_RATE = {"frozen_lake": 0.4, "guess_number": 0.5}
"""Share of turns in which the scripted player takes any action, each as likely as the next."""


def environment_tokenizer():
    """The tokenizer of all environments: a token per action, per row of a map, and per phrase."""
    from tokenizers import Regex, decoders, pre_tokenizers

    rows = [
        "".join(cells)
        for cells in itertools.product("_OP", repeat=FrozenLake.SIZE)
        if cells.count("P") <= 1
    ]
    last_rows = [row[:-1] + "G" for row in rows if row.endswith("_")]
    lake = [
        f"{FrozenLake.INSTRUCTION}\n",
        f"{FrozenLake.NO_ACTION}\n",
        FrozenLake.FELL,
        FrozenLake.ARRIVED,
    ]
    lake += [*(f"{row}\n" for row in rows), *last_rows, *FrozenLake.ACTIONS]
    number = [
        GuessNumber.INSTRUCTION,
        GuessNumber.NO_ACTION,
        GuessNumber.FOUND,
        GuessNumber.HIGHER,
        GuessNumber.LOWER,
    ]
    vocabulary = [PAD, EOS, ASSISTANT, *lake, *number, *GuessNumber.ACTIONS]
    longest_first = sorted(vocabulary, key=len, reverse=True)
    words = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    options = {"extra_special_tokens": [ASSISTANT], "chat_template": CHAT_TEMPLATE}
    return word_tokenizer(vocabulary, words, decoders.Fuse(), **options)


class Episode(Game):
    """An episode of an environment; a turn that is cut is played as it is."""

    def __init__(
        self, environment, problem: Problem, tokenizer, conversation: Conversation
    ) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        self._conversation = conversation
        self.actions: list[str] = []
        self.observations = [environment.reset(seed=problem.environment_seed)[0]]
        self.tokens = conversation.first(self.observations[0])

    def answer(self, response: list[int]) -> None:
        self.actions.append(self._tokenizer.decode(response, skip_special_tokens=True))
        observation, self.reward, terminated, truncated, _ = self._environment.step(
            self.actions[-1]
        )
        self.observations.append(observation)
        self.is_over = terminated or truncated
        ended = response[-1] == self._conversation.end_of_turn
        self.tokens += response + self._conversation.reply(observation, ended)


class Actor(Recipe):
    """Imitates the distributions that the scripted player's actions are drawn from, not what was drawn."""

    num_demonstrations = 1500
    num_steps = 300
    max_turn_tokens = 4
    """A good turn has an action and the end of turn."""
    sampled_window = (0.2, 0.5)
    min_greedy = 0.85

    def __init__(self, name: str) -> None:
        super().__init__(name, environment_tokenizer())
        self.conversation = Conversation(self.tokenizer)

    def begin(self, problem: Problem) -> Episode:
        return Episode(ENVIRONMENTS[self.name](), problem, self.tokenizer, self.conversation)

    def play(self, game: Episode, rng: random.Random) -> tuple[list[int], list[Distribution]]:
        chances = player_distribution(self.name, game.actions, game.observations)
        ids = self.tokenizer.convert_tokens_to_ids(list(chances))
        odds = list(chances.values())
        end = self.tokenizer.eos_token_id
        return [*rng.choices(ids, odds), end], [tuple(zip(ids, odds, strict=True)), ((end, 1.0),)]


def best_moves(observation: str) -> list[str]:
    """The moves of frozen_lake that lie on a shortest way to the goal."""
    rows = observation.splitlines()[-FrozenLake.SIZE :]
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    cells = {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    start, goal = (next(place for place, cell in cells.items() if cell == mark) for mark in "PG")
    distance = {goal: 0}
    queue = [goal]
    for place in queue:
        for i, j in steps.values():
            near = place[0] + i, place[1] + j
            if cells.get(near, "O") != "O" and near not in distance:
                distance[near] = distance[place] + 1
                queue.append(near)
    after = {
        move: distance.get((start[0] + i, start[1] + j), len(cells))
        for move, (i, j) in steps.items()
    }
    return [move for move, left in after.items() if left == min(after.values())]


def best_guess(guesses: list[str], answers: list[str]) -> str:
    """The middle of what the answers to former guesses leave open."""
    low = [
        int(guess) + 1
        for guess, answer in zip(guesses, answers, strict=True)
        if answer == GuessNumber.HIGHER
    ]
    high = [
        int(guess) - 1
        for guess, answer in zip(guesses, answers, strict=True)
        if answer == GuessNumber.LOWER
    ]
    return str((max(low, default=1) + min(high, default=GuessNumber.HIGHEST)) // 2)


def player_distribution(name: str, actions: list[str], observations: list[str]) -> dict[str, float]:
    """Probability of each action of the scripted player, after these actions and one more observation than that."""
    every = ENVIRONMENTS[name].ACTIONS
    rate = ANY_ACTION_RATE[name]
    best = (
        best_moves(observations[-1])
        if name == "frozen_lake"
        else [best_guess(actions, observations[1:])]
    )
    return {
        action: rate / len(every) + (1 - rate) / len(best) * (action in best) for action in every
    }


RECIPES: dict[str, Callable[[], Recipe]] = {
    "addition": Adder,
    **{name: functools.partial(Actor, name) for name in ENVIRONMENTS},
}


# What all have in common: tokenizer, network, warm-up, measure


def word_tokenizer(vocabulary: list[str], pre_tokenizer, decoder, **options):
    """A tokenizer with a token per word of the vocabulary, which `pre_tokenizer` splits a text into."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
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
        batches = []
        start = 0
        for row, length in enumerate(self.lengths):
            if (row + 1 - start) * length > TOKENS_PER_STEP:
                batches.append(slice(start, row))
                start = row
        return [*batches, slice(start, len(self.lengths))]

    def loss(self, model, rows: slice) -> torch.Tensor:
        """Mean cross-entropy of the player's tokens in these rows, nats."""
        width = self.lengths[rows.stop - 1]
        imitated = self.imitated[rows, 1:width]
        is_player = imitated != NOT_IMITATED
        # Padding stands on the right, so causal attention never sees it.
        logits = model(input_ids=self.tokens[rows, : width - 1], use_cache=False).logits[is_player]
        return torch.nn.functional.cross_entropy(logits, self.distributions[imitated[is_player]])


def demonstrate(recipe: Recipe, count: int) -> Demonstrations:
    """Games of the scripted player; deterministic."""
    rng = random.Random(SEED)
    games = []
    known: dict[Distribution, int] = {}
    for problem in recipe.training_problems(count):
        game = recipe.begin(problem)
        imitated: list[int] = []
        while not game.is_over:
            imitated += [NOT_IMITATED] * (len(game.tokens) - len(imitated))
            response, drawn_from = recipe.play(game, rng)
            imitated += [known.setdefault(distribution, len(known)) for distribution in drawn_from]
            game.answer(response)
        games.append((torch.tensor(game.tokens[: len(imitated)]), torch.tensor(imitated)))
    games.sort(key=lambda game: len(game[0]))
    tokens, imitated = zip(*games, strict=True)
    distributions = torch.zeros(len(known), len(recipe.tokenizer))
    for row, distribution in zip(distributions, known, strict=True):
        ids, probs = zip(*distribution, strict=True)
        row[list(ids)] = torch.tensor(probs)
    return Demonstrations(
        pad_sequence(tokens, batch_first=True, padding_value=recipe.tokenizer.pad_token_id),
        pad_sequence(imitated, batch_first=True, padding_value=NOT_IMITATED),
        distributions,
        [len(game) for game in tokens],
    )


def warm_up(model, demonstrations: Demonstrations, num_steps: int) -> None:
    """Take a fixed number of supervised steps, through all batches in a new order each epoch.

    Muon trains the matrices inside the layers, AdamW everything else.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0)
    factor = functools.partial(_lr_factor, num_steps=num_steps)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in (muon, adamw)
    ]
    order = random.Random(SEED)
    batches: list[slice] = []
    reported = time.monotonic()
    for step in range(num_steps):
        batches = batches or order.sample(demonstrations.batches, len(demonstrations.batches))
        loss = demonstrations.loss(model, batches.pop(0))
        model.zero_grad()
        loss.backward()
        for stepper in (muon, adamw, *schedules):
            stepper.step()
        if time.monotonic() - reported > REPORT_EVERY_S:
            reported = time.monotonic()
            print(f"step {step + 1}/{num_steps}, loss {loss.item():.3f} nats", flush=True)


def _lr_factor(step: int, num_steps: int) -> float:
    return min(1.0, (step + 1) / LR_WARMUP_STEPS) * max(0.02, 1 - step / num_steps)


def success_rate(
    recipe: Recipe, model, problems: list[Problem], greedy: bool = False, seed: int = 0
) -> float:
    """Share of games that the model wins when it samples at temperature 1, or takes its most likely tokens."""
    games = [recipe.begin(problem) for problem in problems]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while running := [game for game in games if not game.is_over]:
            responses = _respond(recipe, model, [game.tokens for game in running], greedy)
            for game, response in zip(running, responses, strict=True):
                game.answer(response)
    return sum(game.reward for game in games) / len(games)


def _respond(recipe: Recipe, model, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
    """The model's next turn after each prompt, to its end of text or until it is cut."""
    pad = recipe.tokenizer.pad_token_id
    eos = recipe.tokenizer.eos_token_id
    inputs = pad_sequence(
        [torch.tensor(prompt) for prompt in prompts], True, pad, padding_side="left"
    )
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    is_seen = (inputs != pad).long()
    output = model.generate(
        inputs, attention_mask=is_seen, max_new_tokens=recipe.max_turn_tokens, **sampling
    )
    turns = output[:, inputs.shape[1] :].tolist()
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in turns]


def make(recipe: Recipe):
    """A warmed-up model, measured. Raises RuntimeError if it is of no use to RL."""
    started = time.monotonic()
    model = untrained_model(recipe.tokenizer)
    print(
        f"{recipe.name}: warming up {model.num_parameters():,} parameters, {recipe.num_steps} steps",
        flush=True,
    )
    warm_up(model, demonstrate(recipe, recipe.num_demonstrations), recipe.num_steps)
    problems = recipe.task.eval_problems(NUM_EVAL_PROBLEMS)
    sampled = success_rate(recipe, model, problems)
    greedy = success_rate(recipe, model, problems, greedy=True)
    print(
        f"{recipe.name}: {time.monotonic() - started:.0f} s; held-out accuracy sampled {sampled:.3f}, greedy "
        f"{greedy:.3f} ({NUM_EVAL_PROBLEMS} problems)"
    )
    recipe.check(sampled, greedy)
    return model


def main(args: list[str] | None = None) -> None:
    """Make the models that are named, or all; write them, or compare them with those that are there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; all by default"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and say whether the weights are the same",
    )
    arguments = parser.parse_args(args)
    torch.set_num_threads(1)  # the order of float sums depends on it
    for name in arguments.names or RECIPES:
        recipe = RECIPES[name]()
        model = make(recipe)
        if arguments.check:
            stored = load_file(TINY_MODELS / name / "model.safetensors")
            is_same = all(
                torch.equal(weight, model.state_dict()[key]) for key, weight in stored.items()
            )
            print(f"{name}: {'the same weights to the bit' if is_same else 'other weights'}")
        else:
            model.save_pretrained(TINY_MODELS / name)
            recipe.tokenizer.save_pretrained(TINY_MODELS / name)


if __name__ == "__main__":
    main()
