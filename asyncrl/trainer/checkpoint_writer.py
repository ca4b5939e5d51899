"""Checkpoints: shards to continue from, and weights for people (weight_files.py).

`write_checkpoint` writes a checkpoint, and `restore_training_state` reads its shards. They are written by
torch.distributed.checkpoint as safetensors. They contain no pickle, and any number of ranks can read them. Each rank
saves in a thread, from copies in host memory. A failure of one rank is a failure of all.
"""

import concurrent.futures
import datetime
import json
import os
import shutil
import threading
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    _gen_file_name,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.futures import Future

from asyncrl.cluster.stacks import dump_stacks
from asyncrl.runlog.disk_files import flush
from asyncrl.runlog.manifest import (
    HELD_BACK,
    KEPT_TO_RESUME,
    RESUME_FOLDER,
    NodeFacts,
    list_checkpoints,
    parse_step,
    write_manifest,
)
from asyncrl.runlog.plain import encode
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.trainer.model import compute_dtype
from asyncrl.trainer.new_folder import describe_error, fail_together, new_folder
from asyncrl.trainer.sharding import own_shard
from asyncrl.trainer.weight_files import WeightWriter

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy

# Only rank 0 reads the shards to make weights for people. torch would warn of that at each checkpoint.
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

VALUES = "values"
"""Name of the plain values of a training state: the bytes of their JSON."""


# Shards to continue from


def check_finite(state: dict[str, Tensor]) -> None:
    """Raise OSError if a training state has an infinite number or NaN: no run can continue from it."""
    for name, tensor in state.items():
        own = own_shard(tensor)
        if not own.isfinite().all():
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


def make_state_copier(device: torch.device) -> DefaultStager:
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


class ShardWriter(dcp.HuggingFaceStorageWriter):
    """Writes a rank's file by safetensors' `save_file`. That copies no tensor, so the rank trains meanwhile.

    The writer of torch copies each file into one bytes object, and keeps Python's lock for a second per GB. The format
    is the same.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list]:
        """Write this rank's part to its file. It returns no results, because torch does not read them."""
        file = Path(self.path, _gen_file_name(1, 1, plan.storage_data["shard_index"]))
        tensors = {
            item.index.fqn: planner.resolve_data(item).detach().contiguous() for item in plan.items
        }
        offsets = {
            item.index.fqn: {"saved_offsets": item.tensor_data.chunk.offsets} for item in plan.items
        }
        metadata = {
            CUSTOM_METADATA_KEY: json.dumps(offsets),
            DCP_VERSION_KEY: str(HF_DCP_VERSION),
            FORMAT_KEY: FORMAT_VALUE,
        }
        save_file(tensors, file, metadata)
        flush(file)
        done: Future[list] = Future()
        done.set_result([])
        return done


def write_shards(state: dict[str, Tensor], folder: Path | str, group: dist.ProcessGroup) -> None:
    """Write this rank's part of a training state to a folder of safetensors; collective on the gloo group.

    Raises OSError on all ranks, in one line, if it fails on one.
    """
    storage = ShardWriter(str(folder), save_distributed=True)
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
    own_shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name, _ in sorted(shapes.items() ^ own_shapes.items()):
        if not name.startswith("random."):
            raise ValueError(
                f"{folder} has {name} of {shapes.get(name)}, the run's is {own_shapes.get(name)}: "
                "it is of another model, or of other --optim.args"
            )
    state = {name: tensor for name, tensor in state.items() if name in shapes}
    # `state` has the policy's live tensors, so this sets them, and undoes the update of `make_tensors`. Generators give
    # copies, so they are set below.
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
    return f"rank {rank}: {describe_error(error)}"


# A whole checkpoint


@dataclass(frozen=True)
class LeaderPart:
    """A leader's part of a checkpoint."""

    node: int
    run: RunDirectory
    """The run that continues. Its records are flushed first."""
    controller_state: Any
    """Tickets, samples and responses in flight: a ControllerState, or other plain data."""
    facts_of_nodes: list[NodeFacts]
    """For the manifest."""
    held_back: dict[int, list[tuple[str, Tensor]]]
    """Full weights of versions that publish_delay holds back."""

    def write(self, folder: Path) -> None:
        """Flush the records, and write the rest to the folder of the shards. Node 0 adds weights that are held back."""
        self.run.flush()
        file = folder / f"node_{self.node}.msgpack"
        file.write_bytes(encode(self.controller_state))
        # `new_folder` flushes on the first node only. Another node can have written this file.
        flush(file)
        if self.node == 0:
            # Every safetensors file beside the shards would be read as one of them.
            (folder / HELD_BACK).mkdir()
            for version, weights in self.held_back.items():
                save_file(dict(weights), folder / HELD_BACK / f"{version}.safetensors")


