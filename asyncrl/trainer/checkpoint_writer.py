"""Writes checkpoints in the background: beside the older ones, flushed, digested, and renamed when all is there.

A thread of each rank does it, from copies, with collectives of a group of its own: two threads cannot share one.
"""

import datetime
import functools
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.cluster.cluster import Cluster
from asyncrl.cluster.stacks import dump_stacks
from asyncrl.runlog.batches import weights_sha256
from asyncrl.runlog.manifest import PART, checkpoints_in, flush, measured, remove, write_manifest
from asyncrl.runlog.plain import encode
from asyncrl.runlog.run_directory import RunDirectory
from asyncrl.trainer.checkpoint import (
    StagedState,
    WeightWriter,
    check_finite,
    check_space,
    copies_on_rank_0,
    read_full_weights,
    together,
    write_shards,
)
from asyncrl.trainer.lora import named_base_parameters
from asyncrl.trainer.policy import Policy

KEPT_TO_RESUME = 2
"""Checkpoints that keep what --resume needs where all are kept."""


@dataclass
class Saving:
    """What one rank writes of a checkpoint, and how that went."""

    step: int
    state: StagedState
    delayed: dict[int, list]
    """Full weights of versions that publish_delay holds back, on leaders."""
    rollout: Any = None
    """What the node sampled and was sampling, in plain data, on leaders."""
    facts: dict[str, Any] | None = None
    """What the manifest says of the node, on leaders."""
    began: float = field(default_factory=time.monotonic)
    took_s: float | None = None
    """How long it took; None while it goes on, or when it has failed."""
    error: OSError | None = None


