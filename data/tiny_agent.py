"""The `tiny` models of the environments: one for each, of 0.1 M parameters, warmed up in half a minute on one core.

They imitate a scripted player that knows the best actions and now and then takes any other, so that they win some games
and leave the rest to reinforcement learning. Real checkpoints, with a chat template, that transformers and vLLM load.
`python -m data.tiny_agent` makes them and prints where they are.
"""

import hashlib
import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from data import conversation, environments, tiny_model
from data.conversation import Conversation
from data.environments import ENVIRONMENTS, FrozenLake, GuessNumber, make_environment
from data.tasks import EnvironmentTask, Problem
from data.tiny_model import EOS, MAX_POSITIONS, PAD, SEED, descend, fixed_threads, make_once, untrained_model

ASSISTANT = "<assistant>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<assistant>{{ message.content }}{{ eos_token }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Nothing stands before the user's message, as it is always the first or follows an end of turn."""

NUM_TRANSCRIPTS = 1500
NUM_STEPS = 300
TRANSCRIPTS_PER_STEP = 32
ANY_ACTION_RATE = {"frozen_lake": 0.4, "guess_number": 0.5}
"""Share of turns in which the scripted player takes any action, each as likely as the next."""

NUM_EVAL_PROBLEMS = 256
MAX_TURN_TOKENS = 4
"""Where a turn is cut when success is measured; a good one has an action and the end of turn."""
SAMPLED_WINDOW = (0.2, 0.5)
"""Held-out success at temperature 1 outside of which the model is of no use to RL."""
MIN_GREEDY = 0.85


@dataclass(frozen=True)
class Transcripts:
    """Games of the scripted player."""

    tokens: torch.Tensor
    """[N, T] int64, padded on the right."""
    is_player: torch.Tensor
    """[N, T] bool, True where the player wrote the token."""
    imitated: list[torch.Tensor]
    """N of [player's tokens, vocabulary] float32: the distribution each was drawn from."""


def tiny_agent_path(name: str, cache_dir: Path = Path(".cache"), report: Callable[[str], None] = print) -> Path:
    """Directory of the tiny model of an environment, made on first use and named after all that went into it.

    Raises RuntimeError if a new model misses the success window.
    """
    path = Path(cache_dir).absolute() / f"tiny-{name}-{_fingerprint(name)}"
    make_once(path, lambda directory: _make(name, directory, report))
    return path


def vocabulary() -> list[str]:
    """Every token: all that an environment says or understands, in the longest pieces that come back."""
    rows = ["".join(cells) for cells in itertools.product("_OP", repeat=FrozenLake.SIZE) if cells.count("P") <= 1]
    last_rows = [row[:-1] + "G" for row in rows if row.endswith("_")]
    lake = [f"{FrozenLake.INSTRUCTION}\n", f"{FrozenLake.NO_ACTION}\n", FrozenLake.FELL, FrozenLake.ARRIVED]
    lake += [*(f"{row}\n" for row in rows), *last_rows, *FrozenLake.ACTIONS]
    number = [GuessNumber.INSTRUCTION, GuessNumber.NO_ACTION, GuessNumber.FOUND, GuessNumber.HIGHER, GuessNumber.LOWER]
    return [PAD, EOS, ASSISTANT, *lake, *number, *GuessNumber.ACTIONS]


