"""What environments of several turns change: the task, and the environments of a worker.

Importing this costs little. The worker's part imports the engine's.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.plugins import Plugin
from extras.environments.task import prepare_task

if TYPE_CHECKING:
    from asyncrl.cluster.placement import WorkerSpec
    from asyncrl.config import Config
    from asyncrl.engine.environments import Environments
    from data.problem import Task


class EnvironmentPlugin(Plugin):
    """What a task that is an environment changes."""

    def prepare_task(self, config: "Config") -> Callable[[], "Task"]:
        """Return a function that makes the task. Raises ValueError for a wrong name or argument."""
        return prepare_task(config.task, config.seed, config.task_args)

    def start_environments(self, spec: "WorkerSpec", tokenizer) -> "Environments":
        """Return the environments of a worker's task."""
        from extras.environments import multi_turn

        return multi_turn.start_environments(spec, tokenizer)


PLUGIN = EnvironmentPlugin()
