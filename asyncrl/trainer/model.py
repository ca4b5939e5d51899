"""How the trainer's model comes to be: built empty and sharded on every rank (FSDP2), then filled from rank 0.

Trained weights are float32 masters. A GPU computes in bfloat16 (FSDP2 mixed precision, float32 gradient reduction), the
CPU in float32, or both as --dtype says; what is frozen beside adapters is kept in that dtype.
asyncrl/trainer/attention.py says with which attention.
"""

import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
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
from asyncrl.weights.transport import ParameterSpec, Weights

_VARYING = (
    r"L\['hidden_states'\]:0",
    r"L\['hidden_states'\]:1",
    r"L\['position_embeddings'\].*:0",
    r"L\['position_embeddings'\].*:1",
    r"L\['(attention_mask|position_ids|kwargs)'\](?!\.BLOCK_SIZE)",
    r"L\['(hidden|targets)'\]:0",
)
"""What varies between micro-batches, of arguments of layers and of TokenLogprobs.score_rows, as torch names it: rows
and tokens of tensors, and all sizes and numbers of masks and bounds but that of FlexAttention's blocks."""
_LAYER = re.compile(r"(?:.*?\.\d+\.)?")
"""The part of a weight's name that names its layer; empty outside of layers."""
transformers_logging.disable_progress_bar()  # loading and saving would draw over ours


