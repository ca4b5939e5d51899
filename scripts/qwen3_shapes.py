"""Random models in the shapes of Qwen3, for measurements and tests that need a size and no knowledge."""

import tomllib
from pathlib import Path

_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SHAPES, _COMMON = _FILE["sizes"], _FILE["common"]


def qwen3_config(size: str, **changes):
    """transformers' config of a size, with `changes`."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **{**_COMMON, **SHAPES[size], "bos_token_id": None, "eos_token_id": None, **changes}
    )


def save_random_qwen3(path: Path, size: str, device: str = "cpu", **changes) -> None:
    """Write a random model in bfloat16, with the tiny task's tokenizer, whose vocabulary is smaller than the model's.

    It is made on `device`, in seconds on a GPU. `changes` are options of the config.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    from asyncrl.weights.models import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model("tiny", "addition"))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(qwen3_config(size, **ends, **changes)).to(torch.bfloat16)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()  # for whoever uses the GPU next
