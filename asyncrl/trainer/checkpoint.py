"""What a checkpoint has of the trainer: weights in Hugging Face's format for people, and shards to continue from.

Shards are written by torch.distributed.checkpoint as safetensors, each rank its own, so nothing in them is unpickled,
and any number of ranks reads them. A thread of each rank writes them from copies, beside the older checkpoints. They
are flushed, digested, and renamed when all is there. What fails on one rank fails on all.
"""

import concurrent.futures
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
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.futures import Future
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.cluster.cluster import Cluster, on_first_rank
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.runlog.manifest import (
    KEPT_TO_RESUME,
    RESUME_FOLDER,
    flush,
    hash_file,
    list_checkpoints,
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

# Weights for people are made of the shards by one rank alone, and torch warns of that at each checkpoint.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

BYTES_BESIDE_TENSORS = 32e6
"""Room for tokenizer, config and what else is small."""
SHARD_FILE_BYTES = 1 << 30
"""Size from which a rank's shards go to another file, as each file is put together in memory, bytes."""
GENERATION_CONFIG = "generation_config.json"
SMALL_FILES = ("", ".jinja", ".json", ".md", ".model", ".py", ".txt")
MAX_SMALL_BYTES = 1 << 20
"""Suffixes and size of the files that a checkpoint copies from the model's folder. Weights and indices have others."""
VALUE_HEAD = "value_head.weight"
"""Name of the value head's weight, where there is one, which is none of the model's."""
VALUES = "values"
"""Name of what is no tensor, as the bytes of JSON."""


# Weights for people


class WeightWriter:
    """Writes weights, config and tokenizer to a folder, as transformers reads them; may be used by a thread."""

    def __init__(self, policy: "Policy"):
        """Read what goes with each checkpoint of a policy; collective."""
        model = policy.module.model
        self._base_path = policy.model_path
        # its own, as FSDP exchanges the parameters of the trained one while it computes
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(
                model.config, dtype=torch.float32, trust_remote_code=False
            )
        frozen = {p: name for name, p in lora.named_base_parameters(model) if not p.requires_grad}
        self.frozen = gather_full(frozen, policy.device)
        """Full weights below adapters, and others that their family never trains, by Hugging Face name, on rank 0."""
        self._buffers = {
            name: buffer.to("cpu", copy=True) for name, buffer in named_persistent_buffers(model)
        }
        self._tokenizer = AutoTokenizer.from_pretrained(self._base_path, trust_remote_code=False)
        # Read now: whatever becomes of that folder, the run can save.
        self._files = read_small_files(Path(self._base_path))
        config = json.loads(Path(self._base_path, "config.json").read_text(encoding="utf-8"))
        # A class may have an end of sequence that the model's own file does not name.
        self._skeleton.config.eos_token_id = config.get("eos_token_id")

    def write(self, trained: dict[str, Tensor], folder: Path) -> None:
        """Write full trained weights by name to `folder`; adapters merged into the base, and also to `folder`/adapter.

        A value head goes to `folder`/value_head, as engines read all safetensors of a folder as the model's.
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
            # one float32 copy at a time: two of the whole model may not fit the host
            frozen[name] = lora.merge(name, weight.float(), adapters)
        self._skeleton.save_pretrained(folder, state_dict=weights | frozen | self._buffers)
        # made of config.json, and not of the model's own
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
    """Return the small files of a model's folder that go with its weights, by name, as generation_config.json."""
    paths = [path for path in folder.iterdir() if path.suffix in SMALL_FILES and path.is_file()]
    return {
        path.name: path.read_bytes()
        for path in paths
        if path.stat().st_size <= MAX_SMALL_BYTES
        and not path.name.startswith((".", "adapter_"))
        and not path.name.endswith(".index.json")
    }


def gather_full(names: dict[Tensor, str], device: torch.device) -> dict[str, Tensor]:
    """Full copies of parameters in host memory, by name, on rank 0; the others only help to gather them; collective."""
    copies = {}
    for parameter, name in names.items():
        full = parameter.detach().to(device).full_tensor()
        if dist.get_rank() == 0:
            copies[name] = full.to("cpu", copy=True)
    return copies


def save_weights(policy: "Policy", path: str) -> None:
    """Write a policy to the new folder `path`, as Hugging Face does (safetensors, config, tokenizer); collective.

    With LoRA the weights are the merged ones, and the adapter is beside them in `path`/adapter, in peft's format.
    Raises OSError on every rank if it cannot be written; then nothing is left under `path`.
    """
    writer = WeightWriter(policy)
    trained = gather_full(trained_names(policy.module), policy.device)
    on_first_rank(lambda: write_folder(writer, trained, Path(path)))


def write_folder(writer: WeightWriter, trained: dict[str, Tensor], path: Path) -> None:
    """Write what `writer` writes to the new folder `path`, under a temporary name that is changed when all is on disk.

    Raises OSError, in one line; after a failure nothing is left.
    """
    partial = path.with_name(f"{path.name}.tmp")
    try:
        make_partial(path, [*trained.values(), *writer.frozen.values()])
        writer.write(trained, partial)
        partial.rename(path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"checkpoint {path} was not written: {' '.join(str(error).split())}"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # whatever ended it, a signal too


def make_partial(path: Path, tensors: Iterable[Tensor]) -> None:
    """Make the empty folder `path`.tmp. Raises OSError if `path` exists, or if there is no room for the tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    partial = path.with_name(f"{path.name}.tmp")
    remove(partial)  # left by a run that was killed here
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    needed, free = num_bytes + BYTES_BESIDE_TENSORS, shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            f"needs {needed / 1e9:.3f} GB ({num_bytes / 1e9:.3f} of tensors + {BYTES_BESIDE_TENSORS / 1e9:.3f}), "
            f"{free / 1e9:.3f} GB free in {path.parent}; make room or change --runs-dir"
        )
    partial.mkdir()


def describe_differences(folder: str, saved: Collection[str]) -> str:
    """What checkpoints with tensors of these names have otherwise than the model's own folder; empty if nothing."""
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
    """Raise OSError if anything in a training state is infinite or no number: no run can continue from that."""
    for name, tensor in state.items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if own.is_floating_point() and not own.isfinite().all():
            raise OSError(f"{name} is not finite; the checkpoints before it are kept")


def training_state(policy: "Policy") -> dict[str, Tensor]:
    """Return all that training changes here, by name, live, and sharded as it is.

    It is the trained weights, the optimizer's state, the number of updates, and the random numbers of this rank.
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
    """torch's generators of this rank, by name."""
    generators = {f"random.cpu.{dist.get_rank()}": torch.default_generator}
    if torch.cuda.is_initialized():
        generators[f"random.cuda.{dist.get_rank()}"] = torch.cuda.default_generators[
            torch.cuda.current_device()
        ]
    return generators


def make_stager(device: torch.device) -> DefaultStager:
    """Copies a training state to host memory, pinned where it comes from a GPU, and the same memory each time."""
    is_gpu = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=is_gpu,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=is_gpu,
        )
    )


