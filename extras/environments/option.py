"""What the core asks of environments of several turns: the task, and the environments of a worker.

Importing this costs little; the worker's part imports the engine's.
"""

from typing import TYPE_CHECKING

from extras.environments.task import prepare_task

if TYPE_CHECKING:
    from asyncrl.cluster.placement import WorkerSpec
    from asyncrl.engine.environments import Environments

__all__ = ["prepare_task", "start_environments"]


def start_environments(spec: "WorkerSpec", tokenizer) -> "Environments":
    """Return the environments of a worker's task."""
    from extras.environments import multi_turn

    return multi_turn.start_environments(spec, tokenizer)
