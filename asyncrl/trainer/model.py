"""The trainer's model: every rank builds it empty and shards it (FSDP2), then rank 0 sends the weights.

Trained weights are float32 masters. The dtype of computing is --dtype. By default it is bfloat16 on a GPU (FSDP2's
mixed precision, with float32 gradient reduction) and float32 on a CPU. Frozen weights beside adapters are kept in that
dtype.
"""

import itertools
import re
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from asyncrl.config import Config
from asyncrl.trainer.attention import choose_attention
from asyncrl.trainer.families import read_config
from asyncrl.trainer.gae import ValueHead
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.lora import (
    add_adapters,
    initial_adapters,
    merge,
    named_adapters,
    named_base_parameters,
)
from asyncrl.trainer.sharding import gather, needs_sharding, shard
from asyncrl.weights.models import read_headers
from asyncrl.weights.transport import ParameterSpec, Weights

_VARYING = (
    r"L\['hidden_states'\]:0",
    r"L\['hidden_states'\]:1",
    r"L\['position_embeddings'\].*:0",
    r"L\['position_embeddings'\].*:1",
    r"L\['(attention_mask|position_ids|kwargs)'\](?!\.BLOCK_SIZE)",
    r"L\['(hidden|targets)'\]:0",
)
"""Arguments whose sizes change between micro-batches, in torch's notation: arguments of layers and of score_rows.
FlexAttention's block size is constant and is left out."""
_LAYER = re.compile(r"(?:.*?\.\d+\.)?")
"""Matches the layer in a weight's name; empty outside of layers."""
transformers_logging.disable_progress_bar()  # loading and saving would draw over ours


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype of the model's computing and of the weights that are sent."""
    return getattr(torch, config.dtype_on(device.type))


