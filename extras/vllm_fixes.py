"""What vLLM 0.32 does wrongly with some families, set right. Importing does it, in an engine process."""

import functools

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

_rotate = RotaryEmbedding.forward_cpu
_begin_reload = reload.initialize_layerwise_reload
_end_reload = reload.finalize_layerwise_reload


def rotate_rows(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys, [tokens, heads · size] or [tokens, heads, size].

    The kernel for a CPU gives wrong numbers for the second form, which LFM2 uses.
    """
    flat_key = None if key is None else key.flatten(1)
    flat_query, flat_key = _rotate(self, positions, query.flatten(1), flat_key)
    return flat_query.view_as(query), None if key is None else flat_key.view_as(key)


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of experts of a gpt-oss; none of any other model."""
    if not isinstance(model, GptOssForCausalLM):
        return []
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), FusedMoEMethodBase)
    ]


@functools.wraps(_begin_reload)
def begin_reload(model: nn.Module) -> None:
    """Prepare to load weights; experts and attention sinks of a gpt-oss keep their tensors.

    Its loader copies into these by itself, and a reload by layers gives it tensors without memory.
    """
    _begin_reload(model)
    experts = expert_layers(model)
    sinks = [module for module in model.modules() if experts and "sinks" in module._parameters]
    for layer in [*experts, *sinks]:
        info = get_layerwise_info(layer)
        _place_kernel_tensors(layer, info)
        info.reset()


@functools.wraps(_end_reload)
def end_reload(model: nn.Module, *arguments) -> None:
    """Finish loading weights; experts of a gpt-oss are packed as their kernel reads them."""
    _end_reload(model, *arguments)
    for layer in expert_layers(model):
        layer.quant_method.process_weights_after_loading(layer)


RotaryEmbedding.forward_cpu = rotate_rows
reload.initialize_layerwise_reload = begin_reload
reload.finalize_layerwise_reload = end_reload