class CheckpointWriter:
    """Writes a run's checkpoints, one at a time. Every rank has one, and all are asked at the same step."""

    def __init__(self, policy: Policy, cluster: Cluster, run: RunDirectory | None, folder: Path):
        """Make what writing needs, for checkpoints in a folder that all nodes share; collective."""
        self.cluster, self.run, self.folder, self.config = cluster, run, folder, policy.config
        self.group = dist.new_group(timeout=datetime.timedelta(seconds=2 * policy.config.timeout_s), backend="gloo")
        model, self._model_path, self._frozen = policy.module.model, policy.model_path, {}
        if policy.config.lora_rank:
            self._frozen = copies_on_rank_0((n, p.detach().full_tensor()) for n, p in named_base_parameters(model))
        self.weights = WeightWriter(model, policy.model_path) if cluster.is_first else None
        self._saving: Saving | None = None
        self._has_ended = threading.Event()  # and no join: one that a signal interrupts takes the thread for ended
        self._has_ended.set()
        self.longest_s = 0.0
        """Time that the slowest checkpoint took, seconds."""

    def start(self, saving: Saving) -> None:
        """Begin to write; the one before must have been waited for."""
        self._saving = saving
        self._has_ended.clear()
        threading.Thread(target=self._write, args=(saving,), name="save", daemon=True).start()

    def finish(self, timeout_s: float) -> None:
        """Let what was begun last come to its end, if it does in time."""
        self._has_ended.wait(timeout_s)

    def wait(self) -> None:
        """Wait until what was begun last is on disk. Raises OSError if it could not be written, or takes too long."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        limit_s = 2 * self.config.timeout_s
        if not self._has_ended.wait(limit_s):
            raise TimeoutError(
                f"checkpoint {self.folder}/step_{saving.step} is not written after {limit_s:g} s more: look at that "
                "disk; if a checkpoint only takes that long, raise --timeout-s, of which this is twice; "
                f"{dump_stacks()}"
            )
        if saving.error is not None:
            raise saving.error
        if saving.took_s is None:
            raise RuntimeError(f"the thread that wrote the checkpoint of step {saving.step} has died: see above")
        self.longest_s = max(self.longest_s, saving.took_s)

    def _write(self, saving: Saving) -> None:
        """Write a checkpoint; collective on the threads of all ranks."""
        final = self.folder / f"step_{saving.step}"
        partial, is_first = final.with_name(f"{final.name}.tmp"), self.cluster.is_first
        try:
            together(lambda: self._begin(partial, final, saving) if is_first else None, self.group)
            together(lambda: check_finite(saving.state), self.group)
            write_shards(saving.state, str(partial / PART), self.group)
            found = together(lambda: self._write_own(partial, saving), self.group)
            together(lambda: self._end(partial, final, saving, found) if is_first else None, self.group)
            saving.took_s = time.monotonic() - saving.began
        except (OSError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            saving.error = OSError(f"checkpoint {final} was not written: {reason}")
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
        finally:
            self._has_ended.set()

    def _begin(self, partial: Path, final: Path, saving: Saving) -> None:
        """Make the folder to write to, if there is room."""
        partial.parent.mkdir(exist_ok=True)
        if final.exists():
            raise FileExistsError(f"{final} exists already")
        remove(partial)  # left by a run that was killed here
        tensors = [*saving.state.values(), *self._frozen.values()]
        tensors += [tensor for name, tensor in saving.state.items() if name.startswith("weights.")]  # for people
        tensors += [tensor for weights in saving.delayed.values() for _, tensor in weights]
        check_space(sum(t.nbytes for t in tensors), str(partial.parent), "weights and optimizer state")
        (partial / PART).mkdir(parents=True)

    def _write_own(self, partial: Path, saving: Saving) -> dict:
        """Write what only this rank has, beside its shards. Returns the digests of all that it wrote, and on leaders
        what the manifest says of the node."""
        part, cluster = partial / PART, self.cluster
        written = list(part.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
        if cluster.is_leader:
            written.append(part / f"node_{cluster.node}.msgpack")
            written[-1].write_bytes(encode(saving.rollout))
            self.run.flush()
        if cluster.is_first:
            self.weights.write(*read_full_weights(str(part), self._frozen), str(partial))
            for version, weights in saving.delayed.items():
                save_file(dict(weights), part / f"delayed_{version}.safetensors")
            written += [*part.glob("delayed_*"), *(p for p in partial.rglob("*") if p.is_file() and p.parent != part)]
        for file in written:
            flush(file)
        return {"files": {str(file.relative_to(partial)): measured(file) for file in written}, "node": saving.facts}

    def _end(self, partial: Path, final: Path, saving: Saving, found: list[dict]) -> None:
        """Write the manifest, give the checkpoint its name, and delete what is not to be kept."""
        nodes = [of_rank["node"] for of_rank in found if of_rank["node"]]
        files = {name: of for of_rank in found for name, of in of_rank["files"].items()}
        write_manifest(
            partial,
            files,
            run_id=self.run.run_id,
            step=saving.step,
            num_nodes=len(nodes),
            frozen_sha256=self._frozen_sha256,
            probes=[node["probe"] for node in nodes],
            records=[node["records"] for node in nodes],
            delayed=list(saving.delayed),
        )
        for folder in {partial, *(path.parent for path in partial.rglob("*"))}:
            flush(folder)
        partial.rename(final)
        flush(final.parent)
        self._prune()

    @functools.cached_property
    def _frozen_sha256(self) -> str:
        """Digest of the model's files where the run goes on needing them: below adapters, or as a reference."""
        return weights_sha256(self._model_path) if self.config.lora_rank or self.config.kl_coef else ""

    def _prune(self) -> None:
        """Delete checkpoints that are not to be kept, or of them what only --resume needs."""
        keep = self.config.keep_last
        for path in list(checkpoints_in(self.folder))[: -(keep or KEPT_TO_RESUME)]:
            gone = path if keep else path / PART
            doomed = self.folder / f"{path.name}.old-{os.getpid()}"
            gone.rename(doomed)  # at once; what is left of it is no checkpoint
            shutil.rmtree(doomed)
