"""The families of models that can be trained: vLLM and the trainer compute the same log-probs for them."""

from transformers import AutoConfig, PreTrainedConfig

from asyncrl.config import Config

COMPARED = (
    "arcee", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "falcon_h1", "flex_olmo", "gemma", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4",
    "glm4_moe", "gpt-sw3", "gpt2", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2",
    "lfm2", "lfm2_moe", "llama", "mellum", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe",
    "qwen3_next", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
)  # fmt: skip
"""Model types of config.json whose log-probs agree to 1e-5 nats in float32, before and after an update.

The test tests/engine/test_family_logprobs.py compares each of them, and explains how to try another one.
"""
BFLOAT16_ON_CPU = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Model types whose CPU kernels in vLLM are for bfloat16 only: gated delta rules."""
WITH_TORCHVISION = ("qwen3_5_moe_text", "qwen3_5_text")
"""Model types whose module in vLLM imports torchvision."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads with a CPU kernel in vLLM."""


def read_config(path: str) -> PreTrainedConfig:
    """Read a model's config.json. Raises ValueError, in one line, for a family outside COMPARED.

    A model that needs code of its own folder is outside, because transformers does not have its family.
    """
    fields, _ = PreTrainedConfig.get_config_dict(path)
    family = fields.get("model_type")
    if family not in COMPARED:
        raise ValueError(
            f"--model {path} is a {family}, whose log-probs in vLLM and in the trainer differ or were not compared "
            f"(docs/devices.md#which-models); take one of {', '.join(COMPARED)}"
        )
    return AutoConfig.from_pretrained(path, trust_remote_code=False)


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Return the longest sequence, tokens, that trainer and engine compute alike; None if there is no limit.

    A model with `longrope` has other factors beyond its original context. In transformers the longest sequence of a
    micro-batch chooses them, and in vLLM the longest sequence allowed.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min(filter(None, limits), default=None)


def check_engine(config: Config, model: PreTrainedConfig, device: str) -> None:
    """Raise ValueError for a missing package, and for a model without kernels of vLLM on a device, `cpu` or `cuda`."""
    name = f"--model {config.model} is a {model.model_type}"
    if device == "cpu":
        size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        if size not in CPU_HEAD_SIZES:
            sizes = ", ".join(map(str, CPU_HEAD_SIZES))
            raise ValueError(
                f"{name} with attention heads of {size}, and on a CPU vLLM has kernels for {sizes}; take a model with "
                "one of them, or a GPU"
            )
        if config.dtype != "bfloat16" and model.model_type in BFLOAT16_ON_CPU:
            raise ValueError(
                f"{name}, of which vLLM has kernels for a CPU in bfloat16 only; add --dtype bfloat16"
            )
    if model.model_type in WITH_TORCHVISION:
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError) as error:  # RuntimeError: it was built for another torch
            raise ValueError(
                f"{name}, which vLLM cannot load without torchvision ({error}); docs/devices.md says how to install it"
            ) from None
