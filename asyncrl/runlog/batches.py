"""Batches on disk, as they were consumed, and the fingerprint of the weights that a recorded run began with.

One file per step, batches/step_000001.msgpack in the run directory: the groups in the order in which they were trained
on, as asyncrl/runlog/plain.py writes records. Nothing is rounded: what is read is what was written, bit by bit.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from asyncrl.records import Group
from asyncrl.runlog.plain import decode, encode

_WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True)
class RecordedBatch:
    """What one step was trained on, in this order."""

    step: int
    groups: list[Group]


def batch_path(run_path: Path, step: int) -> Path:
    """Where a run directory keeps the batch of a step."""
    return run_path / "batches" / f"step_{step:06d}.msgpack"


def write_batch(path: Path, step: int, groups: list[Group]) -> None:
    """Write the batch of a step; the file appears whole or not at all. Raises OSError if it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(encode(RecordedBatch(step, groups)))
    os.replace(partial, path)


def read_batch(path: Path, step: int) -> list[Group]:
    """The groups of a step's batch, as they were consumed.

    Raises ValueError, in one line, for a file that is broken, of another step, or of another version of this code.
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


def weights_sha256(model_path: str) -> str:
    """SHA-256 over the names and the contents of a model folder's weight files."""
    found = sorted(file for pattern in _WEIGHT_FILES for file in Path(model_path).glob(pattern))
    digest = hashlib.sha256()
    for path in found:
        with open(path, "rb") as file:
            digest.update(
                f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return digest.hexdigest()
