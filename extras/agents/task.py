"""Problems of agents: rows of --data-path, or rows that the agent's file gives. A worker gets a problem as a dict."""

import functools
import inspect
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Annotated

from msgspec import Meta

from asyncrl import user_code
from asyncrl.config import Config
from asyncrl.tasks import with_arguments
from data.problem import Problem, Task
from data.tables import Rows, RowTask, load_splits, placed
from extras.agents import verifiers_task

MAX_PROBLEMS = 100_000
"""Most problems that are taken from a file."""


class AgentTask(RowTask):
    """Rows that are problems of agents. The agent asks, so no prompt is known before it runs."""

    def __init__(
        self,
        seed: int,
        read_splits: Callable[[], dict[str, Rows]],
        source: str,
        *,
        held_out: Annotated[float, Meta(gt=0, lt=1)] = 0.1,
        shuffle: bool = True,
    ) -> None:
        """Make the task of rows. If they have no held-out split, a hash holds out the share `held_out`."""
        options = {"source": source, "held_out": held_out, "shuffle": shuffle}
        super().__init__(seed, read_splits(), read_row, **options)

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
        read_splits = functools.partial(verifiers_task.splits_of, environment, name)
        return functools.partial(AgentTask, config.seed, read_splits, f"rows of {name}")
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
    if config.data_path is not None:
        source = config.data_path
        read_splits = functools.partial(load_splits, source)
    elif make_problems is not None:
        source = f"problems of {name}"
        read_splits = functools.partial(_read_problems, config, make_problems, source)
    else:
        raise ValueError(
            f"--task {name} has no problems; give --data-path, or write `def problems(seed)` in the agent's file"
        )
    given = {"seed": config.seed, "read_splits": read_splits, "source": source}
    return with_arguments(AgentTask, name, task_args, given)


def _read_problems(
    config: Config, make_problems: Callable[[int], Iterable[dict]], source: str
) -> dict[str, Rows]:
    with user_code.errors_as_value_error(config.task):
        rows = list(itertools.islice(make_problems(config.seed), MAX_PROBLEMS))
    return {"": placed(rows, source)}
