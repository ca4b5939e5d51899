"""What this project adds inside vLLM's engine process; vLLM imports it through `worker_extension_cls`.

Importing registers the `shm` weight-transfer engine, ends the engine when its parent dies, and makes SIGUSR1 dump
stacks. Imports vllm, so only an engine process may import this module.
"""

import asyncrl.weights.extension  # noqa: F401
from asyncrl import extras
from asyncrl.cluster.processes import exit_with_parent
from asyncrl.cluster.stacks import write_stacks_to


class EngineExtension:
    """Mixed into vLLM's worker class; its import is what matters, it adds no method."""


extras.find("vllm fixes")
write_stacks_to()
exit_with_parent()
