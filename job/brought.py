"""What a user brings (FILE.py:NAME) is found and looked at before anything heavy starts."""

import sys
from typing import Any

from config import Config
from data import own
from data.tasks import Problem, Task, prepare_task
from engine.score import load_score


def resolved(options: dict[str, Any]) -> dict[str, Any]:
    """Options with absolute paths, so that all processes mean one file, and `environment:` before a class of
    gymnasium's. Raises ValueError, in one line, for a task that does not load."""
    found = dict(options)
    for name in options.keys() & {"algo", "task"}:
        found[name] = own.resolved(options[name])
    if "reward" in options:
        found["reward"] = tuple(map(own.resolved, options["reward"]))
    task = found.get("task", "")
    if own.is_own(task) and not task.startswith("environment:"):
        kind, gymnasium = own.load(task), sys.modules.get("gymnasium")
        if gymnasium and isinstance(kind, type) and issubclass(kind, gymnasium.Env):
            found["task"] = f"environment:{task}"
    return found


def check(config: Config) -> None:
    """Raise ValueError, in one line, for an option of a loss or a task that it does not take, and for something of the
    user's own that does not load or is not what it must be."""
    _check_loss(config)
    prepare_task(config.task, config.seed, config.data_path, config.task_args)
    if not config.is_multi_turn:
        load_score(config.task, config.reward)
    own.files(own.texts_of(config))


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


def _check_loss(config: Config) -> None:
    from algos import LOSSES, choose_loss
    from algos.own_loss import check_signature, try_loss

    loss = own.load(config.algo, "--algo", LOSSES)
    with own.blamed(config.algo, "--algo"):
        check_signature(loss)
    chosen = choose_loss(config.algo, config.algo_args, loss)
    with own.blamed(config.algo, "--algo"):
        try_loss(chosen)
