"""Checkpoints: weights in Hugging Face's format for people, and shards to continue from.

`save` writes a checkpoint, and `restore_training_state` reads its shards. torch.distributed.checkpoint writes them as
safetensors: they contain no pickle, and any number of ranks can read them. Each rank saves in a thread, from copies in
host memory. A failure of one rank is a failure of all.
"""

import concurrent.futures
import contextlib
import datetime
import functools
import itertools
import json
import os
import shutil
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.cluster.stacks import dump_stacks
from asyncrl.runlog.manifest import (
    KEPT_TO_RESUME,
    RESUME_FOLDER,
    flush,
    list_checkpoints,
    parse_step,
    remove,
    weights_sha256,
    write_manifest,
)
from asyncrl.runlog.plain import encode
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.trainer import lora
from asyncrl.trainer.model import named_persistent_buffers, trained_names

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy

# Rank 0 alone reads the shards to make weights for people. torch would warn of that at each checkpoint.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

SHARD_FILE_BYTES = 1 << 30
"""Size at which a rank begins another file of shards, bytes. safetensors copies a file in memory before it writes."""
GENERATION_CONFIG = "generation_config.json"
SMALL_FILES = ("", ".jinja", ".json", ".md", ".model", ".py", ".txt")
MAX_SMALL_BYTES = 1 << 20
"""Suffixes and size of the small files that a checkpoint copies from the model's folder."""
VALUE_HEAD = "value_head.weight"
"""Name of the value head's weight. It is no weight of the model."""
VALUES = "values"
"""Name of the plain values of a training state: the bytes of their JSON."""


# New folders


