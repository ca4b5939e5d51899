"""Make the tiny models of data/tiny: `python scripts/make_tiny.py [NAME …]`; with --check only compare with them.

Each is a Qwen3 of 0.1 M parameters, a real checkpoint that transformers and vLLM load. A supervised warm-up of a minute
on one core teaches it to imitate a scripted player who is sometimes wrong. So its most likely answer is nearly always
right and a sampled one seldom is: reinforcement learning has something to do. The same code, libraries and kind of CPU
make the same weights to the bit. The tokenizers of data/tiny are kept: tokenizer.json says the words and the split.
"""

import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from tyro.conf import Positional

from asyncrl.tasks import load_task
from data.addition import MAX_COLUMNS, MIN_COLUMNS, addition_problems
from data.conversation import Conversation
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber
from data.problem import Problem, of_split
from scripts.lines import run_command

TINY_MODELS = Path(__file__).resolve().parents[1] / "data" / "tiny"
SEED = 0
MATRIX_LR = 0.03
"""Learning rate of Muon, which needs half of AdamW's steps here."""
OTHER_LR = 5e-3
"""Learning rate of AdamW, for embeddings and norms."""
LR_WARMUP_STEPS = 50
TOKENS_PER_STEP = 1024
NUM_EVAL_PROBLEMS = 256
NOT_IMITATED = -1
EVEN_SHARE = 0.15
"""Share of sums whose length is drawn evenly. By the task's own law alone, long ones are never learnt."""
WRONG_DIGIT_RATE = 0.3
"""How often the scripted player writes another digit, each as likely as the next."""
ANY_ACTION_RATE = {"frozen_lake": 0.4, "guess_number": 0.5}
"""Share of turns in which the scripted player takes any action, each as likely as the next."""

Distribution = tuple[tuple[int, float], ...]
"""Token ids and their probabilities; all other tokens have none."""


@dataclass(frozen=True)
class Recipe:
    """What a tiny model learns from, and how well it must do."""

    name: str
    num_demonstrations: int
    num_steps: int
    max_turn_tokens: int
    """Where a turn is cut when the model is measured."""
    sampled_window: tuple[float, float]
    """Share of held-out games that the model must win at temperature 1, to be of use to RL."""
    min_greedy: float
    """Least share when the model takes its most likely tokens."""

    @functools.cached_property
    def task(self):
        """The task that the model is for."""
        return load_task(self.name, SEED)

    @functools.cached_property
    def tokenizer(self):
        """The model's tokenizer."""
        return AutoTokenizer.from_pretrained(TINY_MODELS / self.name, trust_remote_code=False)

    @functools.cached_property
    def conversation(self) -> Conversation:
        """The chat template of an environment's tokenizer."""
        return Conversation(self.tokenizer)

    def begin(self, problem: Problem) -> "Sum | Episode":
        """Return a game on a problem."""
        return (Episode if self.name in ENVIRONMENTS else Sum)(self, problem)

    def training_problems(self, count: int) -> Iterator[Problem]:
        """Yield problems of the training split to demonstrate; deterministic."""
        if self.name == "addition":
            rng = random.Random(SEED)
            num_even = int(count * EVEN_SHARE)
            count -= num_even
            lengths = [rng.randint(MIN_COLUMNS, MAX_COLUMNS) for _ in range(num_even)]
            for length in lengths:
                yield next(of_split(addition_problems(rng, length), held_out=False))
        yield from map(self.task.train_problem, range(count))

    def check(self, sampled: float, greedy: float) -> None:
        """Raise RuntimeError if a model that wins these shares of its games is of no use to RL."""
        low, high = self.sampled_window
        if not (low <= sampled <= high and greedy >= self.min_greedy):
            raise RuntimeError(
                f"the tiny model {self.name} has held-out accuracy {sampled:.3f} sampled and {greedy:.3f} greedy; "
                f"wanted {low} to {high} sampled and at least {self.min_greedy} greedy. Change num_steps, or how often "
                "its player is wrong"
            )


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("addition", 28_000, 1200, 2 * (MAX_COLUMNS + 1) + 1, (0.15, 0.5), 0.9),
        # A good turn has an action and the end of turn.
        Recipe("frozen_lake", 1500, 300, 4, (0.2, 0.5), 0.85),
        Recipe("guess_number", 1500, 300, 4, (0.2, 0.5), 0.85),
    )
}


# Games: `tokens` are all so far, the prompt first. `answer` appends a turn and what follows on it; a turn that was cut
# has no end of text. `play` returns the scripted player's next turn, and what to imitate for each of its tokens.


