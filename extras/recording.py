"""Batches on disk, as they were consumed: all of a run with `--record`, or the batch of a failed step.

A step has one file, batches/step_000001.msgpack in the run directory. It has the groups in the order of training, and
asyncrl/runlog/plain.py writes the records. A batch is read as it was written, bit by bit.
"""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl.plugins import Plugin
from asyncrl.records import Group
from asyncrl.runlog.header import read_header, write_header
from asyncrl.runlog.plain import decode, encode
from asyncrl.weights.models import weights_sha256

# These import torch and transformers for seconds, and every command line imports this file.
if TYPE_CHECKING:
    from asyncrl.job.node import Follower, Leader
    from asyncrl.trainer.policy import Policy


@dataclass(frozen=True)
class RecordedBatch:
    """The batch that one step was trained on, in this order."""

    step: int
    groups: list[Group]


def batch_path(run_path: Path, step: int) -> Path:
    """Return where a run directory keeps the batch of a step."""
    return run_path / "batches" / f"step_{step:06d}.msgpack"


def write_batch(path: Path, step: int, groups: list[Group]) -> None:
    """Write the batch of a step; the file appears whole or not at all. Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(encode(RecordedBatch(step, groups)))
    os.replace(partial, path)


def read_batch(path: Path, step: int) -> list[Group]:
    """The groups of a step's batch, as they were consumed.

    Raises ValueError, in one line, for a broken file, and for one of another step or another version of this code.
    """
    try:
        batch = decode(RecordedBatch, path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path} is no recorded batch, or one of another version of this code: {error}"
        ) from None
    if batch.step != step:
        raise ValueError(
            f"{path} is the batch of step {batch.step}, not {step}: it was renamed or copied there"
        )
    return batch.groups


def _write_recording(path: Path, step: int, groups: list[Group]) -> None:
    """Make a recording of one step, as --record does. Its weights are in `path`/weights, below the run."""
    write_batch(batch_path(path, step), step, groups)
    weights = str(path / "weights")
    header = read_header(path.parent)
    header["config"] |= {"model": weights, "steps": step}
    _write_header(path, header | {"first_step": step}, weights)


def _write_header(path: Path, header: dict, weights: str) -> None:
    """Write run.json of a recording, with the fingerprint of the weights that it begins with."""
    write_header(path / "run.json", header | {"weights_sha256": weights_sha256(weights)}, None)


class RecordingPlugin(Plugin):
    """Keeps every batch with --record, and always the batch of a step that fails."""

    def on_batch(self, leader: "Leader", step: int, groups: list[Group]) -> None:
        """Write what is trained on to the run directory."""
        if leader.config.record:
            leader.clock.enter("save")
            if step == 1:
                _write_header(leader.run.path, read_header(leader.run.path), leader.model_path)
            write_batch(batch_path(leader.run.path, step), step, groups)

    def keep_batch(
        self,
        rank: "Follower | Leader",
        policy: "Policy",
        step: int,
        groups: list[Group] | None,
    ) -> str:
        """Keep the batch of a failed step, and the weights before its last update; collective.

        Leaders have the `groups` of their node. Return the end of the error, on rank 0.
        """
        from asyncrl.trainer.weight_files import save_weights

        path = rank.run.path / f"failed_step_{step}" if rank.cluster.is_first else None
        try:
            save_weights(policy, str(path / "weights") if path else "")
            groups_of_nodes = rank.cluster.gather(groups) if rank.cluster.is_leader else []
            if path:
                _write_recording(path, step, list(itertools.chain(*groups_of_nodes)))
        except OSError as failure:
            return f"; its batch could not be kept: {failure}"
        return f"; train on its batch again: python scripts/replay.py {path}" if path else ""


PLUGIN = RecordingPlugin()
