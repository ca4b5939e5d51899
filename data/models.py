"""Where the weights of `--model` are: a tiny model made here, a local folder, or the Hugging Face hub."""

import functools
import json
import os
from pathlib import Path

from config import MULTI_TURN_TASKS

TINY_MODELS = Path(__file__).resolve().parent.parent / ".cache"
"""Where tiny models are kept: beside the code that makes them, wherever a run is started from."""

_ALLOWED = "give a folder with config.json and *.safetensors, or a Hugging Face name such as Qwen/Qwen3-8B-Base"
_TOKENIZERS = (".model", ".tiktoken")
MAX_MODEL_FILES_BYTES = 60 << 20
"""Below the largest message of a swarm."""


def resolve_model(model: str, task: str) -> str:
    """Return the local folder of a model: a path as it is, or a Hugging Face name's cached or downloaded snapshot.

    `tiny` is the tiny model of the task: an environment's own, and for any other task the one that adds.
    Raises ValueError, within seconds also without network, if it is neither, or lacks a part that can be used.
    """
    if model == "tiny" and task in MULTI_TURN_TASKS:
        from data.tiny_agent import tiny_agent_path

        return str(tiny_agent_path(task, TINY_MODELS))
    if model == "tiny" and (task == "gsm8k" or task.startswith(("reasoning_gym:", "environment:"))):
        raise ValueError(f"--model tiny: there is no tiny model for --task {task}; give --model: {_ALLOWED[5:]}")
    if model == "tiny":
        from data.tiny import tiny_model_path

        return str(tiny_model_path(TINY_MODELS))
    folder = model if os.path.isdir(model) else _snapshot(model)
    _check_folder(model, folder)
    return folder


def model_files(folder: str) -> dict[str, bytes]:
    """The files of a model's folder that an engine needs beside its weights, by name: configuration and tokenizer.

    Raises ValueError if they are too large to be sent to a machine that joins.
    """
    kept = (path for path in sorted(Path(folder).iterdir()) if path.suffix in (".json", ".jinja", ".txt", *_TOKENIZERS))
    files = {path.name: path.read_bytes() for path in kept if not path.name.endswith(".index.json")}
    if (total := sum(map(len, files.values()))) > MAX_MODEL_FILES_BYTES:
        raise ValueError(
            f"configuration and tokenizer in {folder} have {total} bytes, at most {MAX_MODEL_FILES_BYTES} go to "
            "machines that join; take away what is neither"
        )
    return files


def _snapshot(model: str) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return snapshot_download(model, local_files_only=True)
    except HFValidationError:
        raise ValueError(f"--model {model}: no such folder; {_ALLOWED}") from None
    except LocalEntryNotFoundError:
        pass
    try:
        return snapshot_download(model, etag_timeout=10, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
    except OSError as error:  # all of the hub's own errors are OSErrors: offline, unreachable, not found, gated
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"--model {model}: no such folder, not cached, and the hub says: {reason}; {_ALLOWED}"
        ) from None


def _check_folder(model: str, folder: str) -> None:
    """Raise ValueError for what would be found out only after a minute, or in the middle of a library."""
    from safetensors import SafetensorError, safe_open

    names = sorted(os.listdir(folder))
    if "config.json" not in names:
        raise ValueError(f"--model {model}: its folder has no config.json; {_ALLOWED}")
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights:
        raise ValueError(
            f"--model {model}: its folder has no *.safetensors, and weights of other formats are not read, as a "
            "pickle can run code; convert them with save_pretrained of transformers"
        )
    for name in weights:
        try:
            with safe_open(os.path.join(folder, name), "np"):
                pass  # opening reads the header, which has the length of the file
        except SafetensorError as error:
            raise ValueError(f"--model {model}: {name} is cut off or broken ({error}); fetch it again") from None
    if not any(name.startswith(("tokenizer.", "vocab.", "tekken.")) or name.endswith(_TOKENIZERS) for name in names):
        raise ValueError(f"--model {model}: its folder has no tokenizer (tokenizer.json or the like); put it there")
    _check_own_code(model, folder)


def _check_own_code(model: str, folder: str) -> None:
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    if "auto_map" in config:
        from transformers import CONFIG_MAPPING

        if config.get("model_type") not in CONFIG_MAPPING:
            raise ValueError(
                f"--model {model}: it brings its own code (auto_map in config.json), which is not run here; "
                "take a model that transformers has itself"
            )


@functools.cache
def load_tokenizer(model_path: str):
    """The tokenizer of a model directory or hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)


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
