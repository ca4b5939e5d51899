"""Checkpoints on disk. The manifest, written last, shows which of them are whole and belong to the run.

It has facts on the checkpoint, and the digest of every other file. So a truncated, changed or missing file is detected.
No file is unpickled here.
"""

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from asyncrl.runlog.disk_files import remove
from asyncrl.runlog.header import read_run_id

FORMAT = 10
"""Format of checkpoints. Other formats are not read."""
RESUME_FOLDER, MANIFEST, HELD_BACK = "resume", "manifest.json", "held_back"
"""Folder of the files in a checkpoint that only --resume needs. In it, the manifest and the folder of weights that
publish_delay holds back."""
KEPT_TO_RESUME = 2
"""Number of checkpoints that keep the files for --resume if --keep-last is 0."""


@dataclass(frozen=True)
class NodeFacts:
    """Facts of one node in a manifest."""

    probe: dict
    """State of its probe."""
    record_bytes: dict[str, int]
    """Length of each of its record files at the checkpoint, by the name in the run: `events`, `node_1/events`."""
    problems_digest: str
    """Digest of its task's problems."""


@dataclass(frozen=True)
class ResumePoint:
    """The moment that the records of a node continue from."""

    step: int
    record_bytes: dict[str, int]
    """Length of each record file at the checkpoint, by its name in the run."""
    skipped: list[str]
    """See Checkpoint."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, with the facts in its manifest."""

    path: Path
    skipped: list[str]
    """Newer checkpoints that are not whole or of another run, each with the reason."""
    run_id: str
    step: int
    frozen_sha256: str
    """SHA-256 of the untrained base weights (LoRA, KL reference) that the checkpoint omits; empty without them."""
    nodes: list[NodeFacts]
    held_back: list[int]
    """Versions from the announced one to the one before the trainer's, oldest first; empty without publish_delay. A
    resume announces the first again. Their weights are in held_back/VERSION.safetensors."""

    @property
    def resume_folder(self) -> Path:
        """Folder of the files that only --resume needs."""
        return self.path / RESUME_FOLDER

    def probe_of(self, node: int) -> dict:
        """Return the state of the probe for a node. Nodes can be more than before."""
        return self.nodes[node % len(self.nodes)].probe

    def resume_point(self, node: int, num_nodes: int) -> ResumePoint:
        """Return the moment that the records of one of `num_nodes` nodes continue from.

        The first node also gets the records of absent nodes. They can come back in a later resume.
        """
        record_bytes = {}
        for facts in self.nodes:
            for name, num_bytes in facts.record_bytes.items():
                folder = name.rpartition("/")[0]
                owner = int(folder.removeprefix("node_") or 0)
                if node == (owner if owner < num_nodes else 0):
                    record_bytes[name] = num_bytes
        return ResumePoint(self.step, record_bytes, self.skipped)


def write_manifest(checkpoint: Path, **facts) -> None:
    """Write the manifest of the checkpoint in a folder: the digest of each file, and the facts of Checkpoint."""
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    files = {str(path.relative_to(checkpoint)): hash_file(path) for path in paths}
    manifest = {"format": FORMAT, "facts": facts, "files": files}
    (checkpoint / RESUME_FOLDER / MANIFEST).write_text(
        json.dumps({"manifest": manifest, "blake3": _hash_manifest(manifest)})
    )


def find_newest_checkpoint(run: Path) -> Checkpoint:
    """Return the newest whole checkpoint that this run has written. Raises ValueError if no checkpoint is."""
    skipped: list[str] = []
    for path in reversed(list_checkpoints(run / "checkpoints")):
        try:
            return Checkpoint(path=path, skipped=skipped, **_read_manifest(path, run))
        except ValueError as error:
            skipped.append(f"{path}: {error}")
    reasons = "".join(f"; {reason}" for reason in skipped)
    raise ValueError(f"--resume {run}: it has no whole checkpoint{reasons}; begin a new run")


def _read_manifest(checkpoint: Path, run: Path) -> dict:
    """Return the facts in a checkpoint's manifest.

    Raises ValueError, with the file, if a file was changed since, and if the checkpoint is of another run.
    """
    try:
        written = json.loads((checkpoint / RESUME_FOLDER / MANIFEST).read_text(encoding="utf-8"))
        manifest, digest = written["manifest"], written["blake3"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    if digest != _hash_manifest(manifest):
        raise ValueError(f"{MANIFEST} was changed")
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, and this code reads {FORMAT}")
    for name, digest in manifest["files"].items():
        if not (checkpoint / name).is_file():
            raise ValueError(f"{name} is missing")
        if hash_file(checkpoint / name) != digest:
            raise ValueError(f"{name} was changed")
    facts, run_id = manifest["facts"], read_run_id(run)
    if facts["run_id"] != run_id:
        raise ValueError(f"it is of run {facts['run_id']}, and {run} is run {run_id}")
    return facts | {"nodes": [NodeFacts(**node) for node in facts["nodes"]]}


def hash_file(file: Path) -> str:
    """Return the BLAKE3 of a file."""
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _hash_manifest(manifest: dict) -> str:
    return blake3(json.dumps(manifest).encode()).hexdigest()


def parse_step(path: Path) -> int:
    """Return the step in a checkpoint's name; −1 for other names."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    return int(match[1]) if match else -1


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints with files for --resume in a folder, oldest first, whole or not."""
    paths = [
        inner.parent
        for inner in folder.glob(f"step_*/{RESUME_FOLDER}")
        if parse_step(inner.parent) >= 0
    ]
    return sorted(paths, key=parse_step)


def clear_torn_checkpoints(checkpoint: Checkpoint) -> None:
    """Rename checkpoints that are newer than the newest whole one, and delete half written or half deleted folders.

    The steps of the renamed ones can then be saved again.
    """
    for path in checkpoint.path.parent.iterdir():
        if parse_step(path) > checkpoint.step:
            path.rename(path.with_name(f"{path.name}.torn-{time.time_ns()}"))
        elif re.fullmatch(r"step_\d+\.(tmp|old-\d+)", path.name):
            remove(path)