@contextlib.contextmanager
def fail_together(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on all ranks of a group; collective. If it fails on one rank, raise OSError on all."""
    failure = ""
    try:
        yield
    except Exception as error:
        failure = f"rank {dist.get_rank()}: {describe(error)}"
    failures = [""] * dist.get_world_size(group)
    dist.all_gather_object(failures, failure, group)
    if any(failures):
        raise OSError(next(filter(None, failures)))


def describe(error: Exception) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@contextlib.contextmanager
def new_folder(path: Path | str, group: dist.ProcessGroup | None = None) -> Iterator[Path]:
    """Give the ranks of a group a new folder to write to; collective. Only rank 0 needs its path.

    The folder is `path`.tmp until the end of the block. Then it is flushed to the disk and gets its name. If a rank
    fails, all raise OSError, in one line, and nothing is left.
    """
    folder = Path(f"{path}.tmp")
    is_first = dist.get_rank() == 0
    try:
        with fail_together(group):
            if is_first:
                if Path(path).exists():
                    raise FileExistsError(f"{path} exists already")
                remove(folder)  # left by a run that was killed here
                folder.mkdir(parents=True)
        yield folder
        with fail_together(group):
            if is_first:
                for written in [folder, *folder.rglob("*")]:
                    flush(written)
                folder.rename(path)
                flush(folder.parent)
    except (OSError, RuntimeError) as error:
        raise OSError(f"checkpoint {path} was not written: {error}") from error
    finally:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)


# Weights for people


class WeightWriter:
    """Writes weights, config and tokenizer to a folder for transformers; a thread can use it."""

    def __init__(self, policy: "Policy"):
        """Read the files of a policy's model that each checkpoint copies; collective."""
        model = policy.module.model
        self._base_path = policy.model_path
        # FSDP exchanges the parameters of the trained module while it computes, so this is another one.
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(
                model.config, dtype=torch.float32, trust_remote_code=False
            )
        frozen = {p: name for name, p in lora.named_base_parameters(model) if not p.requires_grad}
        self.frozen = gather_full(frozen, policy.device)
        """Full untrained weights by Hugging Face name, on rank 0: below adapters, or never trained in their family."""
        self._buffers = {
            name: buffer.to("cpu", copy=True) for name, buffer in named_persistent_buffers(model)
        }
        self._tokenizer = AutoTokenizer.from_pretrained(self._base_path, trust_remote_code=False)
        # Read now, so that the run can save if the folder changes.
        self._files = read_small_files(Path(self._base_path))
        config = json.loads(Path(self._base_path, "config.json").read_text(encoding="utf-8"))
        # The class can have an end of sequence that config.json lacks.
        self._skeleton.config.eos_token_id = config.get("eos_token_id")
        self._needs_base = bool(policy.config.lora_rank or policy.config.kl_coef)

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """SHA-256 of the model's weights if a resume needs them: below adapters, or as a reference. Else empty."""
        return weights_sha256(self._base_path) if self._needs_base else ""

    def write(self, trained: dict[str, Tensor], folder: Path) -> None:
        """Write full trained weights by name to `folder`. Adapters are merged, and also written to `folder`/adapter.

        A value head is in `folder`/value_head, because engines read all safetensors of `folder` itself.
        """
        adapters = {
            name: weight for name, weight in trained.items() if name.endswith(lora.ADAPTER_NAMES)
        }
        weights = {
            name: weight
            for name, weight in trained.items()
            if name not in adapters and name != VALUE_HEAD
        }
        frozen = {}
        if adapters:
            lora.write_adapter(str(folder / "adapter"), adapters, self._base_path)
        for name, weight in self.frozen.items():
            # One float32 copy at a time: the host may have no room for a second model.
            frozen[name] = lora.merge(name, weight.float(), adapters)
        self._skeleton.save_pretrained(folder, state_dict=weights | frozen | self._buffers)
        # transformers has made it from config.json. The model's own file is copied below.
        (folder / GENERATION_CONFIG).unlink(missing_ok=True)
        self._tokenizer.save_pretrained(folder)
        for name, data in self._files.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(data)
        if VALUE_HEAD in trained:
            (folder / "value_head").mkdir()
            save_file(
                {VALUE_HEAD: trained[VALUE_HEAD]}, folder / "value_head" / "value_head.safetensors"
            )


def read_small_files(folder: Path) -> dict[str, bytes]:
    """Return the small files of a model's folder, for example generation_config.json, by name."""
    paths = [path for path in folder.iterdir() if path.suffix in SMALL_FILES and path.is_file()]
    return {
        path.name: path.read_bytes()
        for path in paths
        if path.stat().st_size <= MAX_SMALL_BYTES
        and not path.name.startswith((".", "adapter_"))
        and not path.name.endswith(".index.json")
    }


def gather_full(names: dict[Tensor, str], device: torch.device) -> dict[str, Tensor]:
    """Return full copies of parameters in host memory, by name, on rank 0; empty on other ranks; collective."""
    copies = {}
    for parameter, name in names.items():
        full = parameter.detach().to(device).full_tensor()
        if dist.get_rank() == 0:
            copies[name] = full.to("cpu", copy=True)
    return copies


def save_weights(policy: "Policy", path: str) -> None:
    """Write a policy to the new folder `path` in Hugging Face's format: safetensors, config, tokenizer; collective.

    With LoRA the weights are merged, and `path`/adapter has the adapter in peft's format. Raises OSError on all ranks
    if it cannot be written; then nothing is left.
    """
    writer = WeightWriter(policy)
    trained = gather_full(trained_names(policy.module), policy.device)
    with new_folder(path) as folder, fail_together():
        if dist.get_rank() == 0:
            writer.write(trained, folder)


def describe_differences(folder: str, saved: Collection[str]) -> str:
    """Describe how a checkpoint with these names differs from the model's folder; empty if it does not."""
    read = set()
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            read |= set(tensors.keys())
    kinds = {
        "will lack": sorted(read - set(saved)),
        "will have, and it lacks,": sorted(set(saved) - read),
    }
    return "; ".join(
        f"{kind} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}"
        for kind, names in kinds.items()
        if names
    )


# Shards to continue from


def check_finite(state: dict[str, Tensor]) -> None:
    """Raise OSError if a training state has an infinite number or NaN: no run can continue from it."""
    for name, tensor in state.items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.is_floating_point() and not own.isfinite().all():
            raise OSError(f"{name} is not finite; the checkpoints before it are kept")


def training_state(policy: "Policy") -> dict[str, Tensor]:
    """Return the state that training changes, by name: live tensors, sharded as the policy has them.

    It has the trained weights, the optimizer's state, the number of updates, and this rank's random generators.
    """
    optimizer = policy.optimizer_state
    values = json.dumps({"num_updates": policy.num_updates, "optimizer": optimizer.values()})
    return {
        **{f"weights.{name}": parameter.detach() for parameter, name in optimizer.names.items()},
        **{f"optimizer.{name}": tensor for name, tensor in optimizer.tensors().items()},
        **{name: generator.get_state() for name, generator in _generators().items()},
        VALUES: torch.frombuffer(bytearray(values.encode()), dtype=torch.uint8),
    }


def _generators() -> dict[str, torch.Generator]:
    """Return torch's random generators of this rank, by name."""
    generators = {f"random.cpu.{dist.get_rank()}": torch.default_generator}
    if torch.cuda.is_initialized():
        generators[f"random.cuda.{dist.get_rank()}"] = torch.cuda.default_generators[
            torch.cuda.current_device()
        ]
    return generators


def make_stager(device: torch.device) -> DefaultStager:
    """Return a copier of training states to host memory. It uses the same memory each time, pinned for a GPU."""
    is_gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_gpu,
        )
    )


