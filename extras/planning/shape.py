"""The shape of a causal LM, from its config.json, without its weights."""

import itertools
import os
import re
import statistics
import tempfile
from collections import Counter
from dataclasses import dataclass

from asyncrl.weights.models import check_name, has_tokenizer

SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model on the hub that describe its shape and its tokens."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERTS = ".experts."
"""Part of the names of experts' weights. Names of shared experts do not have it."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model for the arithmetic of memory and time."""

    num_parameters: int
    """Parameters in all, tied weights once."""
    layer_parameters: int
    """Parameters of the largest layer."""
    root_parameters: int
    """Parameters outside of the layers: embedding, head, last norm."""
    largest_parameter: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    needs_mask: bool = False
    """True if a GPU needs a mask for its attention (asyncrl/trainer/attention.py)."""
    expert_parameters: int = 0
    """Parameters of all experts of mixtures."""
    expert_share: float = 1.0
    """Share of a layer's experts that compute one token, k of E."""
    experts_per_token: float = 0.0
    """Experts of a layer that compute one token, k, in the mean over layers; 0 without a mixture."""
    num_tensors: int = 0
    """Weights in its files. An engine loads them one by one, and each expert has its own."""

    @property
    def idle_parameters(self) -> float:
        """Parameters of the experts that do not compute one token."""
        return self.expert_parameters * (1 - self.expert_share)

    def parameters_of(self, tokens: float) -> float:
        """Return the parameters that are read for so many tokens at a time. Each token chooses its experts."""
        return self.num_parameters - self.expert_parameters * (1 - self.expert_share) ** tokens


def described_folder(model: str, cache: str) -> str:
    """Return a folder with a model's config.json, and its tokenizer if there is one: `model`, or a snapshot.

    Files that the hub's cache lacks are downloaded to the folder `cache`. The cache of the hub is not changed. A later
    run would take a part of a snapshot for the model. Raises ValueError, in one line, if there is no config.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    if os.path.isdir(model):
        return model
    check_name(model)
    file = try_to_load_from_cache(model, "config.json")
    cached = os.path.dirname(file) if isinstance(file, str) else None
    if cached and has_tokenizer(cached):
        return cached
    try:
        return snapshot_download(
            model, cache_dir=cache, allow_patterns=SMALL_FILES, etag_timeout=10
        )
    except OSError as error:  # all errors of the hub are of this class
        if cached:
            return cached
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--model {model}: its config.json is neither here nor on the hub, which reports: {reason}; to plan a run, "
            "a folder with a config.json is enough, and docs/devices.md, «Before the first run», shows how to write one"
        ) from None


def read_text_config(model: str):
    """Return transformers' config of the text part of a model, of a folder or of a Hugging Face name.

    Raises ValueError, in one line, if there is no config.
    """
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as cache:
        folder = described_folder(model, cache)
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"--model {model}: its config.json cannot be read: {reason}") from None


def read_shape(model_path: str) -> ModelShape:
    """Read the shape of the model in a folder, or of a Hugging Face name. Its config builds it on no device.

    Raises ValueError, in one line, if there is no config.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from asyncrl.trainer.attention import head_sizes
    from asyncrl.trainer.model import as_in_files, named_persistent_buffers

    config = read_text_config(model_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    layers = _layer_sizes(sizes)
    of_experts = [p for name, p in model.named_parameters() if _EXPERTS in name]
    experts_per_token = _experts_per_token(config) if of_experts else 0.0
    share = experts_per_token / len(of_experts[0]) if of_experts else 1.0
    named = itertools.chain(model.named_parameters(), named_persistent_buffers(model))
    heads = config.num_attention_heads
    (*_, head_dim) = head_sizes(config)
    return ModelShape(
        num_parameters=sum(sizes.values()),
        layer_parameters=max(layers.values(), default=0),
        root_parameters=sum(sizes.values()) - sum(layers.values()),
        largest_parameter=max(sizes.values()),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=_mlp_width(config, is_mixture=bool(of_experts)),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        needs_mask=bool(head_dim % 8 or head_dim > 256)
        or not (model._supports_attention_backend and model._supports_sdpa),
        expert_parameters=sum(p.numel() for p in of_experts),
        expert_share=share,
        experts_per_token=experts_per_token,
        num_tensors=sum(1 for _ in as_in_files(model, named)),
    )


def _layer_sizes(sizes: dict[str, int]) -> Counter[str]:
    """Return {number of a layer: its parameters}, of the sizes of all parameters by name."""
    layers: Counter[str] = Counter()
    for name, size in sizes.items():
        layer = _LAYER.search(name)
        if layer is not None:
            layers[layer[1]] += size
    return layers


def _mlp_width(config, is_mixture: bool) -> int:
    """Return the width of a layer's MLP for one token: in a mixture of k experts and the shared ones."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not is_mixture:
        return width
    of_expert = _mean(getattr(config, "moe_intermediate_size", None) or width)
    shared = getattr(config, "n_shared_experts", None) or getattr(config, "num_shared_expert", 0)
    beside = getattr(config, "shared_expert_intermediate_size", None) or _mean(shared) * of_expert
    if getattr(config, "enable_moe_block", False):  # beside a dense MLP
        beside = width
    return round(_experts_per_token(config) * of_expert + beside)


def _experts_per_token(config) -> float:
    """Return the mean number of experts that a layer chooses for a token."""
    return _mean(getattr(config, "num_experts_per_tok", None) or config.top_k_experts)


def _mean(size: int | list[int] | None) -> float:
    """Return a size, or the mean of one that a family lists by layer."""
    return statistics.fmean(size) if isinstance(size, list) else float(size or 0)
