"""The changes of environments of several turns: the task, and the environments of a worker.

Importing this costs little. The worker's part imports the engine's.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrl.plugins import Plugin
from extras.environments.task import EnvironmentTask, prepare_environment

if TYPE_CHECKING:
    from asyncrl.cluster.placement import WorkerSpec
    from asyncrl.config import Config
    from asyncrl.engine.environments import Environments
    from data.problem import Task


class EnvironmentPlugin(Plugin):
    """The changes of a task that is an environment."""

    def prepare_task(self, config: "Config") -> Callable[[], "Task"]:
        """Return a function that makes the task. Raises ValueError for a wrong name or argument."""
        make_environment = prepare_environment(config.task, config.task_args)
        return functools.partial(EnvironmentTask, config.task, config.seed, make_environment)

    def start_environments(self, spec: "WorkerSpec", tokenizer) -> "Environments":
        """Return the environments of a worker's task."""
        from asyncrl.engine.environments import Environments
        from extras.environments.multi_turn import EnvironmentPool, MultiTurn

        config = spec.config
        make = prepare_environment(config.task, config.task_args)
        pool = EnvironmentPool(make, tokenizer, config.env_timeout_s)
        return Environments(
            lambda ticket, member: MultiTurn(pool, ticket.environment_seed), pool.close
        )


PLUGIN = EnvironmentPlugin()
