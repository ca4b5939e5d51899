"""What this project adds inside vLLM's engine process; vLLM imports it through `worker_extension_cls`.

Importing registers the `shm` weight-transfer engine, ends the engine when its parent dies, and makes SIGUSR1 dump
stacks. Imports vllm, so only an engine process may import this module.
"""

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

import asyncrl.weights.extension  # noqa: F401
from asyncrl.cluster.processes import exit_with_parent
from asyncrl.cluster.stacks import write_stacks_to


class EngineExtension:
    """Mixed into vLLM's worker class; its import is what matters, it adds no method."""


_rotate = RotaryEmbedding.forward_cpu


def rotate_rows(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys, [tokens, heads · size] or [tokens, heads, size].

    The kernel of vLLM 0.32 for the CPU gives wrong numbers for the second form, which LFM2 uses.
    """
    flat_key = None if key is None else key.flatten(1)
    flat_query, flat_key = _rotate(self, positions, query.flatten(1), flat_key)
    return flat_query.view_as(query), None if key is None else flat_key.view_as(key)


RotaryEmbedding.forward_cpu = rotate_rows
write_stacks_to()
exit_with_parent()
