"""Writes checkpoints in the background: beside the older ones, flushed, digested, and renamed when all is there.

torch.distributed.checkpoint does it, from copies, in a thread of each rank. The threads have a process group of their
own: two threads cannot share one. What fails on one rank fails on all.
"""

import concurrent.futures
import datetime
import functools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.futures import Future

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.runlog.batches import weights_sha256
from asyncrl.runlog.manifest import PART, checkpoints_in, flush, measured, remove, write_manifest
from asyncrl.runlog.plain import encode
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.trainer.checkpoint import (
    WeightWriter,
    check_finite,
    check_space,
    copies_on_rank_0,
    file_numbers,
    make_stager,
    read_full_weights,
    reason_of,
)
from asyncrl.trainer.lora import named_base_parameters
from asyncrl.trainer.policy import Policy

KEPT_TO_RESUME = 2
"""Checkpoints that keep what --resume needs where all are kept."""


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. Every rank has one, and all are asked at the same step."""

    def __init__(self, policy: Policy, cluster: Cluster, run: RunDirectory | None, folder: Path):
        """Make what writing needs, for checkpoints in a folder that all nodes share; collective."""
        self.cluster, self.run, self.folder, self.config = cluster, run, folder, policy.config
        self.group = dist.new_group(timeout=datetime.timedelta(seconds=2 * policy.config.timeout_s), backend="gloo")
        model, self.model_path = policy.module.model, policy.model_path
        self.frozen: dict[str, Tensor] = {}
        if policy.config.lora_rank:
            self.frozen = copies_on_rank_0((n, p.detach().full_tensor()) for n, p in named_base_parameters(model))
        self.weights = WeightWriter(model, policy.model_path) if cluster.is_first else None
        self.stager = make_stager(policy.device)
        self._storage: CheckpointStorage | None = None
        self._future: concurrent.futures.Future | None = None
        self.longest_s = 0.0
        """Time that the slowest checkpoint took, seconds."""

    def start(
        self, state: dict[str, Tensor], step: int, delayed: dict[int, list], rollout: Any, facts: dict[str, Any] | None
    ) -> None:
        """Copy the state, and begin to write it; the checkpoint before must have been waited for.

        `delayed` are full weights of versions that publish_delay holds back, `rollout` is what the node sampled and was
        sampling, in plain data, and `facts` are what the manifest says of the node: all on leaders.
        """
        self._storage = CheckpointStorage(self, state, step, delayed, rollout, facts)
        self._future = dcp.async_save(
            state, storage_writer=self._storage, process_group=self.group, async_stager=self.stager
        )
        self._future.add_done_callback(functools.partial(self._note_time, time.monotonic()))

    def _note_time(self, started: float, _) -> None:
        self.longest_s = max(self.longest_s, time.monotonic() - started)

    def finish(self, timeout_s: float) -> None:
        """Let the checkpoint that is being written come to its end, if it does in time; else it may not keep the
        process for longer than `timeout_s` of the config."""
        if self._future is None:
            return
        concurrent.futures.wait([self._future], timeout_s)
        if not self._future.done():
            # Python waits at its exit for the threads of an executor, and this one may hang.
            end = threading.Timer(self.config.timeout_s, os._exit, [1])
            end.daemon = True
            end.start()

    def wait(self) -> None:
        """Wait until what was begun last is on disk. Raises OSError if it could not be written, or takes too long."""
        if self._future is None:
            return
        final, limit_s = self._storage.final, 2 * self.config.timeout_s
        concurrent.futures.wait([self._future], limit_s)
        if not self._future.done():
            raise TimeoutError(
                f"checkpoint {final} is not written after {limit_s:g} s more: look at that "
                "disk; if a checkpoint only takes that long, raise --timeout-s, of which this is twice; "
                f"{dump_stacks()}"
            )
        future, self._future = self._future, None
        try:
            future.result()
        except (CheckpointException, RuntimeError) as error:
            if self.cluster.is_first:
                shutil.rmtree(self._storage.partial, ignore_errors=True)
            raise OSError(f"checkpoint {final} was not written: {reason_of(error)}") from error

    @functools.cached_property
    def frozen_sha256(self) -> str:
        """Digest of the model's files where the run still needs them: below adapters, or as a reference."""
        return weights_sha256(self.model_path) if self.config.lora_rank or self.config.kl_coef else ""


