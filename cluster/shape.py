"""The shape of a causal LM, from config.json and the headers of its safetensors files: nothing is loaded."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ModelShape:
    """Sizes that memory depends on."""

    num_parameters: int
    """All, tied weights once."""
    layer_parameters: int
    """Of the largest layer."""
    root_parameters: int
    """Outside of the layers: embedding, head, last norm."""
    largest_parameter: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int


def read_shape(model_path: str) -> ModelShape:
    """Read the shape of the model in a folder.

    Without safetensors files the model is built from its config, on no device. Raises ValueError, in one line, if no
    config can be had.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    except OSError as error:  # all of the hub's own errors are
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"--model {model_path}: neither a folder with a config.json nor to be had: {reason}") from None
    tied = bool(getattr(config, "tie_word_embeddings", False))
    files = _weight_files(Path(model_path))
    sizes = parameter_sizes(files, tied) if files else _sizes_of_empty_model(config)
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if found := _LAYER.search(name):
            layers[found[1]] = layers.get(found[1], 0) + size
    heads = config.num_attention_heads
    return ModelShape(
        num_parameters=sum(sizes.values()),
        layer_parameters=max(layers.values(), default=0),
        root_parameters=sum(sizes.values()) - sum(layers.values()),
        largest_parameter=max(sizes.values()),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads: those of the index, or the single one. Others may lie beside them."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    single = folder / "model.safetensors"
    return [single] if single.exists() else []


def parameter_sizes(files: list[Path], tied: bool) -> dict[str, int]:
    """Elements of every parameter, from the headers; a head that is `tied` to the embedding is left out.

    A safetensors file begins with the length of its header, 8 bytes little-endian, and the header as JSON.
    """
    sizes = {}
    for file in files:
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        sizes |= {name: math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    if tied:
        sizes.pop(_TIED_HEAD, None)
    return sizes


def _sizes_of_empty_model(config) -> dict[str, int]:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {name: parameter.numel() for name, parameter in model.named_parameters()}