def load_model(
    config: Config, path: str, mesh: DeviceMesh, device: torch.device, *, is_trained: bool = True
) -> TokenLogprobs:
    """Build an empty sharded model on every rank, then fill it from rank 0. Only rank 0 reads the files.

    Frozen weights (a reference, or the base of adapters) are kept in the dtype of computing.
    """
    hf_config = read_config(path)
    computed_in = compute_dtype(config, device)
    dtype = computed_in if config.lora_rank or not is_trained else torch.float32
    with torch.device("meta"):
        attention = choose_attention(device, hf_config)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    module = TokenLogprobs(model.eval(), trains_entropy=config.optim.entropy_coef > 0)
    if is_trained and config.advantage == "gae":
        module.value_head = ValueHead(model.get_output_embeddings().in_features)
    layers = layers_of(model)
    if config.lora_rank:
        add_adapters(model, layers, config.lora_rank)
    if is_trained and compiles(config, device):
        compile_layers(layers)
        # Then a pass writes the float32 logits once, and not once an operation.
        module.score_rows = compiled(module.score_rows)
    if is_trained and "activations" in config.save_memory:
        recompute_layers(layers)
    offload = "optimizer" in config.save_memory
    if needs_sharding(mesh, computed_in, offload):
        if module.value_head is not None:
            shard([module.value_head], mesh, None, offload)
        shard([*layers, *embedding_apart(config, model), module], mesh, computed_in, offload)
        module.set_reshard_after_forward(not is_trained or "layers" in config.save_memory)
        if is_trained:
            module.set_reshard_after_forward(False, recurse=False)
    module.to_empty(device="cpu" if offload else device)
    if not isinstance(module, FSDPModule):
        model.tie_weights()  # FSDP keeps ties, but `to_empty` of a plain module does not
    _fill_from_rank_0(model, path, dtype, initial_adapters(model, config.seed))
    # Not before: torch broadcasts weights and persistent buffers from one device only.
    _move_buffers(model, device)
    if module.value_head is not None:
        nn.init.zeros_(module.value_head.weight)
    return module.requires_grad_(False) if not is_trained else module


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model, in order; also of a sharded one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Move buffers to the device of computing. FSDP moves offloaded weights there, but no buffers."""
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def named_persistent_buffers(model: nn.Module) -> Weights:
    """Yield (Hugging Face name, buffer) of each buffer in a checkpoint of the model. Buffers are never trained."""
    for owner_name, owner in model.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{owner_name}.{name}", buffer


def trained_names(module: TokenLogprobs) -> dict[Tensor, str]:
    """Return the trained parameters with their names: Hugging Face's, and `value_head`'s own."""
    return {
        parameter: name.removeprefix("model.")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


class WholeWeights:
    """Reads whole weights of a model that is sharded over all ranks."""

    config: Config
    module: TokenLogprobs
    device: torch.device

    def named_full_parameters(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Weights:
        """Yield (Hugging Face name, full tensor in `dtype`), one at a time and in a fixed order; collective.

        Tied weights come once. A weight is cast, then gathered on `device`; on `meta` no weight is gathered, and the
        call is not collective. Adapters are merged into their weights in float32. Persistent buffers come last, in
        their own dtype. Copy each tensor before taking the next: on one rank it is the live weight.
        """
        device = device or self.device
        model = self.module.model
        adapters = {name: p.detach().to(device) for name, p in named_adapters(model)}
        for name, parameter in named_base_parameters(model):
            full = gather(parameter.detach().to(device, dtype))
            yield name, merge(name, full, adapters)
        for name, buffer in named_persistent_buffers(model):
            yield name, buffer.to(device)

    def sent_parameters(self, device: torch.device | str | None = None) -> Weights:
        """Yield the full weights that rollout gets, parameters in the dtype of computing; collective."""
        dtype = compute_dtype(self.config, self.device)
        return as_in_files(self.module.model, self.named_full_parameters(dtype, device))

    def sent_specs(self) -> list[ParameterSpec]:
        """Return the specs of the tensors of `sent_parameters`, in its order; not collective."""
        named = self.sent_parameters("meta")
        return [ParameterSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]


def as_in_files(model: PreTrainedModel, named: Weights) -> Weights:
    """Yield full weights with the names and shapes of a checkpoint's files, one layer after the other.

    Some weights change when transformers reads them: it fuses the experts of a layer, for example. The engine takes
    them as they are in the files.
    """
    if not get_model_conversion_mapping(model, add_legacy=False):
        yield from named
        return
    for _, layer in itertools.groupby(named, key=lambda item: _LAYER.match(item[0])[0]):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _fill_from_rank_0(
    model: PreTrainedModel, path: str, dtype: torch.dtype, adapters: dict[str, Tensor]
) -> None:
    """Read a checkpoint on rank 0, and give every rank its shard of the weights and all buffers.

    `adapters` are full new weights by name; a base model's checkpoint has no adapters.
    """
    is_reader = dist.get_rank() == 0
    full = _read_model(path, dtype) if is_reader else None
    if is_reader and _is_tied(model) and not _is_tied(full):
        raise ValueError(
            f"--model {path}: its config.json says that head and embedding are one (tie_word_embeddings), and its "
            'safetensors have two that differ; write "tie_word_embeddings": false there'
        )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = full.state_dict() | adapters if is_reader else {}
    set_model_state_dict(model, state, options=options)
    # A state dict lacks some buffers, such as rotary frequencies.
    for name, buffer in model.named_buffers():
        if is_reader:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, src=0)


def _is_tied(model: PreTrainedModel) -> bool:
    """Return whether the head is the embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _read_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Read a model to host memory. If all weights are bfloat16 they stay so, and each rank widens its shard."""
    options = {"use_safetensors": True, "trust_remote_code": False}
    # Wrong shapes are refused below: the error of transformers only points at a table that it printed.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    stored_dtypes = {stored_dtype for stored_dtype, _ in read_headers(path).values()}
    read_as = torch.bfloat16 if stored_dtypes == {"BF16"} else dtype
    full, info = AutoModelForCausalLM.from_pretrained(path, dtype=read_as, **options)
    if dtype != torch.bfloat16 and torch.bfloat16 in {buffer.dtype for buffer in full.buffers()}:
        # Buffers made in bfloat16 would be rounded, so read again in the wanted dtype.
        full, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"--model {path}: {name} is {list(stored)} in its safetensors and {list(expected)} by its config.json; "
            "the two are not of one model"
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"--model {path}: its safetensors lack {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}, which its "
            "config.json asks for; fetch the model again, or fix the names"
        )
    return full


def recompute_layers(layers: list[nn.Module]) -> None:
    """Keep each layer's input only, and compute the rest again in the backward pass: memory for time.

    Layers stay in eval mode. transformers' own function uses training mode, and that turns on dropout in some families.
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def compiles(config: Config, device: torch.device) -> bool:
    """Return whether layers are compiled: --compile, and by default only on GPUs."""
    return device.type == "cuda" if config.compile is None else config.compile


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile each layer's forward, without FSDP's hooks and the recomputation around it.

    Layers share their code and so their graphs. Each kind of input has a graph: with or without gradient, with or
    without adapters. Masked attention has more kinds: one row or several, with or without a mask. After eight graphs
    torch warns and runs a layer uncompiled. Frozen weights make more kinds, so a reference model is not compiled.
    """
    for layer in layers:
        layer.forward = compiled(layer.forward)


def compiled(function: Callable) -> Callable:
    """Return a function of a layer or of the head, compiled once for micro-batches of all sizes.

    The sizes of _VARYING are symbols from the first micro-batch on; all other numbers are constants. Below FSDP,
    torch's `dynamic=True` does worse: FlexAttention refuses its symbol for the size of a head, and each epsilon costs a
    conversion on the host.
    """
    torch.compiler.config.dynamic_sources = ", ".join(_VARYING)
    torch._dynamo.config.specialize_float = True
    return torch.compile(function)


def embedding_apart(config: Config, model: PreTrainedModel) -> list[nn.Module]:
    """Return [embedding] if FSDP shards it apart: with `--save-memory head`, unless it is also the head.

    The head stays in the root's group. FSDP keeps that group gathered, so the head's recomputation in the backward pass
    finds whole weights. Its gradient is reduced last, when activations are gone.
    """
    is_apart = "head" in config.save_memory and not _is_tied(model)
    return [model.get_input_embeddings()] if is_apart else []
