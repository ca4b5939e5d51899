"""Weights for people: a folder in Hugging Face's format, with safetensors, config and tokenizer."""

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.trainer import lora
from asyncrl.trainer.model import named_persistent_buffers, trained_names
from asyncrl.trainer.new_folder import fail_together, new_folder
from asyncrl.trainer.sharding import gather
from asyncrl.weights.models import read_headers, weights_sha256

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy

GENERATION_CONFIG = "generation_config.json"
SMALL_FILES = ("", ".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt")
MAX_SMALL_BYTES = 1 << 26
"""Suffixes and size of the files that a checkpoint copies from the model's folder. A tokenizer can have 40 MB."""
VALUE_HEAD = "value_head.weight"
"""Name of the value head's weight. It is no weight of the model."""


class WeightWriter:
    """Writes weights, config and tokenizer to a folder for transformers; a thread can use it."""

    def __init__(self, policy: "Policy", dtype: torch.dtype = torch.float32):
        """Read the files of a policy's model that each checkpoint copies; collective.

        Weights are written in `dtype`, but adapters in float32.
        """
        model, config = policy.module.model, policy.config
        self.dtype = dtype
        self._base_path = policy.model_path
        # FSDP exchanges the parameters of the trained module while it computes, so this is another one.
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(
                model.config, dtype=self.dtype, trust_remote_code=False
            )
        frozen = {p: name for name, p in lora.named_base_parameters(model) if not p.requires_grad}
        self.frozen = gather_full(frozen, policy.device)
        """Full untrained weights by Hugging Face name, on rank 0: below adapters, or never trained in their family."""
        self._buffers = {
            name: buffer.to("cpu", copy=True) for name, buffer in named_persistent_buffers(model)
        }
        # Read now, so that the run can save if the folder changes.
        self._files = read_small_files(Path(self._base_path))
        # The class can have an end of sequence that config.json lacks.
        fields = json.loads(self._files["config.json"])
        self._skeleton.config.eos_token_id = fields.get("eos_token_id")
        self._needs_base = bool(config.lora_rank or config.kl_coef)

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """SHA-256 of the model's weights if a resume needs them: below adapters, or as a reference. Else empty."""
        return weights_sha256(self._base_path) if self._needs_base else ""

    def write(self, trained: dict[str, Tensor], folder: Path) -> None:
        """Write full trained weights by name to `folder`. Adapters are merged, and also written to `folder`/adapter.

        A value head is in `folder`/value_head, because engines read all safetensors of `folder` itself.
        """
        weights = trained | self._buffers
        value_head = weights.pop(VALUE_HEAD, None)
        adapters = {
            name: weights.pop(name) for name in trained if name.endswith(lora.ADAPTER_NAMES)
        }
        if adapters:
            lora.write_adapter(folder / "adapter", adapters, self._base_path)
        for name, weight in self.frozen.items():
            # One float32 copy at a time: the host may have no room for a second model.
            weights[name] = lora.merge(name, weight.float(), adapters).to(self.dtype)
        self._skeleton.save_pretrained(folder, state_dict=weights)
        # transformers has made it from config.json. The model's own file is copied below.
        (folder / GENERATION_CONFIG).unlink(missing_ok=True)
        for name, data in self._files.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(data)
        if value_head is not None:
            (folder / "value_head").mkdir()
            save_file({VALUE_HEAD: value_head}, folder / "value_head" / "value_head.safetensors")


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Return the small files of a model's folder, for example generation_config.json, by name."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix in SMALL_FILES
        and path.is_file()
        and path.stat().st_size <= MAX_SMALL_BYTES
        and not path.name.startswith((".", "adapter_"))
        and not path.name.endswith(".index.json")
    }


def gather_full(
    names: dict[Tensor, str], device: torch.device, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return full copies of parameters in host memory, by name, on rank 0; empty on other ranks; collective.

    They have `dtype`, or without one their own.
    """
    copies = {}
    for parameter, name in names.items():
        full = gather(parameter.detach().to(device))
        if dist.get_rank() == 0:
            copies[name] = full.to("cpu", dtype or full.dtype, copy=True)
    return copies


def save_weights(policy: "Policy", path: str, writer: WeightWriter | None = None) -> None:
    """Write a policy to the new folder `path` in Hugging Face's format: safetensors, config, tokenizer; collective.

    With LoRA the weights are merged, and `path`/adapter has the adapter in peft's format. Raises OSError on all ranks
    if it cannot be written; then no file is left. `writer` is the policy's, or a new one.
    """
    writer = writer or WeightWriter(policy)
    # Adapters are small, and are merged in float32.
    dtype = None if policy.config.lora_rank else writer.dtype
    trained = gather_full(trained_names(policy.module), policy.device, dtype)
    with new_folder(path) as folder, fail_together():
        if dist.get_rank() == 0:
            writer.write(trained, folder)


def describe_differences(folder: str, saved: Collection[str]) -> str:
    """Describe how a checkpoint with these names differs from the model's folder; empty if it does not."""
    read = read_headers(folder).keys()
    kinds = {
        "will lack": sorted(read - set(saved)),
        "will have, and it lacks,": sorted(set(saved) - read),
    }
    return "; ".join(
        f"{kind} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}"
        for kind, names in kinds.items()
        if names
    )
