"""The manifest of a checkpoint, written last: what the checkpoint is of, and the size and digest of every other file.

A file that is cut, changed or missing is found by it. Nothing that is read here is unpickled.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

FORMAT = 1
"""Of checkpoints; those of another are not read."""
PART, MANIFEST = "resume", "manifest.json"
"""Folder in a checkpoint of what only --resume needs, and the file there."""


def write_manifest(checkpoint: Path, files: dict[str, tuple[int, str]], **facts) -> None:
    """Write the manifest of the checkpoint in a folder, with what `measured` gave of its files, and flush it."""
    manifest = {"format": FORMAT, "facts": facts, "files": files}
    file = checkpoint / PART / MANIFEST
    file.write_text(json.dumps({"manifest": manifest, "blake3": _digest_of(manifest)}))
    flush(file)


def read_manifest(checkpoint: Path) -> dict:
    """The facts of a checkpoint of which every file is as it was written. Raises ValueError that says what is not."""
    try:
        written = json.loads((checkpoint / PART / MANIFEST).read_text(encoding="utf-8"))
        manifest, digest = written["manifest"], written["blake3"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint}: {MANIFEST} cannot be read ({type(error).__name__})") from None
    if digest != _digest_of(manifest):
        raise ValueError(f"{checkpoint}: {MANIFEST} is not as it was written")
    if manifest["format"] != FORMAT:
        raise ValueError(f"{checkpoint}: its format is {manifest['format']}, and this code reads {FORMAT}")
    for name, (size, digest) in manifest["files"].items():
        file = checkpoint / name
        if not file.is_file():
            raise ValueError(f"{checkpoint}: {name} is missing")
        if file.stat().st_size != size:
            raise ValueError(f"{checkpoint}: {name} has {file.stat().st_size} bytes of {size}")
        if measured(file)[1] != digest:
            raise ValueError(f"{checkpoint}: {name} is not as it was written")
    return manifest["facts"]


def measured(file: Path) -> tuple[int, str]:
    """Size of a file in bytes, and its BLAKE3."""
    return file.stat().st_size, blake3().update_mmap(file).hexdigest()


def _digest_of(manifest: dict) -> str:
    return blake3(json.dumps(manifest).encode()).hexdigest()


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def step_of(path: Path) -> int:
    """The step of a checkpoint by its name; −1 of what has another name."""
    found = re.fullmatch(r"step_(\d+)", path.name)
    return int(found[1]) if found else -1


def checkpoints_in(folder: Path) -> Iterator[Path]:
    """The checkpoints in a folder that a run might go on from, oldest first, whole or not."""
    found = sorted(folder.glob(f"step_*/{PART}"), key=lambda part: step_of(part.parent))
    return (part.parent for part in found if step_of(part.parent) >= 0)