def write_shards(state: dict[str, Tensor], folder: Path | str, group: dist.ProcessGroup) -> None:
    """Write this rank's part of a training state to a folder of safetensors; collective on the gloo group.

    Raises OSError on all ranks, in one line, if it fails on one.
    """
    num_ranks = dist.get_world_size(group)
    ends = itertools.accumulate(tensor.nbytes // num_ranks for tensor in state.values())
    # Rank 0 numbers the files of all ranks, from 1. Tensors that it lacks go to file 0.
    file_numbers = defaultdict(
        int, {name: 1 + end // SHARD_FILE_BYTES for name, end in zip(state, ends, strict=True)}
    )
    storage = dcp.HuggingFaceStorageWriter(str(folder), file_numbers, save_distributed=True)
    try:
        dcp.save(state, storage_writer=storage, process_group=group)
    except CheckpointException as error:
        raise OSError(describe_failure(error)) from None


def restore_training_state(policy: "Policy", folder: str, group: dist.ProcessGroup) -> None:
    """Set a new policy to a folder's training state, from any number of ranks; collective on the gloo group.

    Each rank takes the random generators of the rank with its number, if there was one. Raises ValueError if the folder
    is of another model or optimizer.
    """
    optimizer = policy.optimizer_state
    shapes = _read_shapes(folder)
    data = torch.empty(shapes.pop(VALUES), dtype=torch.uint8)
    _load({VALUES: data}, folder, group)
    values = json.loads(data.numpy().tobytes())
    policy.num_updates = values["num_updates"]
    if policy.num_updates:
        # Makes tensors of the shapes that they have for this model on these ranks.
        optimizer.make_tensors(values["optimizer"])
    optimizer.set_values(values["optimizer"])
    state = training_state(policy)
    del state[VALUES]
    for name in sorted(shapes.keys() | state.keys()):
        shape = tuple(state[name].shape) if name in state else None
        if shapes.get(name) != shape and not name.startswith("random."):
            difference = f"{name} of {shapes.get(name)}, the run's is {shape}"
            raise ValueError(
                f"{folder} has {difference}: it is of another model, or of other --optim.args"
            )
    state = {name: tensor for name, tensor in state.items() if name in shapes}
    _load(state, folder, group)
    for name, generator in _generators().items():
        if name in state:
            generator.set_state(state[name])


def read_trained_weights(folder: str) -> dict[str, Tensor]:
    """Return full trained weights by name, from the shards in a folder. One process reads them."""
    state = {
        name: torch.empty(shape)
        for name, shape in _read_shapes(folder).items()
        if name.startswith("weights.")
    }
    _load(state, folder, None)
    return {name.removeprefix("weights."): tensor for name, tensor in state.items()}


def _read_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Return the full shape of each tensor of the shards in a folder, by name."""
    metadata = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in metadata.items()}


def _load(state: dict[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Read the shards in a folder into the tensors of a state; collective if there is a group. Raises OSError."""
    try:
        reader = dcp.HuggingFaceStorageReader(folder)
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise OSError(describe_failure(error)) from None


def describe_failure(failed: CheckpointException) -> str:
    """Return the error of the first rank that failed, in one line. If a signal's handler raised it, raise it."""
    rank, (error, _) = next(iter(failed.failures.items()))
    if not isinstance(error, Exception):
        raise error
    return f"rank {rank}: {describe(error)}"


# A whole checkpoint


@dataclass(frozen=True)
class NodeState:
    """A leader's part of a checkpoint."""

    node: int
    run: RunDirectory
    rollout: Any
    """Tickets, samples and responses in flight: a ControllerState, or other plain data."""
    facts: list[dict[str, Any]]
    """The manifest's facts on each node."""
    delayed: dict[int, list[tuple[str, Tensor]]]
    """Full weights of versions that publish_delay holds back."""

    def write(self, folder: Path) -> None:
        """Flush the records, and write the rest to the folder of the shards. Only node 0 writes delayed weights."""
        self.run.flush()
        file = folder / f"node_{self.node}.msgpack"
        file.write_bytes(encode(self.rollout))
        flush(file)
        if self.node == 0:
            # Every safetensors file beside the shards would be read as one of them.
            (folder / "delayed").mkdir()
            for version, weights in self.delayed.items():
                save_file(dict(weights), folder / "delayed" / f"{version}.safetensors")


def save(
    path: Path,
    state: dict[str, Tensor],
    node_state: NodeState | None,
    weights: WeightWriter,
    group: dist.ProcessGroup,
) -> None:
    """Write a checkpoint to the new folder `path`; collective on the gloo group of all ranks.

    `state` is this rank's training state in host memory. Leaders add `node_state`. Raises OSError as `new_folder`.
    """
    with new_folder(path, group) as folder:
        resume_folder = folder / RESUME_FOLDER
        with fail_together(group):
            check_finite(state)
        write_shards(state, resume_folder, group)
        with fail_together(group):
            if node_state is not None:
                node_state.write(resume_folder)
        with fail_together(group):
            if dist.get_rank() == 0:
                weights.write(read_trained_weights(str(resume_folder)), folder)
                write_manifest(
                    folder,
                    run_id=node_state.run.run_id,
                    step=parse_step(path),
                    frozen_sha256=weights.frozen_sha256,
                    nodes=node_state.facts,
                    delayed=list(node_state.delayed),
                )


def prune(folder: Path, keep_last: int) -> None:
    """Delete all checkpoints except the last `keep_last`.

    With 0 all weights are kept. Only the last KEPT_TO_RESUME checkpoints then keep what --resume needs.
    """
    for path in list_checkpoints(folder)[: -(keep_last or KEPT_TO_RESUME)]:
        doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
        # After this rename it is no checkpoint, even if the run is killed before all is deleted.
        (path if keep_last else path / RESUME_FOLDER).rename(doomed)
        shutil.rmtree(doomed)


class CheckpointWriter:
    """Saves in a thread, one checkpoint at a time. Every rank has one, and all save at the same step."""

    def __init__(self, policy: "Policy", folder: Path):
        """Make what saving needs, for checkpoints in a folder that all nodes share; collective."""
        self.config = policy.config
        self.device = policy.device
        self.folder = folder
        self.path: Path | None = None
        """The newest checkpoint. It may not be complete yet."""
        # Two threads cannot share a process group.
        self.group = dist.new_group(
            timeout=datetime.timedelta(seconds=2 * policy.config.timeout_s), backend="gloo"
        )
        self.weights = WeightWriter(policy)
        self.stager = make_stager(policy.device)
        self.longest_s = 0.0
        """Time that the slowest checkpoint took, seconds."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._saving = concurrent.futures.Future()
        self._saving.set_result(None)

    def start(self, step: int, state: dict[str, Tensor], node_state: NodeState | None) -> None:
        """Copy the state, and begin to save it. Call `wait` for the checkpoint before first."""
        self.path = self.folder / f"step_{step}"
        self._saving = self._thread.submit(self._save, self.stager.stage(state), node_state)

    def _save(self, state: dict[str, Tensor], node_state: NodeState | None) -> None:
        started = time.monotonic()
        if self.device.type == "cuda":
            # A thread begins on GPU 0. torch waits for a stream while it writes, and would make a context there.
            torch.cuda.set_device(self.device)
        save(self.path, state, node_state, self.weights, self.group)
        with fail_together(self.group):
            if dist.get_rank() == 0:
                prune(self.folder, self.config.keep_last)
        self.longest_s = max(self.longest_s, time.monotonic() - started)

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk. Raises OSError if that fails or takes too long."""
        limit_s = 2 * self.config.timeout_s
        concurrent.futures.wait([self._saving], limit_s)
        if not self._saving.done():
            raise TimeoutError(
                f"checkpoint {self.path} is not written after {limit_s:g} s more: look at that disk; if a checkpoint "
                f"only takes that long, raise --timeout-s, of which this is twice; {dump_stacks()}"
            )
        self._saving.result()

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the newest checkpoint. If it hangs, end the process --timeout-s later."""
        concurrent.futures.wait([self._saving], timeout_s)
        if not self._saving.done():
            # Python waits at its exit for the threads of an executor.
            end = threading.Timer(self.config.timeout_s, os._exit, [1])
            end.daemon = True
            end.start()