class Sum:
    """A problem of addition, won by exactly the right answer."""

    reward = 0.0
    is_over = False

    def __init__(self, recipe: Recipe, problem: Problem) -> None:
        tokenizer = recipe.tokenizer
        self.tokens = tokenizer.encode(problem.prompt)
        self._right = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]
        self._digits = tokenizer.convert_tokens_to_ids([*"0123456789"])

    def answer(self, response: list[int]) -> None:
        self.tokens += response
        self.reward = float(response == self._right)
        self.is_over = True

    def play(self, rng: random.Random) -> tuple[list[int], list[Distribution]]:
        return self._right, [self._imitated(token) for token in self._right]

    def _imitated(self, right: int) -> Distribution:
        if right not in self._digits:
            return ((right, 1.0),)
        wrong = dict.fromkeys(self._digits, WRONG_DIGIT_RATE / 9)
        return tuple((wrong | {right: 1 - WRONG_DIGIT_RATE}).items())


class Episode:
    """An episode of an environment; a turn that is cut is played as it is."""

    reward = 0.0
    is_over = False

    def __init__(self, recipe: Recipe, problem: Problem) -> None:
        self._name = recipe.name
        self._tokenizer = recipe.tokenizer
        self._conversation = recipe.conversation
        self._environment = ENVIRONMENTS[recipe.name]()
        self.actions: list[str] = []
        self.observations = [self._environment.reset(seed=problem.environment_seed)[0]]
        self.tokens = self._conversation.first(self.observations[0])

    def answer(self, response: list[int]) -> None:
        action = self._tokenizer.decode(response, skip_special_tokens=True)
        observation, self.reward, terminated, truncated, _ = self._environment.step(action)
        self.actions.append(action)
        self.observations.append(observation)
        self.is_over = terminated or truncated
        ended = response[-1] == self._conversation.end_of_turn
        self.tokens += response + self._conversation.reply(observation, ended)

    def play(self, rng: random.Random) -> tuple[list[int], list[Distribution]]:
        actions, rate = self._environment.ACTIONS, ANY_ACTION_RATE[self._name]
        best = [best_guess(self.actions, self.observations[1:])]
        if self._name == "frozen_lake":
            best = best_moves(self.observations[-1])
        chances = dict.fromkeys(actions, rate / len(actions))
        for action in best:
            chances[action] += (1 - rate) / len(best)
        ids = self._tokenizer.convert_tokens_to_ids(list(actions))
        end = self._tokenizer.eos_token_id
        turn = [*rng.choices(ids, list(chances.values())), end]
        return turn, [tuple(zip(ids, chances.values(), strict=True)), ((end, 1.0),)]


def best_moves(observation: str) -> list[str]:
    """Return the moves of frozen_lake that lie on a shortest path to the goal."""
    rows = observation.splitlines()[-FrozenLake.SIZE :]
    moves = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    cells = {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    start, goal = (next(place for place, cell in cells.items() if cell == mark) for mark in "PG")
    distance = {goal: 0}
    queue = [goal]
    for place in queue:
        for i, j in moves.values():
            near = place[0] + i, place[1] + j
            if cells.get(near, "O") != "O" and near not in distance:
                distance[near] = distance[place] + 1
                queue.append(near)
    left = {}
    for move, (i, j) in moves.items():
        left[move] = distance.get((start[0] + i, start[1] + j), len(cells))
    return [move for move in moves if left[move] == min(left.values())]


def best_guess(guesses: list[str], answers: list[str]) -> str:
    """Return the middle of what the answers to former guesses leave open."""
    low, high = 1, GuessNumber.HIGHEST
    for guess, answer in zip(guesses, answers, strict=True):
        if answer == GuessNumber.HIGHER:
            low = max(low, int(guess) + 1)
        elif answer == GuessNumber.LOWER:
            high = min(high, int(guess) - 1)
    return str((low + high) // 2)


# Network, warm-up, measure


def untrained_model(tokenizer) -> Qwen3ForCausalLM:
    """Return a Qwen3 of 0.1 M parameters, the same each time; torch's own random state stays as it was."""
    # vLLM's CPU attention takes head sizes 32, 64, 80, 96, 128 and a few larger ones.
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
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


Game = tuple[torch.Tensor, torch.Tensor]
"""Tokens [T] int64 of a game up to the player's last one, and [T] int64: the row of the distributions that
he drew the token from; NOT_IMITATED where he did not write."""


def demonstrate(recipe: Recipe, count: int) -> tuple[list[Game], torch.Tensor]:
    """Return games, the shortest first, and distributions [D, vocabulary] float32; deterministic.

    Imitating distributions and not what was drawn is the same optimum, reached with less noise.
    """
    rng = random.Random(SEED)
    games = []
    known: dict[Distribution, int] = {}
    for problem in recipe.training_problems(count):
        game = recipe.begin(problem)
        imitated: list[int] = []
        while not game.is_over:
            imitated += [NOT_IMITATED] * (len(game.tokens) - len(imitated))
            response, drawn_from = game.play(rng)
            imitated += [known.setdefault(distribution, len(known)) for distribution in drawn_from]
            game.answer(response)
        games.append((torch.tensor(game.tokens[: len(imitated)]), torch.tensor(imitated)))
    games.sort(key=lambda game: len(game[0]))
    distributions = torch.zeros(len(known), len(recipe.tokenizer))
    for row, distribution in zip(distributions, known, strict=True):
        for token, probability in distribution:
            row[token] = probability
    return games, distributions


def batches_of(games: list[Game]) -> list[list[Game]]:
    """Return games in batches of at most TOKENS_PER_STEP tokens, padding included."""
    batches: list[list[Game]] = [[]]
    for game in games:
        if (len(batches[-1]) + 1) * len(game[0]) > TOKENS_PER_STEP:
            batches.append([])
        batches[-1].append(game)
    return batches


def imitation_loss(model, batch: list[Game], distributions: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the player's tokens in a batch, nats."""
    # Padding stands on the right, so causal attention never sees it.
    tokens = pad_sequence([game[0] for game in batch], batch_first=True)
    imitated = pad_sequence([game[1] for game in batch], True, NOT_IMITATED)[:, 1:]
    is_player = imitated != NOT_IMITATED
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[is_player]
    return torch.nn.functional.cross_entropy(logits, distributions[imitated[is_player]])


def warm_up(model, games: list[Game], distributions: torch.Tensor, num_steps: int) -> None:
    """Take a fixed number of supervised steps, through all batches in a new order each epoch.

    Muon trains the matrices inside the layers, AdamW everything else.
    """

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / LR_WARMUP_STEPS) * max(0.02, 1 - step / num_steps)

    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    muon = torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.0)
    adamw = torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.98), weight_decay=0.0)
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, factor) for each in (muon, adamw)]
    order = random.Random(SEED)
    batches = batches_of(games)
    queue: list[list[Game]] = []
    for step in range(num_steps):
        queue = queue or order.sample(batches, len(batches))
        loss = imitation_loss(model, queue.pop(0), distributions)
        model.zero_grad()
        loss.backward()
        for stepper in (muon, adamw, *schedules):
            stepper.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{num_steps}, loss {loss.item():.3f} nats", flush=True)


