"""Where the weights of `--model` are: a tiny model made here, a local folder, or the Hugging Face hub."""

import functools
import os

from config import MULTI_TURN_TASKS


def resolve_model(model: str, task: str) -> str:
    """Return the local folder of a model: a path as it is, or a Hugging Face name's cached or downloaded snapshot.

    `tiny` is the tiny model of the task: an environment's own, and for any other task the one that adds.
    Raises ValueError, within seconds also without network, if it is neither.
    """
    if model == "tiny" and task in MULTI_TURN_TASKS:
        from data.tiny_agent import tiny_agent_path

        return str(tiny_agent_path(task))
    if model == "tiny":
        from data.tiny import tiny_model_path

        return str(tiny_model_path())
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    allowed = "give a folder with config.json and *.safetensors, or a Hugging Face name such as Qwen/Qwen3-8B-Base"
    if os.path.isdir(model):
        if not os.path.exists(os.path.join(model, "config.json")):
            raise ValueError(f"--model {model}: this folder has no config.json; {allowed}")
        return model
    try:
        return snapshot_download(model, local_files_only=True)
    except HFValidationError:
        raise ValueError(f"--model {model}: no such folder; {allowed}") from None
    except LocalEntryNotFoundError:
        pass
    try:
        return snapshot_download(model, etag_timeout=10, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
    except OSError as error:  # all of the hub's own errors are OSErrors: offline, unreachable, not found, gated
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--model {model}: no such folder, not cached, and the hub says: {reason}; {allowed}"
        ) from None


@functools.cache
def load_tokenizer(model_path: str):
    """The tokenizer of a model directory or hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def stop_token_ids(model_path: str, tokenizer) -> list[int]:
    """Tokens that end a response: the tokenizer's end of sequence and those of the model's generation config."""
    from transformers import GenerationConfig

    ids = {tokenizer.eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:  # a model without generation_config.json
        configured = None
    ids.update(configured if isinstance(configured, list) else [configured])
    return sorted(ids - {None})
