"""Tiny random models of any family of causal language models of transformers, and their log-probs."""

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from asyncrl.trainer.attention import attention_inputs, choose_attention
from asyncrl.trainer.logprobs import TokenLogprobs
from asyncrl.trainer.packing import Bundle, Layout, TrainSequence, pack
from asyncrl.trainer.sampling import Sampling
from extras.trees.attention import attention_mask

SIZES = {
    "vocab_size": 150, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 192, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
"""Heads of 32, as vLLM has no attention for smaller ones on a CPU."""
SIZES_IF_KNOWN = {
    "moe_intermediate_size": 32, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "vocab_size_per_layer_input": 150, "n_embd": 128, "n_layer": 2,
    "n_head": 4, "n_inner": 192, "ffn_dim": 192, "word_embed_proj_dim": 128, "num_layers": 2, "n_layers": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1,
}  # fmt: skip
"""Sizes that are given only to a family that has them, as others would seem to have experts."""
ONE_OF_EACH = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {
    "head_dim": None, "num_key_value_heads": 4, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "q_lora_rank": 64, "kv_lora_rank": 64,
}  # fmt: skip
"""Latent attention."""
CHANGES = {
    "bamba": {"attn_layer_indices": [1]},
    "bitnet": {"head_dim": None},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "falcon_h1": {"mamba_d_ssm": 256},
    "falcon": {"head_dim": None, "num_kv_heads": 4, "ffn_hidden_size": 192},
    "gemma2": {"sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {"sliding_window": 5, "final_logit_softcapping": 9.0},
    "gemma4_text": {
        "num_experts": None, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 64,
    },
    "glm4_moe_lite": LATENT,
    "granite": {"logits_scaling": 3.0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "logits_scaling": 3.0},
    "hyperclovax": {"logits_scaling": 0.3},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": LATENT | ONE_OF_EACH,
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "minicpm3": LATENT,
    "mistral": {"sliding_window": 5},
    "olmoe": {"head_dim": None},
    "qwen3_5_moe_text": ONE_OF_EACH,
    "qwen3_5_text": ONE_OF_EACH,
    "qwen3_next": ONE_OF_EACH,
    "stablelm": {"head_dim": None},
    "youtu": LATENT,
}  # fmt: skip
"""What a family needs besides; None leaves a size out."""
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 24,
}  # fmt: skip
"""Rotary embeddings that change beyond 24 tokens."""
LONG_PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}
GAIN = 4
"""Factor of the matrices that transformers makes: log-probs are then far from equal, and an error in any shows."""


def tiny_config(family: str, **options) -> PreTrainedConfig:
    """Return the configuration of a tiny model of a family, with other options if need be.

    Raises ValueError for a family that is more than a text model, as its parts would have their usual sizes.
    """
    default = AutoConfig.for_model(family)
    if default.get_text_config() is not default:
        raise ValueError(f"a {family} has more than text; its text model is a family of its own")
    sizes = {name: size for name, size in SIZES_IF_KNOWN.items() if hasattr(default, name)}
    sizes |= SIZES | CHANGES.get(family, {}) | options
    return AutoConfig.for_model(
        family, **{name: size for name, size in sizes.items() if size is not None}
    )


def tiny_model(config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel:
    """Return a random model in float32, of which no weight and no persistent buffer is 0 or 1."""
    torch.manual_seed(0)
    attention = attention or choose_attention(torch.device("cpu"), config)
    options = {"dtype": torch.float32, "attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(GAIN) if parameter.ndim > 1 else parameter.add_(
                0.2 * torch.randn_like(parameter)
            )
        for name, buffer in model.named_buffers():
            if name in model.state_dict() and buffer.is_floating_point():
                buffer.add_(0.2 * torch.randn_like(buffer))
    return model


@torch.no_grad()
def packed_scores(module: TokenLogprobs, bundles: list[Bundle], layout: Layout) -> Tensor:
    """Return log-probs of the trained tokens, [N] nats, one bundle after the other."""
    batch = pack(bundles, layout)
    seen = attention_inputs(module.attention, batch)
    if batch.visible_until is not None:
        seen = {"attention_mask": attention_mask(module.attention, batch.visible_until)}
    inputs = (batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())
    return module(*inputs, seen).logprobs


@torch.no_grad()
def plain_scores(model: PreTrainedModel, sequences: list[TrainSequence]) -> Tensor:
    """Return the same by the logits of transformers, which reads each sequence alone."""
    scores = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.tokens)
        logprobs = model(tokens[None]).logits[0, :-1].double().log_softmax(dim=-1)
        scores.append(logprobs.gather(1, tokens[1:, None])[sequence.loss_mask[1:], 0])
    return torch.cat(scores).float()