def write_checkpoint(
    path: Path,
    state: dict[str, Tensor],
    leader_part: LeaderPart | None,
    weights: WeightWriter,
    group: dist.ProcessGroup,
) -> None:
    """Write a checkpoint to the new folder `path`; collective on the gloo group of all ranks.

    `state` is this rank's training state in host memory. Leaders add `leader_part`. Raises OSError as `new_folder`.
    """
    with new_folder(path, group) as folder:
        resume_folder = folder / RESUME_FOLDER
        with fail_together(group):
            check_finite(state)
        write_shards(state, resume_folder, group)
        with fail_together(group):
            if leader_part is not None:
                leader_part.write(resume_folder)
        with fail_together(group):
            if dist.get_rank() == 0:
                weights.write(read_trained_weights(str(resume_folder)), folder)
                write_manifest(
                    folder,
                    run_id=leader_part.run.run_id,
                    step=parse_step(path),
                    frozen_sha256=weights.frozen_sha256,
                    nodes=list(map(asdict, leader_part.facts_of_nodes)),
                    held_back=list(leader_part.held_back),
                )


def prune(folder: Path, keep_last: int) -> None:
    """Delete all checkpoints except the last `keep_last`, but no checkpoint that has only weights.

    With 0 all weights are kept. Only the last KEPT_TO_RESUME checkpoints then keep what --resume needs.
    """
    for path in list_checkpoints(folder)[: -(keep_last or KEPT_TO_RESUME)]:
        _delete(path if keep_last else path / RESUME_FOLDER, path)


def prune_weights(folder: Path, keep_last: int) -> None:
    """Delete checkpoints of only weights except the last `keep_last`; 0 keeps all. --resume needs whole checkpoints."""
    only_weights = [
        path
        for path in folder.iterdir()
        if parse_step(path) >= 0 and not (path / RESUME_FOLDER).exists()
    ]
    for path in sorted(only_weights, key=parse_step)[:-keep_last]:
        _delete(path, path)


def _delete(doomed: Path, checkpoint: Path) -> None:
    """Delete a checkpoint, or a folder of it."""
    # After this rename it is no checkpoint, even if the run is killed before all is deleted.
    renamed = doomed.rename(checkpoint.with_name(f"{checkpoint.name}.old-{os.getpid()}"))
    shutil.rmtree(renamed)


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
        dtype = torch.float32
        if self.config.save == "weights":
            dtype = compute_dtype(self.config, self.device)
        self.weights = WeightWriter(policy, dtype)
        self.state_copier = make_state_copier(policy.device)
        self.longest_s = 0.0
        """Time that the slowest checkpoint took, seconds."""
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._saving = concurrent.futures.Future()
        self._saving.set_result(None)

    def start(self, step: int, state: dict[str, Tensor], leader_part: LeaderPart | None) -> None:
        """Copy the state, and begin to save it. Call `wait` first: the save before this one must have ended."""
        self.path = self.folder / f"step_{step}"
        self._saving = self._thread.submit(
            self._write_and_prune, self.state_copier.stage(state), leader_part
        )

    def _write_and_prune(self, state: dict[str, Tensor], leader_part: LeaderPart | None) -> None:
        started = time.monotonic()
        if self.device.type == "cuda":
            # A thread begins on GPU 0. The first call of torch.cuda would make a context there.
            torch.cuda.set_device(self.device)
        write_checkpoint(self.path, state, leader_part, self.weights, self.group)
        with fail_together(self.group):
            if dist.get_rank() == 0:
                prune(self.folder, self.config.keep_last)
        self.longest_s = max(self.longest_s, time.monotonic() - started)

    def wait(self) -> None:
        """Wait until the newest checkpoint is on disk. Raises OSError if that fails or takes too long."""
        limit_s = 2 * self.config.timeout_s
        try:
            self._saving.result(limit_s)
        except TimeoutError:
            raise TimeoutError(
                f"checkpoint {self.path} is not written after {limit_s:g} s more: look at that disk; if a checkpoint "
                f"only takes that long, raise --timeout-s, of which this is twice; {dump_stacks()}"
            ) from None

    def close(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the newest checkpoint. If it hangs, end the process --timeout-s later."""
        concurrent.futures.wait([self._saving], timeout_s)
        if not self._saving.done():
            # Python waits at its exit for the threads of an executor.
            end = threading.Timer(self.config.timeout_s, os._exit, [1])
            end.daemon = True
            end.start()
