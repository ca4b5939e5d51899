"""Additions to vLLM 0.32 in its engine process. vLLM imports this by `worker_extension_cls`; no other process can.

The import registers the `shm` weight transfer, ends the engine with its parent, and makes SIGUSR1 dump stacks. It also
corrects vLLM for two families of models: LFM2 on a CPU, and gpt-oss.
"""

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

import asyncrl.weights.shm_engine  # noqa: F401
from asyncrl.cluster.processes import exit_with_parent
from asyncrl.cluster.stacks import write_stacks_to

_rotate = RotaryEmbedding.forward_cpu
_begin_reload = reload.initialize_layerwise_reload
_end_reload = reload.finalize_layerwise_reload


def rotate_rows(
    self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys, [tokens, heads · size] or [tokens, heads, size].

    The kernel for a CPU gives wrong numbers for the second form. LFM2 uses that form.
    """
    if key is None:
        return _rotate(self, positions, query.flatten(1))[0].view_as(query), None
    flat_query, flat_key = _rotate(self, positions, query.flatten(1), key.flatten(1))
    return flat_query.view_as(query), flat_key.view_as(key)


def expert_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of experts of a gpt-oss; an empty list for any other model."""
    layers = model.modules() if isinstance(model, GptOssForCausalLM) else ()
    return [
        layer
        for layer in layers
        if isinstance(getattr(layer, "quant_method", None), FusedMoEMethodBase)
    ]


@functools.wraps(_begin_reload)
def begin_reload(model: nn.Module) -> None:
    """Prepare to load weights; experts and attention sinks of a gpt-oss keep their tensors.

    The loader of gpt-oss copies into these tensors. A reload by layers would replace them by tensors without memory.
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
    """Finish loading weights; experts of a gpt-oss are packed for their kernel."""
    _end_reload(model, *arguments)
    for layer in expert_layers(model):
        layer.quant_method.process_weights_after_loading(layer)


class EngineExtension:
    """A base of vLLM's worker class. It has no method: only the import of this module matters."""


RotaryEmbedding.forward_cpu = rotate_rows
reload.initialize_layerwise_reload = begin_reload
reload.finalize_layerwise_reload = end_reload
write_stacks_to()
exit_with_parent()
