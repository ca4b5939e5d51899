"""What vLLM 0.32 computes wrongly on a CPU, set right. Importing does it, in an engine process."""

from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_rotate = RotaryEmbedding.forward_cpu


def rotate_rows(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys, [tokens, heads · size] or [tokens, heads, size].

    The kernel gives wrong numbers for the second form, which LFM2 uses.
    """
    flat_key = None if key is None else key.flatten(1)
    flat_query, flat_key = _rotate(self, positions, query.flatten(1), flat_key)
    return flat_query.view_as(query), None if key is None else flat_key.view_as(key)


RotaryEmbedding.forward_cpu = rotate_rows
