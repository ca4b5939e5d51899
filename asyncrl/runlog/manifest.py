"""Checkpoints on disk: which are there, whole and of the run, by the manifest that is written last into each.

It says what the checkpoint is of, and the size and digest of every other file, so that one which is cut, changed or
missing is found. Nothing that is read here is unpickled.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

FORMAT = 2
"""Of checkpoints; those of another are not read."""
PART, MANIFEST = "resume", "manifest.json"
"""Folder in a checkpoint of what only --resume needs, and the file there."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, and what its manifest says."""

    path: Path
    step: int
    num_nodes: int
    frozen_sha256: str
    """Of the files of the weights that are not trained (LoRA, reference), which it does not have; empty without."""
    probes: list[dict]
    """State of each node's probe."""
    records: list[dict[str, int]]
    """How many bytes of each of its records count, by node."""
    delayed: list[int]
    """Versions whose weights are in delayed_VERSION.safetensors."""
    skipped: list[str]
    """Newer checkpoints that are not whole or of another run, and why."""
    run_id: str | None = None
    """Id of the run that it is of; None where older code has made it."""

    @property
    def part(self) -> Path:
        """Folder of what is not for people."""
        return self.path / PART

    def probe_of(self, node: int) -> dict:
        """The probe that a node goes on with."""
        return self.probes[node % self.num_nodes]

    def event(self, node: int) -> dict:
        """What is recorded, on a node, of where the run goes on."""
        records = self.records[node] if node < self.num_nodes else {}
        return {"step": self.step, "records": records, "skipped": self.skipped}

    def delayed_path(self, version: int) -> Path:
        """Where the weights of a version are that publish_delay held back."""
        return self.part / f"delayed_{version}.safetensors"


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


def id_of(run: Path) -> str | None:
    """The id in the run.json of a run, or of a node's folder of one; None where older code has made it."""
    return json.loads((run / "run.json").read_text(encoding="utf-8")).get("run_id")


def run_named(run_id: str | None) -> str:
    """A run as messages call it."""
    return "a run without an id" if run_id is None else f"run {run_id}"


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


def how_to_go_on(run: Path | None) -> str:
    """What to type to go on with a run that was stopped, or why it cannot; None is one that had not started yet."""
    saved = list(checkpoints_in(run / "checkpoints")) if run else []
    if saved:
        launcher = "torchrun" if os.environ.get("TORCHELASTIC_RUN_ID") else "python"
        how = f"{shlex.quote(str(Path(sys.executable).with_name(launcher)))} train_async.py"
        return f"go on from step {step_of(saved[-1])}: {how} --resume {shlex.quote(str(run))}"
    metrics = run and run / "metrics.jsonl"
    if not (metrics and metrics.exists() and metrics.stat().st_size):
        return "nothing is saved, as no step had ended"
    return "nothing is saved, as the running step was not waited for; --save-every N saves on the way"


def newest_checkpoint(run: Path) -> Checkpoint:
    """The newest whole checkpoint that a run has written itself. Raises ValueError if there is none."""
    skipped, run_id = [], id_of(run)
    for path in reversed(list(checkpoints_in(run / "checkpoints"))):
        try:
            checkpoint = Checkpoint(path=path, skipped=skipped, **read_manifest(path))
        except ValueError as error:
            skipped.append(str(error))
            continue
        if checkpoint.run_id == run_id:
            return checkpoint
        skipped.append(f"{path}: it is of {run_named(checkpoint.run_id)}, and {run} is {run_named(run_id)}")
    reasons = "".join(f"; {reason}" for reason in skipped)
    raise ValueError(f"--resume {run}: no whole checkpoint is there{reasons}; begin a new run")


def set_aside(checkpoint: Checkpoint) -> None:
    """Rename what is newer than a checkpoint, as it is not whole, so that its steps may be saved again; and delete what
    was half written, or half deleted."""
    for path in checkpoint.path.parent.iterdir():
        if step_of(path) > checkpoint.step:
            path.rename(path.with_name(f"{path.name}.torn-{os.getpid()}"))
        elif re.fullmatch(r"step_\d+\.(tmp|old-\d+)", path.name):
            remove(path)


def remove(path: Path) -> None:
    """Delete a folder and what is in it, or a file, or a link alone; nothing is there after it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