class CheckpointStorage(dcp.HuggingFaceStorageWriter):
    """The folder of one checkpoint, as torch.distributed.checkpoint writes it; its methods are called in this order."""

    def __init__(self, writer: CheckpointWriter, state: dict[str, Tensor], step: int, delayed, rollout, facts):
        """The arguments are those of CheckpointWriter.start; of `state` the sizes alone are read."""
        self.final = writer.folder / f"step_{step}"
        self.partial = self.final.with_name(f"{self.final.name}.tmp")
        numbers = file_numbers(state, dist.get_world_size(writer.group))
        super().__init__(str(self.partial / PART), numbers, save_distributed=True)
        self._writer, self._step, self._delayed = writer, step, delayed
        self._rollout, self._facts = rollout, facts
        for_people = [tensor for name, tensor in state.items() if name.startswith("weights.")]
        held_back = [tensor for weights in delayed.values() for _, tensor in weights]
        tensors = [*state.values(), *writer.frozen.values(), *for_people, *held_back]
        self._num_bytes = sum(tensor.nbytes for tensor in tensors)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Make no folder yet: rank 0 does, when it has removed what was there."""
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Make the folder to write to, if there is room; on rank 0."""
        self.partial.parent.mkdir(exist_ok=True)
        if self.final.exists():
            raise FileExistsError(f"{self.final} exists already")
        remove(self.partial)  # left by a run that was killed here
        check_space(self._num_bytes, str(self.partial.parent), "weights and optimizer state")
        (self.partial / PART).mkdir(parents=True)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.DefaultSavePlanner) -> Future:
        """Write this rank's shards and, on leaders, what the node sampled. The result has the digests of the files, and
        on leaders what the manifest says of the node."""
        check_finite(planner.state_dict)
        super().write_data(plan, planner).wait()
        part, cluster = self.partial / PART, self._writer.cluster
        files = list(part.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        if cluster.is_leader:
            node_file = part / f"node_{cluster.node}.msgpack"
            node_file.write_bytes(encode(self._rollout))
            files.append(node_file)
            self._writer.run.flush()
        written = Future()
        written.set_result({"files": self._flushed(files), "node": self._facts})
        return written

    def finish(self, metadata: dcp.Metadata, results: list[dict]) -> None:
        """Write weights for people and the manifest, give the checkpoint its name, and delete the old; on rank 0."""
        writer, part = self._writer, self.partial / PART
        writer.weights.write(*read_full_weights(str(part), writer.frozen), str(self.partial))
        for version, weights in self._delayed.items():
            save_file(dict(weights), part / f"delayed_{version}.safetensors")
        for_people = [path for path in self.partial.rglob("*") if path.is_file() and path.parent != part]
        files = self._flushed([*part.glob("delayed_*"), *for_people])
        for result in results:
            files |= result["files"]
        nodes = [result["node"] for result in results if result["node"]]
        write_manifest(
            self.partial,
            files,
            run_id=writer.run.run_id,
            step=self._step,
            num_nodes=len(nodes),
            frozen_sha256=writer.frozen_sha256,
            probes=[node["probe"] for node in nodes],
            records=[node["records"] for node in nodes],
            delayed=list(self._delayed),
        )
        for folder in {self.partial, *(path.parent for path in self.partial.rglob("*"))}:
            flush(folder)
        self.partial.rename(self.final)
        flush(self.final.parent)
        _prune(writer.folder, writer.config.keep_last)

    def _flushed(self, files: list[Path]) -> dict[str, tuple[int, str]]:
        """Have files reach the disk. Returns the size and digest of each, by its name in the checkpoint."""
        for file in files:
            flush(file)
        return {str(file.relative_to(self.partial)): measured(file) for file in files}


def _prune(folder: Path, keep_last: int) -> None:
    """Delete checkpoints that are not to be kept, or what only --resume needs of them where all are kept (0)."""
    for path in list(checkpoints_in(folder))[: -(keep_last or KEPT_TO_RESUME)]:
        unwanted = path if keep_last else path / PART
        doomed = folder / f"{path.name}.old-{os.getpid()}"
        unwanted.rename(doomed)  # at once; what is left of it is no checkpoint
        shutil.rmtree(doomed)
