"""Low-rank adapters (LoRA, arXiv 2106.09685): a frozen weight W and a trained B·A of rank r beside it.

A layer computes W·x + (alpha / r)·B·(A·x). A starts random and B at zero, so training begins at the base model. The
factor is always 2, because alpha is 2·r. All linear layers of the decoder blocks are adapted. Embedding, head and fused
experts are not. Engines get W + 2·B·A under the name of W, and see no difference.

The library `peft` has this layer too, but needs `accelerate`. Adapters are written in peft's format.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from asyncrl.trainer.sharding import gather
from asyncrl.weights.transport import Weights

ADAPTER_NAMES = (".lora_A", ".lora_B")
"""Endings of the names of an adapter's parameters."""
SCALE = 2
"""alpha / r."""


def add_adapters(model: nn.Module, blocks: list[nn.Module], rank: int) -> None:
    """Freeze the model, and give every linear layer in `blocks` a float32 adapter of `rank`, not yet initialised.

    Raises ValueError if there is no linear layer.
    """
    model.requires_grad_(False)
    layers = [layer for block in blocks for layer in block.modules() if type(layer) is nn.Linear]
    if not layers:
        raise ValueError(
            f"--lora-rank {rank}: no linear layer to adapt in {type(model).__name__}; use --lora-rank 0"
        )
    for layer in layers:
        make = {"dtype": torch.float32, "device": layer.weight.device}
        layer.lora_A = nn.Parameter(torch.empty(rank, layer.in_features, **make))
        layer.lora_B = nn.Parameter(torch.empty(layer.out_features, rank, **make))
        layer.is_adapted = True
        layer.register_forward_hook(_add_adapter_output)


def _add_adapter_output(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Return a linear layer's output [..., out], plus its adapter's unless it is switched off."""
    if not layer.is_adapted:
        return output
    return output + SCALE * functional.linear(
        functional.linear(inputs[0], layer.lora_A), layer.lora_B
    )


def named_adapters(model: nn.Module) -> Weights:
    """Yield (name, parameter) of every adapter matrix, A and B."""
    return ((name, p) for name, p in model.named_parameters() if name.endswith(ADAPTER_NAMES))


def named_base_parameters(model: nn.Module) -> Weights:
    """Yield (Hugging Face name, parameter) of the model without its adapters, tied ones once."""
    return ((name, p) for name, p in model.named_parameters() if not name.endswith(ADAPTER_NAMES))


def initial_adapters(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return full float32 adapters by parameter name: A is uniform in ±1/√in, as in peft, and B is zero."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, parameter in named_adapters(model):
        state[name] = torch.zeros(parameter.shape)
        if name.endswith(".lora_A"):
            bound = 1 / math.sqrt(parameter.shape[1])
            state[name].uniform_(-bound, bound, generator=generator)
    return state


@torch.no_grad()
def merge(name: str, weight: Tensor, adapters: dict[str, Tensor]) -> Tensor:
    """Return the full parameter `name`: W + (alpha / r)·B·A, computed in float32, if it has an adapter.

    `weight` is the base's full parameter. No input changes. Sharded adapters make this collective.
    """
    owner = name.removesuffix(".weight")
    if name == owner or f"{owner}.lora_A" not in adapters:
        return weight
    matrices = [adapters[f"{owner}.{which}"] for which in ("lora_B", "lora_A")]
    return torch.addmm(weight.float(), *map(gather, matrices), alpha=SCALE).to(weight.dtype)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the model's adapters off inside the block, if it has some."""
    adapted = [layer for layer in model.modules() if hasattr(layer, "is_adapted")]
    for layer in adapted:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in adapted:
            layer.is_adapted = True


def write_adapter(folder: Path, adapters: dict[str, Tensor], base_path: str) -> None:
    """Write full adapters by parameter name to the new `folder`, for `peft.PeftModel.from_pretrained`."""
    folder.mkdir()
    tensors = {f"base_model.model.{name}.weight": tensor for name, tensor in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    rank = next(len(tensor) for name, tensor in adapters.items() if name.endswith(".lora_A"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_path,
        "r": rank,
        "lora_alpha": SCALE * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