def success_rate(
    recipe: Recipe, model, problems: list[Problem], greedy: bool = False, seed: int = 0
) -> float:
    """Return the share of games that the model wins, sampled at temperature 1 or by its most likely tokens."""
    games = [recipe.begin(problem) for problem in problems]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while running := [game for game in games if not game.is_over]:
            responses = _respond(recipe, model, [game.tokens for game in running], greedy)
            for game, response in zip(running, responses, strict=True):
                game.answer(response)
    return sum(game.reward for game in games) / len(games)


def _respond(recipe: Recipe, model, prompts: list[list[int]], greedy: bool) -> list[list[int]]:
    """Return the model's next turn after each prompt, to its end of text or until it is cut."""
    eos = recipe.tokenizer.eos_token_id
    inputs = recipe.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
    output = model.generate(**inputs, max_new_tokens=recipe.max_turn_tokens, **sampling)
    turns = output[:, inputs["input_ids"].shape[1] :].tolist()
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in turns]


def make(recipe: Recipe) -> Qwen3ForCausalLM:
    """Return a warmed-up model, measured. Raises RuntimeError if it is of no use to RL."""
    started = time.monotonic()
    model = untrained_model(recipe.tokenizer)
    print(f"{recipe.name}: warming up {model.num_parameters():,} parameters", flush=True)
    games, distributions = demonstrate(recipe, recipe.num_demonstrations)
    warm_up(model, games, distributions, recipe.num_steps)
    problems = recipe.task.eval_problems(NUM_EVAL_PROBLEMS)
    sampled = success_rate(recipe, model, problems)
    greedy = success_rate(recipe, model, problems, greedy=True)
    print(
        f"{recipe.name}: {time.monotonic() - started:.0f} s; held-out accuracy sampled {sampled:.3f}, greedy "
        f"{greedy:.3f} ({NUM_EVAL_PROBLEMS} problems)"
    )
    recipe.check(sampled, greedy)
    return model


def main(names: Positional[tuple[str, ...]] = (), check: bool = False) -> None:
    """Make tiny models, and write them.

    Args:
        names: Models of data/tiny; all by default.
        check: Write nothing, and say whether the weights are the same as those that are there.
    """
    torch.set_num_threads(1)  # the order of float sums depends on it
    for name in names or RECIPES:
        model = make(RECIPES[name])
        if not check:
            model.save_pretrained(TINY_MODELS / name)
            continue
        made = model.state_dict()
        stored = load_file(TINY_MODELS / name / "model.safetensors")
        is_same = all(torch.equal(weight, made[key]) for key, weight in stored.items())
        print(f"{name}: {'the same weights to the bit' if is_same else 'other weights'}")


if __name__ == "__main__":
    run_command(main)