def trainer_mesh(replicas: int, device: torch.device) -> DeviceMesh:
    """Mesh of all ranks: one line to shard the model over, or `replicas` lines of neighbours (HSDP); collective.

    torchrun numbers the ranks node by node: with a replica per node, weights are gathered within nodes only.
    """
    num_ranks = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (num_ranks,))
    shape = (replicas, num_ranks // replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def compute_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Dtype that the model computes in, and that its weights are sent in."""
    return getattr(torch, config.dtype_on(device.type))


def load_model(
    config: Config, path: str, mesh: DeviceMesh, device: torch.device, *, is_trained: bool = True
) -> TokenLogprobs:
    """Build an empty sharded model on every rank, then fill it from rank 0, who alone reads the weights.

    What is not trained, as a reference or below adapters, is kept in the dtype of computing.
    """
    hf_config = read_config(path)
    dtype = compute_dtype(config, device) if config.lora_rank or not is_trained else torch.float32
    with torch.device("meta"):
        attention = choose_attention(device, hf_config)
        model = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    module = TokenLogprobs(model.eval(), trains_entropy=config.optim.entropy_coef > 0)
    offload = "optimizer" in config.save_memory
    if is_trained and config.advantage == "gae":
        hidden_size = model.get_output_embeddings().in_features
        module.value_head = ValueHead(hidden_size)
        shard([module.value_head], mesh, None, offload)
    layers = [layer for layer in model.modules() if type(layer).__name__ in model._no_split_modules]
    if config.lora_rank:
        add_adapters(model, layers, config.lora_rank)
    if is_trained and compiles(config, device):
        compile_layers(layers)
        # Logits in float32 are written once in a pass then, and not for each operation on them.
        module.score_rows = compiled(module.score_rows)
    if is_trained and "activations" in config.save_memory:
        recompute_layers(layers)
    parts = [*layers, *embedding_apart(config, model), module]
    shard(parts, mesh, compute_dtype(config, device), offload)
    module.to_empty(device="cpu" if offload else device)
    _move_buffers(model, device)
    _fill_from_rank_0(model, path, dtype, initial_adapters(model, config.seed))
    if module.value_head is not None:
        nn.init.zeros_(module.value_head.weight)
    return module.requires_grad_(False) if not is_trained else module


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Put buffers where layers compute: FSDP streams offloaded weights there by itself, but not these."""
    for owner in model.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def named_persistent_buffers(model: nn.Module) -> Weights:
    """Yield (Hugging Face name, buffer) of each buffer that a checkpoint of the model has; none is ever trained."""
    for owner_name, owner in model.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{owner_name}.{name}", buffer


def trained_names(module: TokenLogprobs) -> dict[Tensor, str]:
    """Return the trained parameters, each with its name: that of Hugging Face, or that of the value head."""
    return {
        parameter: name.removeprefix("model.")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


class WholeWeights:
    """What others read of a trained model, whose shards all ranks have."""

    config: Config
    module: TokenLogprobs
    device: torch.device

    def named_full_parameters(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> Weights:
        """Yield (Hugging Face name, full tensor in `dtype`) one at a time, tied weights once, in fixed order;
        collective.

        Each is cast before it is gathered, on `device`: that which computes, or `meta`, where nothing is gathered and
        no other rank is waited for. Adapters are merged into the weights they belong to, in float32. Persistent buffers
        follow the parameters, in the dtype that they have. Copy each tensor before taking the next: on one rank it is
        the live weight.
        """
        device = device or self.device
        model = self.module.model
        adapters = {name: p.detach().to(device) for name, p in named_adapters(model)}
        for name, parameter in named_base_parameters(model):
            full = parameter.detach().to(device, dtype).full_tensor()
            yield name, merge(name, full, adapters)
        for name, buffer in named_persistent_buffers(model):
            yield name, buffer.to(device)

    def sent_parameters(self, device: torch.device | str | None = None) -> Weights:
        """Yield the full weights as they are sent to rollout: parameters in the dtype of computing; collective."""
        dtype = compute_dtype(self.config, self.device)
        return as_in_files(self.module.model, self.named_full_parameters(dtype, device))

    def sent_specs(self) -> list[ParameterSpec]:
        """Return the specs of what `sent_parameters` yields, in the same order; not collective."""
        named = self.sent_parameters("meta")
        return [ParameterSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named]


def as_in_files(model: PreTrainedModel, named: Weights) -> Weights:
    """Yield full weights with the names and shapes that they have in a checkpoint's files, one layer after the other.

    transformers changes some weights as it reads them: it fuses the experts of a layer, for example. vLLM reads what is
    in the files.
    """
    if not get_model_conversion_mapping(model, add_legacy=False):
        yield from named
        return
    for _, layer in itertools.groupby(named, key=lambda item: _LAYER.match(item[0])[0]):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _fill_from_rank_0(
    model: PreTrainedModel, path: str, dtype: torch.dtype, adapters: dict[str, Tensor]
) -> None:
    """Read a checkpoint on rank 0 and give every rank its shard of the weights, and the buffers whole.

    `adapters` are those that no checkpoint of a base model holds, full, by name.
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
    # rotary frequencies and the like, which no state dict holds
    for name, buffer in model.named_buffers():
        if is_reader:
            buffer.copy_(full.get_buffer(name))
        dist.broadcast(buffer, src=0)


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the head is the embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _read_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Read a model to host memory; its weights stay bfloat16 where all are, and every rank widens its shard."""
    options = {"use_safetensors": True, "trust_remote_code": False}
    # Shapes that differ are taken, and refused here: transformers would only point at a table printed before.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    read_as = torch.bfloat16 if _stored_dtypes(path) == {"BF16"} else dtype
    full, info = AutoModelForCausalLM.from_pretrained(path, dtype=read_as, **options)
    if dtype != torch.bfloat16 and torch.bfloat16 in {buffer.dtype for buffer in full.buffers()}:
        # One that is made in the dtype of the weights would be rounded.
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


def _stored_dtypes(path: str) -> set[str]:
    """Dtypes of the weights in a folder's safetensors files, as they name them."""
    dtypes = set()
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            dtypes |= {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118  it is no dict
    return dtypes


def recompute_layers(layers: list[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass and compute the rest again: memory for time.

    Layers stay in eval mode. transformers' own way puts them in training mode, which turns dropout on in some families.
    """
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )


def compiles(config: Config, device: torch.device) -> bool:
    """Whether layers are compiled: as --compile says, or without it on GPUs."""
    return device.type == "cuda" if config.compile is None else config.compile


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile each layer's forward, without FSDP's hooks and the recomputation around it.

    Layers share their code and so their graphs: one per kind of input (with gradient or without, with adapters or
    without; with torch's masked attention also one row or more, masked or not). Past eight of them torch warns and runs
    a layer uncompiled. A reference model, whose frozen weights make other kinds, is not compiled.
    """
    for layer in layers:
        layer.forward = compiled(layer.forward)


def compiled(function: Callable) -> Callable:
    """Return a function of a layer or of the head, compiled once for micro-batches of all sizes.

    Their sizes are symbols from the first micro-batch on, and all other numbers constants. Below FSDP, torch's
    `dynamic=True` makes symbols of the size of a head, which FlexAttention refuses, and of each epsilon, which a kernel
    on the host then converts.
    """
    torch.compiler.config.dynamic_sources = ", ".join(_VARYING)
    torch._dynamo.config.specialize_float = True
    return torch.compile(function)


def embedding_apart(config: Config, model: PreTrainedModel) -> list[nn.Module]:
    """The embedding, which FSDP then gathers and frees by itself; none without `--save-memory head`, or where it is
    also the head.

    The head stays with what is outside of layers. Its recomputation in the backward pass finds whole weights because
    that group, the root's, is kept gathered, and its gradient is reduced at the very end, when activations are gone.
    """
    is_apart = "head" in config.save_memory and not _is_tied(model)
    return [model.get_input_embeddings()] if is_apart else []


def shard(
    modules: list[nn.Module], mesh: DeviceMesh, dtype: torch.dtype | None, offload: bool
) -> None:
    """Shard each module's float32 parameters; it computes in `dtype`, None for theirs, and gradients are reduced in
    float32.

    `offload` keeps the shards in host memory. Gradients then go there too, and the optimizer steps there, as it
    makes its state beside the weights.
    """
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offloaded = (
        CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    )
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=mixed, offload_policy=offloaded)
