"""Files of users, each under a name of its own, as a process knows one module of a name; and a chat tokenizer."""

import functools
import itertools
import json
from pathlib import Path

_NUMBERS = itertools.count()


def write_user_code(folder: Path, source: str) -> Path:
    """Write a source to a file of a new name in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"user_code_{next(_NUMBERS)}.py"
    path.write_text(source)
    return path


def chat_tokenizer():
    """A character tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<eos>", *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    """All files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ask_task(
    task: str,
    task_args: tuple[str, ...] = (),
    data_path: str | None = None,
    reward: tuple[str, ...] = (),
) -> None:
    """Make a task, its prompts, and a score, as a run does. Raises ValueError."""
    from asyncrl.config import Config
    from asyncrl.controller.prompts import PromptSource
    from asyncrl.engine.rewards import load_scorer
    from asyncrl.tasks import UserTask, encode, load_task, prepare_task
    from asyncrl.user_code import with_absolute_paths

    options = {"task_args": tuple(task_args), "data_path": data_path, "reward": tuple(reward)}
    config = Config(task=task, **options, max_prompt_tokens=512)
    config = with_absolute_paths(config)
    made = load_task(config)
    problems = [*(made.train_problem(index) for index in range(6)), *made.eval_problems(3)]
    if isinstance(made, UserTask):
        made.try_out()
    if config.is_multi_turn:
        prepare_task(config)().first_observation(problems[0])
        return
    prompts = PromptSource(
        made.train_problem,
        made.eval_problems(3),
        functools.partial(encode, config, made, chat_tokenizer()),
        made.rows,
    )
    prompts.check(config)
    score = load_scorer(config.task, config.reward)
    for problem in made.rows or problems[:1]:
        score.check(problem)


TASK = """
from data.problem import Problem


class Double:
    def __init__(self, seed, data_path=None, *, factor=2, words="What is {} times {}?"):
        self.seed, self.factor, self.words, self.data_path = seed, factor, words, data_path

    def train_problem(self, index):
        return self._problem(2 * ((self.seed + index) % 40))

    def eval_problems(self, count):
        return [self._problem(2 * n + 1) for n in range(min(count, 40))]

    def _problem(self, n):
        return Problem(self.words.format(self.factor, n), str(self.factor * n))

    @staticmethod
    def score(answer, response):
        return float(answer == response)
"""
LOSS = """
import torch


def loss(inputs, *, clip: float = 0.2):
    ratio = (inputs.logprobs - inputs.behavior_logprobs).clamp(-20, 20).exp()
    cut = torch.clamp(ratio, 1 - clip, 1 + clip)
    return -torch.minimum(ratio * inputs.advantages, cut * inputs.advantages), {"weight": ratio.detach()}
"""
ENVIRONMENT = '''
import gymnasium


class Echo(gymnasium.Env):
    """Say the word back."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(10))
        return f"Say {self.word}", {}

    def step(self, action):
        return "", float(self.word in action), True, False, {}
'''