def file_numbers(state: dict[str, Tensor], num_ranks: int) -> dict[str, int]:
    """Which of a rank's files each tensor of a state goes to, from 1; those that other ranks alone have go to 0."""
    ends = itertools.accumulate(tensor.nbytes // num_ranks for tensor in state.values())
    return defaultdict(
        int, {name: 1 + end // SHARD_FILE_BYTES for name, end in zip(state, ends, strict=True)}
    )


def restore_training_state(policy: "Policy", folder: str, group: dist.ProcessGroup) -> None:
    """Have a new policy continue from the shards in a folder, of any number of ranks; collective on the gloo group.

    Random numbers are those of the rank with the same number, if there was one. Raises ValueError if the folder is of
    another model or optimizer.
    """
    optimizer = policy.optimizer_state
    shapes = _read_shapes(folder)
    data = torch.empty(shapes.pop(VALUES), dtype=torch.uint8)
    _load({VALUES: data}, folder, group)
    values = json.loads(data.numpy().tobytes())
    policy.num_updates = values["num_updates"]
    if policy.num_updates:
        # in the form that it has for this model and these ranks
        optimizer.make(values["optimizer"])
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
    """Full trained weights by name, from the shards in a folder; by one process."""
    state = {
        name: torch.empty(shape)
        for name, shape in _read_shapes(folder).items()
        if name.startswith("weights.")
    }
    _load(state, folder, None)
    return {name.removeprefix("weights."): tensor for name, tensor in state.items()}


def _read_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the shards in a folder, by name."""
    metadata = dcp.HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in metadata.items()}


def _load(state: dict[str, Tensor], folder: str, group: dist.ProcessGroup | None) -> None:
    """Read what a live state names; by this process alone without a group. Raises OSError."""
    try:
        reader = dcp.HuggingFaceStorageReader(folder)
        dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise OSError(describe_failure(error)) from None


def describe_failure(error: CheckpointException | RuntimeError) -> str:
    """Return what went wrong, on the first rank that failed, in one line. Raises what a signal's handler raised."""
    rank, cause = "", error
    if isinstance(error, CheckpointException):
        number, (cause, _) = next(iter(error.failures.items()))
        if not isinstance(cause, Exception):
            raise cause
        rank = f"rank {number}: "
    return f"{rank}{type(cause).__name__}: {' '.join(str(cause).split())}"


# Writing in the background


class CheckpointWriter(dcp.HuggingFaceStorageWriter):
    """Writes a run's checkpoints, one at a time. Every rank has one, and all are asked at the same step.

    Methods from `prepare_local_plan` on are called by torch, in this order, in the thread that writes. The threads have
    a process group of their own: two threads cannot share one.
    """

    def __init__(self, policy: "Policy", cluster: Cluster, run: RunDirectory | None, folder: Path):
        """Make what writing needs, for checkpoints in a folder that all nodes share; collective."""
        super().__init__(str(folder), save_distributed=True)
        self.config = policy.config
        self.model_path = policy.model_path
        self.cluster = cluster
        self.run = run
        self.folder = folder
        self.group = dist.new_group(
            timeout=datetime.timedelta(seconds=2 * policy.config.timeout_s), backend="gloo"
        )
        self.weights = WeightWriter(policy)
        self.device = policy.device
        self.stager = make_stager(policy.device)
        self._future = concurrent.futures.Future()
        self._future.set_result(None)  # nothing is being written
        self.longest_s = 0.0
        """Time that the slowest checkpoint took, seconds; on rank 0."""

    def written(self, state: dict[str, Tensor]) -> list[Tensor]:
        """Return what a checkpoint has of a training state, as tensors: shards, and weights for people."""
        for_people = [tensor for name, tensor in state.items() if name.startswith("weights.")]
        return [*state.values(), *self.weights.frozen.values(), *for_people]

    def start(
        self,
        state: dict[str, Tensor],
        step: int,
        delayed: dict[int, list],
        rollout: Any,
        facts: dict[str, Any] | None,
    ) -> None:
        """Copy the state, and begin to write it; the checkpoint before must have been waited for.

        `delayed` are full weights of versions that publish_delay holds back, `rollout` is what the node sampled and was
        sampling, in plain data, and `facts` are what the manifest says of the node: all on leaders.
        """
        self._started = time.monotonic()
        self._step = step
        self._delayed = delayed
        self._rollout = rollout
        self._facts = facts
        self.final = self.folder / f"step_{step}"
        self.partial = self.final.with_name(f"{self.final.name}.tmp")
        self.fqn_to_index_mapping = file_numbers(state, dist.get_world_size(self.group))
        held_back = [tensor for weights in delayed.values() for _, tensor in weights]
        self._written = [*self.written(state), *held_back]
        self._future = dcp.async_save(
            state,
            checkpoint_id=str(self.partial / RESUME_FOLDER),
            storage_writer=self,
            process_group=self.group,
            async_stager=self.stager,
        )

    def wait(self) -> None:
        """Wait until what was begun last is on disk. Raises OSError if it could not be written, or takes too long."""
        limit_s = 2 * self.config.timeout_s
        concurrent.futures.wait([self._future], limit_s)
        if not self._future.done():
            raise TimeoutError(
                f"checkpoint {self.final} is not written after {limit_s:g} s more: look at that "
                "disk; if a checkpoint only takes that long, raise --timeout-s, of which this is twice; "
                f"{dump_stacks()}"
            )
        try:
            self._future.result()
        except (CheckpointException, RuntimeError) as error:
            if self.cluster.is_first:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise OSError(
                f"checkpoint {self.final} was not written: {describe_failure(error)}"
            ) from error

    def close(self, timeout_s: float) -> None:
        """Let the checkpoint that is being written come to its end, if it does in time; else it may not keep the
        process for longer than `timeout_s` of the config."""
        concurrent.futures.wait([self._future], timeout_s)
        if not self._future.done():
            # Python waits at its exit for the threads of an executor, and this one may hang.
            end = threading.Timer(self.config.timeout_s, os._exit, [1])
            end.daemon = True
            end.start()

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Make no folder yet: rank 0 does, when it has removed what was there."""
        if self.device.type == "cuda":
            # A thread begins on GPU 0. As torch waits for a stream while it writes, it would make a context there.
            torch.cuda.set_device(self.device)
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the folder to write to, if there is room; on rank 0."""
        make_partial(self.final, self._written)
        (self.partial / RESUME_FOLDER).mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.DefaultSavePlanner) -> Future:
        """Write this rank's shards and, on leaders, what the node sampled. The result has the digests of the files, and
        on leaders what the manifest says of the node."""
        check_finite(planner.state_dict)
        super().write_data(plan, planner).wait()
        resume_folder = self.partial / RESUME_FOLDER
        files = list(resume_folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        if self.cluster.is_leader:
            node_file = resume_folder / f"node_{self.cluster.node}.msgpack"
            node_file.write_bytes(encode(self._rollout))
            files.append(node_file)
            self.run.flush()
        written = Future()
        written.set_result({"files": self._flushed(files), "node": self._facts})
        return written

    def finish(self, metadata: dcp.Metadata, results: list[dict]) -> None:
        """Write weights for people and the manifest, give the checkpoint its name, and delete the old; on rank 0."""
        resume_folder = self.partial / RESUME_FOLDER
        self.weights.write(read_trained_weights(str(resume_folder)), self.partial)
        # in a folder of their own: shards are read from all files beside them
        delayed = resume_folder / "delayed"
        delayed.mkdir()
        for version, weights in self._delayed.items():
            save_file(dict(weights), delayed / f"{version}.safetensors")
        written = [
            path
            for path in self.partial.rglob("*")
            if path.is_file() and path.parent != resume_folder
        ]
        files = self._flushed(written)
        for result in results:
            files |= result["files"]
        write_manifest(
            self.partial,
            files,
            run_id=self.run.run_id,
            step=self._step,
            frozen_sha256=self.frozen_sha256,
            nodes=[result["node"] for result in results if result["node"]],
            delayed=list(self._delayed),
        )
        for folder in {self.partial, *(path.parent for path in self.partial.rglob("*"))}:
            flush(folder)
        self.partial.rename(self.final)
        flush(self.folder)
        self._prune()
        self.longest_s = max(self.longest_s, time.monotonic() - self._started)

    def _flushed(self, files: list[Path]) -> dict[str, str]:
        """Have files reach the disk. Returns the digest of each, by its name in the checkpoint."""
        for file in files:
            flush(file)
        return {str(file.relative_to(self.partial)): hash_file(file) for file in files}

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """Digest of the model's files where the run still needs them: below adapters, or as a reference."""
        return (
            weights_sha256(self.model_path) if self.config.lora_rank or self.config.kl_coef else ""
        )

    def _prune(self) -> None:
        """Delete checkpoints that are not to be kept, or what only --resume needs of them where all are kept (0)."""
        keep_last = self.config.keep_last
        for path in list_checkpoints(self.folder)[: -(keep_last or KEPT_TO_RESUME)]:
            doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
            # at once; what is left of it is no checkpoint
            (path if keep_last else path / RESUME_FOLDER).rename(doomed)
            shutil.rmtree(doomed)
