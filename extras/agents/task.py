"""Problems of agents: rows of --data-path, or those that the agent's file gives. A worker gets a problem as a dict."""

import functools
import inspect
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from msgspec import Meta

from asyncrl import user_code
from asyncrl.config import Config, read_arguments
from data.problem import Problem, Task
from data.tables import Rows, RowTask, load_splits, placed
from extras.agents import verifiers_task

MAX_PROBLEMS = 100_000
"""Problems that are taken of those that a file gives."""


class AgentTask(RowTask):
    """Rows that are problems of agents. The agent asks, so no prompt is known before it runs."""

    def __init__(
        self,
        seed: int,
        splits: dict[str, Rows],
        source: str,
        *,
        held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.1,
        shuffle: bool = True,
    ) -> None:
        """Make the task of rows. If they have no held-out split, a hash holds out the share `held_out`."""
        super().__init__(seed, splits, read_row, source=source, held_out=held_out, shuffle=shuffle)

    def encode_prompt(self, problem: Problem, tokenizer) -> list[int]:
        """Return no tokens: the agent's first call has the prompt."""
        return []


def read_row(row: dict, place: str) -> Problem:
    """Return the problem of a row. Raises ValueError, with the row's place, for what is no dict that JSON can have."""
    try:
        if not isinstance(row, dict):
            raise TypeError(f"it is {str(row)[:60]!r}")
        text = json.dumps(row, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{place} is no JSON object: {error}; give dicts of plain values"
        ) from None
    return Problem(text, text, environment_seed=0)


def prepare_task(config: Config) -> Callable[[], Task]:
    """Return a function that makes the task of agents and reads its problems.

    Raises ValueError for an agent that cannot be run, for problems that are not there, and for a wrong argument.
    """
    name, task_args = config.task, config.task_args
    if name.startswith(verifiers_task.PREFIX):
        environment = verifiers_task.load_environment(name, task_args)
        splits = verifiers_task.splits_of(environment, name)
        return functools.partial(AgentTask, config.seed, splits, f"rows of {name}")
    make_problems = None
    if user_code.is_user_code(name):
        function = user_code.load(name)
        if not inspect.iscoroutinefunction(function):
            raise ValueError(
                f"--task {name} is no coroutine; write `async def run(client, problem)`, which returns the reward"
            )
        make_problems = getattr(sys.modules[function.__module__], "problems", None)
    else:
        try:
            shlex.split(name)
        except ValueError as error:
            raise ValueError(f"--task {name}: {error}; write it as a shell would read it") from None
    if config.data_path is None and make_problems is None:
        raise ValueError(
            f"--task {name} has no problems; give --data-path, or write `def problems(seed)` in the agent's file"
        )
    parameters = inspect.signature(AgentTask, eval_str=True).parameters.values()
    options = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    arguments = read_arguments("task-args", task_args, f"--task {name}", options)
    return functools.partial(_read, config, make_problems, arguments)


def _read(
    config: Config,
    make_problems: Callable[[int], Iterable[dict]] | None,
    arguments: dict[str, Any],
) -> AgentTask:
    if config.data_path is not None:
        return AgentTask(config.seed, load_splits(config.data_path), config.data_path, **arguments)
    with user_code.errors_as_value_error(config.task):
        rows = list(itertools.islice(make_problems(config.seed), MAX_PROBLEMS))
    source = f"problems of {config.task}"
    return AgentTask(config.seed, {"": placed(rows, source)}, source, **arguments)
