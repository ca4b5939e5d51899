"""What a user brings (FILE.py:NAME) is found and looked at before anything heavy starts."""

import inspect
import sys
from pathlib import Path
from typing import Any

from config import Config
from data import own
from data.tasks import load_task, score_of


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
    """Raise ValueError, in one line, for something of the user's own that does not load or is not what it must be."""
    if own.is_own(config.algo):
        _check_loss(config)
    for text in config.reward:
        if not callable(own.load(text, "--reward")):
            raise ValueError(f"--reward {text} is no function; give one that takes response and the row's columns")
    if own.is_own(config.task):
        load_task(config.task, config.seed, config.data_path, config.task_args)
        if not (config.reward or config.is_multi_turn):
            score_of(config.task)
    own.files(own.texts_of(config))


def _check_loss(config: Config) -> None:
    from algos import hyperparameters
    from algos.inputs import try_loss

    loss = own.load(config.algo, "--algo")
    if not inspect.isfunction(loss):
        raise ValueError(
            f"--algo {config.algo} is a {type(loss).__name__}; give a function loss(inputs, *, NAME=VALUE)"
        )
    with own.blamed(config.algo, "--algo"):
        first, *others = inspect.signature(loss, eval_str=True).parameters.values() or [None]
        open_ones = [k.name for k in others if k.default is k.empty and k.kind not in (k.VAR_KEYWORD, k.VAR_POSITIONAL)]
        if first is None or first.kind is first.KEYWORD_ONLY or open_ones:
            raise TypeError(
                f"{loss.__name__} takes {inspect.signature(loss)}; its first parameter must be the inputs "
                "(algos.LossInputs), and all others need defaults"
            )
    options = hyperparameters(config.algo, config.algo_args, loss)
    with own.blamed(config.algo, "--algo"):
        try_loss(lambda inputs: loss(inputs, **options))


def describe_loss(algo: str) -> str:
    """What a loss is, and its keyword arguments with their types, ranges and defaults. Raises ValueError."""
    from algos import LOSSES

    loss = own.load(own.resolved(algo), "--algo", LOSSES)
    text = (inspect.getmodule(loss).__doc__ if algo in LOSSES else inspect.getdoc(loss)) or "no docstring"
    lines = [f"--algo {algo}: {text.strip().partition(chr(10))[0]}", "", "--algo-args, NAME=VALUE each:"]
    _, *keywords = inspect.signature(loss, eval_str=True).parameters.values()
    rows = [(f"{k.name}={k.default}", getattr(k.annotation, "__metadata__", [""])[0]) for k in keywords]
    return "\n".join([*lines, *(f"  {row:28}{words}".rstrip() for row, words in rows or [("none", "")])])


def gone_on_with(made: dict[str, Any], run: Path) -> dict[str, Any]:
    """Options of a run that goes on by which its user's own files are found: where they were, if they are as they were,
    and else their copies in the run's directory.

    Raises ValueError, in one line, if neither is what the run began with.
    """
    config, code = Config.from_dict(made["config"]), run.absolute() / "code"
    if not (texts := own.texts_of(config)):
        return {}
    if _digest(texts) == made["own"]["digest"]:
        return {}
    moved = {text: own.moved(text, code) for text in texts}
    if _digest(moved.values()) != made["own"]["digest"]:
        raise ValueError(
            f"--resume {run}: {code} is not what the run began with; put the files back, or begin a new run"
        )
    print(f"{', '.join(made['own']['files'])}: changed or gone; the run goes on with the copies in {code}", flush=True)
    one = {name: moved.get(getattr(config, name), getattr(config, name)) for name in ("algo", "task")}
    return one | {"reward": tuple(moved.get(text, text) for text in config.reward)}


def _digest(texts) -> str:
    try:
        return own.digest(texts)
    except ValueError:  # gone, or no Python any more
        return ""
