"""A checkpoint in Hugging Face's format: it appears whole, or not at all."""

import os
import shutil
from collections.abc import Iterable

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from trainer import lora


def try_write(
    model: PreTrainedModel, base_path: str, state: dict[str, Tensor], adapters: dict[str, Tensor], path: str
) -> str | None:
    """Write a checkpoint to the new folder `path`, under a temporary name that is changed when all is on disk.

    `state`: full weights by Hugging Face name; `adapters`, full too, go to `path`/adapter. The tokenizer is that of
    `base_path`. Returns what went wrong, in one line, or None; after a failure nothing is left.
    """
    partial = path + ".tmp"
    folder = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(folder, exist_ok=True)
        _check_space(sum(t.nbytes for t in [*state.values(), *adapters.values()]), folder)
        if os.path.exists(path):
            raise FileExistsError(f"{path} exists already")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed here
        model.save_pretrained(partial, state_dict=state)
        AutoTokenizer.from_pretrained(base_path, trust_remote_code=False).save_pretrained(partial)
        if adapters:
            lora.write_adapter(os.path.join(partial, "adapter"), adapters, base_path)
        os.rename(partial, path)
    except (OSError, SafetensorError) as error:
        return f"checkpoint {path} was not written: {' '.join(str(error).split())}"
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # whatever ended it, a signal too
    return None


def copies_on_rank_0(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy parameters to host memory, by name, on rank 0; the other ranks only help to gather them; collective."""
    copies = {}
    for name, tensor in parameters:
        if dist.get_rank() == 0:
            copies[name] = tensor.to("cpu", copy=True)
    return copies


def _check_space(weight_bytes: int, folder: str) -> None:
    """Raise OSError if `folder` has no room for the weights and 32 MB beside them (tokenizer, config)."""
    needed, free = weight_bytes + 32e6, shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            f"needs {needed / 1e9:.3f} GB ({weight_bytes / 1e9:.3f} of float32 weights + 0.032), "
            f"{free / 1e9:.3f} GB free in {folder}; make room or change --runs-dir"
        )