def build_tokenizer():
    """The tokenizer of all environments: a token per action, per row of a map, and per phrase."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = vocabulary()
    longest_first = sorted(tokens, key=len, reverse=True)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=[ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


def best_moves(observation: str) -> list[str]:
    """The moves of frozen_lake that lie on a shortest way to the goal."""
    rows = observation.splitlines()[-FrozenLake.SIZE :]
    steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    cells = {(i, j): cell for i, row in enumerate(rows) for j, cell in enumerate(row)}
    start, goal = (next(place for place, cell in cells.items() if cell == mark) for mark in "PG")
    distance, queue = {goal: 0}, [goal]
    for place in queue:
        for i, j in steps.values():
            near = place[0] + i, place[1] + j
            if cells.get(near, "O") != "O" and near not in distance:
                distance[near] = distance[place] + 1
                queue.append(near)
    after = {move: distance.get((start[0] + i, start[1] + j), len(cells)) for move, (i, j) in steps.items()}
    return [move for move, left in after.items() if left == min(after.values())]


def best_guess(guesses: list[str], answers: list[str]) -> str:
    """The middle of what the answers to former guesses leave open."""
    low = max([int(g) + 1 for g, a in zip(guesses, answers, strict=True) if a == GuessNumber.HIGHER], default=1)
    high = [int(g) - 1 for g, a in zip(guesses, answers, strict=True) if a == GuessNumber.LOWER]
    return str((low + min(high, default=GuessNumber.HIGHEST)) // 2)


def player_distribution(name: str, actions: list[str], observations: list[str]) -> dict[str, float]:
    """Probability of each action of the scripted player, after these actions and one more observation than that."""
    every, rate = ENVIRONMENTS[name].ACTIONS, ANY_ACTION_RATE[name]
    best = best_moves(observations[-1]) if name == "frozen_lake" else [best_guess(actions, observations[1:])]
    return {action: rate / len(every) + (1 - rate) / len(best) * (action in best) for action in every}


def make_transcripts(name: str, num_transcripts: int = NUM_TRANSCRIPTS) -> Transcripts:
    """Games of the training split; deterministic."""
    task, tokenizer, rng = EnvironmentTask(name, SEED), build_tokenizer(), random.Random(SEED)
    talk = Conversation(tokenizer)
    games = [_transcript(name, task.train_problem(index), tokenizer, talk, rng) for index in range(num_transcripts)]
    tokens = torch.full((len(games), max(len(game[0]) for game in games)), tokenizer.pad_token_id)
    is_player = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (game, places, _) in enumerate(games):
        tokens[row, : len(game)] = torch.tensor(game)
        is_player[row, places] = True
    return Transcripts(tokens, is_player, [imitated for _, _, imitated in games])


def _transcript(
    name: str, problem: Problem, tokenizer, talk: Conversation, rng: random.Random
) -> tuple[list[int], list[int], torch.Tensor]:
    """One game: tokens, places of the player's among them, and the distributions these were drawn from."""
    environment = make_environment(name)
    observations, actions, is_over = [environment.reset(seed=problem.environment_seed)[0]], [], False
    tokens, places, imitated = talk.first(observations[0]), [], []
    while not is_over:
        distribution = player_distribution(name, actions, observations)
        actions += rng.choices(list(distribution), list(distribution.values()))
        observation, _, terminated, truncated, _ = environment.step(actions[-1])
        observations.append(observation)
        places += [len(tokens), len(tokens) + 1]
        imitated += [distribution, {EOS: 1.0}]
        tokens += [*tokenizer.encode(actions[-1]), talk.end_of_turn]
        is_over = terminated or truncated
        if not is_over:
            tokens += talk.reply(observation, ended=True)
    rows = torch.zeros(len(imitated), len(tokenizer))
    for row, distribution in zip(rows, imitated, strict=True):
        row[tokenizer.convert_tokens_to_ids(list(distribution))] = torch.tensor(list(distribution.values()))
    return tokens, places, rows


def warm_up(model, transcripts: Transcripts, report: Callable[[str], None], num_steps: int = NUM_STEPS) -> None:
    """A fixed number of supervised steps."""
    batches = _batches(len(transcripts.tokens))
    descend(model, (_loss(model, transcripts, rows) for rows in batches), num_steps, report)


def _batches(num_rows: int) -> Iterator[list[int]]:
    """Rows of batches without end, in a new order each epoch."""
    order = random.Random(SEED)
    while True:
        rows = order.sample(range(num_rows), num_rows)
        for start in range(0, num_rows - TRANSCRIPTS_PER_STEP + 1, TRANSCRIPTS_PER_STEP):
            yield rows[start : start + TRANSCRIPTS_PER_STEP]


def _loss(model, transcripts: Transcripts, rows: list[int]) -> torch.Tensor:
    """Mean cross-entropy of the player's tokens of these rows, nats.

    What is imitated is the distribution an action was drawn from: the same optimum, reached with less noise.
    """
    is_player = transcripts.is_player[rows]
    length = int(is_player.any(0).nonzero().max()) + 1
    # Padding stands on the right, so causal attention never sees it.
    logits = model(input_ids=transcripts.tokens[rows, : length - 1], use_cache=False).logits
    imitated = torch.cat([transcripts.imitated[row] for row in rows])
    return torch.nn.functional.cross_entropy(logits[is_player[:, 1:length]], imitated)


