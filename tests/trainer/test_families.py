"""Which models keep the sequences of a packed row apart: they are trained, and the others are refused."""

import pytest
import torch
import transformers
from tiny_policy import VOCAB, random_sequences
from transformers import AutoModelForCausalLM

from algos.sampling import Sampling
from trainer.attention import check_layers
from trainer.logprobs import TokenLogprobs
from trainer.packing import bundle, pack

SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
LINEAR = {
    "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FAMILIES = {
    "biogpt": {}, "falcon": {}, "gemma": {}, "gemma3_text": {"head_dim": 8, "sliding_window": 5}, "glm4": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48}, "gpt_neox": {}, "granite": {}, "llama": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]}, "mistral": {"sliding_window": 5}, "mixtral": {}, "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "phi3": {}, "qwen2": {}, "qwen3": {"head_dim": 8},
    "qwen3_5_text": LINEAR, "smollm3": {}, "starcoder2": {},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0, **MAMBA},
}  # fmt: skip
REFUSED = {
    **dict.fromkeys(("biogpt", "falcon", "opt"), "whose mask sees no bounds"),
    **dict.fromkeys(("granitemoehybrid", "qwen3_5_text"), "m has linear_attention layers"), "lfm2": "m has conv layers",
}  # fmt: skip
"""For what; transformers calls every recurrent layer linear_attention."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_refused_exactly_if_a_sequence_of_a_packed_row_changes_another(family):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    module = TokenLogprobs(AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    sequences = random_sequences(4, seed=1)
    alone = torch.cat([scores(module, [one]) for one in sequences])
    changes = not torch.allclose(scores(module, sequences), alone, atol=1e-4)
    assert changes == (family in REFUSED)
    if not changes:
        check_layers(config, "m", shares_prefix=False)
        return
    for shares_prefix in (False, True):
        why = f"^--model .*{REFUSED[family]}; sequences of a packed row would see each other: take a model with"
        with pytest.raises(ValueError, match=why):
            check_layers(config, "m", shares_prefix)


@torch.no_grad()
def scores(module, sequences) -> torch.Tensor:
    """Log-probs of the trained tokens, the sequences packed into one row in this order."""
    batch = pack([one for sequence in sequences for one in bundle([sequence])], one_row=True)
    return module(batch.input_ids, batch.position_ids, batch.sources, batch.targets, Sampling())[0]
