"""Environments of the package verifiers, unchanged: `--task verifiers:NAME`. Their client is given the endpoint."""

import importlib
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

from asyncrl.config import read_arguments
from asyncrl.engine.rewards import Failed, one_line
from data.tables import Rows, placed

PREFIX = "verifiers:"
INSTALL = "pip install verifiers==0.3.1"
"""0.4 needs another release of openai than vLLM."""
ERRORS_OF_THE_POLICY = ("EmptyModelResponseError", "ToolParseError")
"""Errors of verifiers for what the policy wrote. Such trajectories are trained, so that they are discouraged."""


def load_environment(task: str, task_args: Iterable[str]) -> Any:
    """Return the environment of a task, made with the arguments of --task-args.

    Raises ValueError if a package is missing, an argument is wrong, or the environment cannot be made.
    """
    name = task.removeprefix(PREFIX)
    try:
        import verifiers
    except ImportError:
        raise ValueError(f"--task {task} needs the package verifiers: {INSTALL}") from None
    try:
        module = importlib.import_module(name.replace("-", "_"))
        make = module.load_environment
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--task {task}: {one_line(error)}; install the package of the environment"
        ) from None
    arguments = _read_arguments(task, task_args, _parameters_of(make))
    try:
        environment = verifiers.load_environment(name, **arguments)
    except Exception as error:  # an environment of verifiers may raise anything
        raise ValueError(f"--task {task}: {one_line(error)}") from None
    if environment.message_type != "chat":
        raise ValueError(
            f"--task {task} asks for {environment.message_type} messages; give one of chat messages"
        )
    return environment


def _parameters_of(make: Callable) -> Iterable[inspect.Parameter]:
    """Return the parameters of a function, with annotations that are types and no texts."""
    try:
        return inspect.signature(make, eval_str=True).parameters.values()
    except NameError:  # a type that is there for a type checker only; defaults then give the types
        parameters = inspect.signature(make).parameters.values()
        return [parameter.replace(annotation=parameter.empty) for parameter in parameters]


def _read_arguments(
    task: str, task_args: Iterable[str], parameters: Iterable[inspect.Parameter]
) -> dict[str, Any]:
    """Return the arguments that NAME=VALUE items give. A value in [] or {} is JSON, as environments take lists, too."""
    arguments, plain = {}, []
    for item in task_args:
        name, _, text = item.partition("=")
        if not text.startswith(("[", "{")):
            plain.append(item)
            continue
        try:
            arguments[name] = json.loads(text)
        except ValueError as error:
            raise ValueError(f"--task-args {item}: {name} is no JSON: {error}") from None
    return read_arguments("task-args", plain, f"--task {task}", parameters) | arguments


def splits_of(environment: Any, name: str) -> dict[str, Rows]:
    """Return the rows of an environment: rows to train on, and rows to evaluate on. One of the two may be missing."""
    rows, held_out = environment.build_dataset(), environment.build_eval_dataset()
    if rows is None:  # a benchmark; some of its rows are then held out
        return {"": placed(held_out, name)}
    splits = {"train": placed(rows, name, "train")}
    if held_out is not None:
        splits["test"] = placed(held_out, name, "test")
    return splits


def make_agent(task: str, task_args: Iterable[str]) -> Callable:
    """Return the coroutine that plays an environment once, and returns its reward. It raises Failed.

    Raises ValueError as `load_environment` does.
    """
    environment = load_environment(task, task_args)
    from verifiers import OpenAIChatCompletionsClient

    async def run(client, problem: dict) -> float:
        speaker = OpenAIChatCompletionsClient(client)
        try:
            outcome = await environment.run_rollout(problem, speaker, "policy", sampling_args={})
        except Exception as error:  # an environment of verifiers may raise anything
            raise Failed(f"{task}: {one_line(error)}") from None
        error = outcome.get("error")
        if error and error["error"] not in ERRORS_OF_THE_POLICY:
            raise Failed(f"{task}: {error['error_chain_repr']}")
        return outcome["reward"]  # also after an error, the rubric has scored what there is

    return run