def success_rate(model, name: str, problems: list[Problem], greedy: bool = False, seed: int = 0) -> float:
    """Share of games that the model wins when it samples (temperature 1; or takes its most likely tokens)."""
    tokenizer, generator = build_tokenizer(), torch.Generator().manual_seed(seed)
    talk = Conversation(tokenizer)
    games = [_Game(name, problem, tokenizer, talk) for problem in problems]
    while running := [game for game in games if not game.is_over]:
        lengths = torch.tensor([len(game.tokens) for game in running])
        inputs = torch.full((len(running), int(lengths.max())), tokenizer.pad_token_id)
        for row, game in zip(inputs, running, strict=True):
            row[: len(game.tokens)] = torch.tensor(game.tokens)
        with torch.no_grad():
            logits = model(input_ids=inputs, use_cache=False).logits[torch.arange(len(running)), lengths - 1]
        sampled = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        for game, token in zip(running, sampled.tolist(), strict=True):
            game.write(token)
    return sum(game.reward for game in games) / len(games)


class _Game:
    """A game that the model plays, token by token."""

    def __init__(self, name: str, problem: Problem, tokenizer, talk: Conversation) -> None:
        self._environment, self._tokenizer, self._talk = make_environment(name), tokenizer, talk
        self.tokens = self._talk.first(self._environment.reset(seed=problem.environment_seed)[0])
        self.reward, self.is_over, self._turn = 0.0, False, []

    def write(self, token: int) -> None:
        self.tokens.append(token)
        self._turn.append(token)
        ended = token == self._talk.end_of_turn
        if ended or len(self._turn) == MAX_TURN_TOKENS:
            response = self._tokenizer.decode(self._turn, skip_special_tokens=True)
            observation, self.reward, terminated, truncated, _ = self._environment.step(response)
            self.is_over, self._turn = terminated or truncated, []
            self.tokens += self._talk.reply(observation, ended)


def _make(name: str, directory: Path, report: Callable[[str], None]) -> None:
    """Warm the model up, measure it and write it. Leaves torch's global state as it was."""
    started = time.monotonic()
    with fixed_threads():
        model = untrained_model(vocabulary())
        report(f"tiny model of {name}: warming up {model.num_parameters():,} parameters, {NUM_STEPS} steps")
        warm_up(model, make_transcripts(name), report)
        problems = EnvironmentTask(name, SEED).eval_problems(NUM_EVAL_PROBLEMS)
        sampled, greedy = success_rate(model, name, problems), success_rate(model, name, problems, greedy=True)
    report(
        f"tiny model of {name}: {time.monotonic() - started:.0f} s; held-out success sampled {sampled:.3f}, "
        f"greedy {greedy:.3f} ({NUM_EVAL_PROBLEMS} games)"
    )
    check_success(name, sampled, greedy)
    model.save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    (directory / "warm_up.json").write_text(json.dumps({"sampled_success": sampled, "greedy_success": greedy}))


def check_success(name: str, sampled: float, greedy: float) -> None:
    """Raise RuntimeError if a model is of no use to RL."""
    low, high = SAMPLED_WINDOW
    if not (low <= sampled <= high and greedy >= MIN_GREEDY):
        raise RuntimeError(
            f"the tiny model of {name} came out with held-out success {sampled:.3f} sampled and {greedy:.3f} greedy; "
            f"wanted {low} to {high} sampled and at least {MIN_GREEDY} greedy. Change ANY_ACTION_RATE or NUM_STEPS in "
            "data/tiny_agent.py"
        )


def _fingerprint(name: str) -> str:
    """Hash of the code, the problems it learns from and is measured on, and the libraries that compute with them."""
    task = EnvironmentTask(name, SEED)
    files = [__file__, tiny_model.__file__, environments.__file__, conversation.__file__]
    parts = [Path(file).read_text() for file in files]
    parts += [repr(task.train_problem(index)) for index in range(512)]
    parts += [repr(problem) for problem in task.eval_problems(64)]
    parts += [f"{name} {version(name)}" for name in ("torch", "transformers", "tokenizers", "gymnasium", "numpy")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    for environment_name in ENVIRONMENTS:
        print(tiny_agent_path(environment_name))
