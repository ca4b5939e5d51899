"""Tasks, environments and datasets, one file per idea, and the weights of the tiny models. Imports no other folder."""

import inspect

from data.addition import Addition
from data.gsm8k import Gsm8k
from data.jsonl import Jsonl
from data.problem import Task
from data.reasoning_gym import ReasoningGym
from data.sums import Sums

TASKS = {
    "addition": Addition,
    "gsm8k": Gsm8k,
    "jsonl": Jsonl,
    "reasoning_gym": ReasoningGym,
    "sums": Sums,
}
"""Tasks of one turn. One that takes a `name` is chosen as TASK:NAME."""
MULTI_TURN_TASKS = ("frozen_lake", "guess_number")
"""Tasks of several turns: the keys of ENVIRONMENTS in data/environments.py. That file imports gymnasium."""
TASK_NAMES = (
    "addition", "gsm8k", "jsonl", "reasoning_gym:NAME", *(f"sums:{level}" for level in Sums.LEVELS),
    *MULTI_TURN_TASKS,
)  # fmt: skip
"""All tasks, as they are chosen."""


def make_task(name: str, seed: int, data_path: str | None = None) -> Task:
    """Return a task of TASKS. Raises ValueError, in one line, for a missing task."""
    kind, _, rest = name.partition(":")
    if kind not in TASKS:
        raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {name}")
    given = {"seed": seed, "name": rest, "data_path": data_path}
    taken = inspect.signature(TASKS[kind]).parameters.keys() & given.keys()
    return TASKS[kind](**{key: given[key] for key in taken})
