"""Random models in the shapes of Qwen3, for measurements and tests that need a size and no knowledge."""

from pathlib import Path

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": False},
    "32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "num_key_value_heads": 8, "tie_word_embeddings": False},
}  # fmt: skip
"""What distinguishes the sizes, from the config.json of each."""
_COMMON = {"head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True}


def qwen3_config(size: str, **changes):
    """transformers' config of a size, with `changes`."""
    from transformers import Qwen3Config

    return Qwen3Config(**{**_COMMON, **SHAPES[size], "bos_token_id": None, "eos_token_id": None, **changes})


def save_random_qwen3(path: Path, size: str, device: str = "cpu", **changes) -> None:
    """Write a random model in bfloat16, with the tiny task's tokenizer, whose vocabulary is smaller than the model's.

    It is made on `device`, in seconds on a GPU. `changes` are options of the config.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from data.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(qwen3_config(size, **ends, **changes)).to(torch.bfloat16)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()  # for whoever uses the GPU next
