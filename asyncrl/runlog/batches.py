"""Batches on disk, as they were consumed, and the fingerprint of the weights that a recorded run began with.

One file per step, batches/step_000001.safetensors in the run directory: the trajectories in the order in which they
were trained on, each field of Trajectory one array of its own name. What a field has per token lies end to end, in its
own dtype, cut by `num_tokens` [n] int64; what it has per trajectory is [n] int64 or float64. Text is in the header, as
JSON under the key `batch`, and so is the step. Nothing is rounded: what is read is what was written, bit by bit.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from asyncrl.records import Group, Trajectory

_FIELDS = {field.name: field.type for field in dataclasses.fields(Trajectory)}
_NUMBERS = {int: np.int64, float: np.float64}
"""Type of a field with one number per trajectory → dtype of its array."""
_WEIGHT_FILES = ("*.safetensors", "*.bin")


def batch_path(run_path: Path, step: int) -> Path:
    """Where a run directory keeps the batch of a step."""
    return run_path / "batches" / f"step_{step:06d}.safetensors"


def write_batch(path: Path, step: int, groups: list[Group]) -> None:
    """Write the batch of a step; the file appears whole or not at all. Raises OSError if it cannot be written."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    arrays = {"num_tokens": np.array([len(t.tokens) for t in trajectories], dtype=np.int64)}
    header: dict = {"step": step}
    for name, kind in _FIELDS.items():
        values = [getattr(trajectory, name) for trajectory in trajectories]
        if kind is np.ndarray:
            arrays[name] = np.concatenate(values)
        elif kind in _NUMBERS:
            arrays[name] = np.array(values, dtype=_NUMBERS[kind])
        else:
            header[name] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_bytes(save(arrays, {"batch": json.dumps(header)}))
    os.replace(partial, path)


def read_batch(path: Path, step: int) -> list[Group]:
    """The groups of a step's batch, as they were consumed.

    Raises ValueError, in one line, for a file that is broken, of another step, or of another version of this code.
    """
    header, arrays = _read(path)
    if header["step"] != step:
        raise ValueError(f"{path} is the batch of step {header['step']}, not {step}: it was renamed or copied there")
    if header.keys() - {"step"} | arrays.keys() - {"num_tokens"} != _FIELDS.keys():
        wrong = sorted((header.keys() | arrays.keys()) - {"step", "num_tokens"} ^ _FIELDS.keys())
        raise ValueError(f"{path} was recorded by another version of this code: it differs in {', '.join(wrong)}")
    num_tokens = arrays.pop("num_tokens")
    ends = num_tokens.cumsum()
    columns = {}
    for name, kind in _FIELDS.items():
        if kind is np.ndarray:
            columns[name] = [arrays[name][end - n : end] for n, end in zip(num_tokens, ends, strict=True)]
        else:
            columns[name] = arrays[name].tolist() if kind in _NUMBERS else map(_as_tuple, header[name])
    rows = zip(*columns.values(), strict=True)
    trajectories = [Trajectory(**dict(zip(columns, row, strict=True))) for row in rows]
    by_group = itertools.groupby(trajectories, key=lambda trajectory: trajectory.group_id)
    return [Group(group_id, tuple(members)) for group_id, members in by_group]


def _as_tuple(value):
    """JSON has lists only, records tuples only."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _read(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    try:
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["batch"])
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no recorded batch: {' '.join(str(error).split())}") from None


def weights_sha256(model_path: str) -> str:
    """SHA-256 over the names and the contents of a model folder's weight files."""
    found = sorted(file for pattern in _WEIGHT_FILES for file in Path(model_path).glob(pattern))
    digest = hashlib.sha256()
    for path in found:
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
