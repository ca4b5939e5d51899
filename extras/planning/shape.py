"""The shape of a causal LM, from its config.json: nothing is loaded."""

import re
from dataclasses import dataclass

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


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
    needs_mask: bool = False
    """Whether a GPU cannot compute its attention without a mask (asyncrl/trainer/attention.py)."""


def read_shape(model_path: str) -> ModelShape:
    """Read the shape of the model in a folder, or of a Hugging Face name, built from its config on no device.

    Raises ValueError, in one line, if no config can be had.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    except OSError as error:  # all of the hub's own errors are
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--model {model_path}: neither a folder with a config.json nor to be had: {reason}"
        ) from None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if found := _LAYER.search(name):
            layers[found[1]] = layers.get(found[1], 0) + size
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
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
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        needs_mask=bool(head_dim % 8 or head_dim > 256)
        or not (model._supports_attention_backend and model._supports_sdpa),
    )
