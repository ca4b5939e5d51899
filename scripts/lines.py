"""What all scripts do alike: read records as lines of JSON, show tables as lines of Markdown, read a command line."""

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tyro

from asyncrl.cluster.streams import keep_printing
from asyncrl.config import with_home_folder


def read(path: Path, cut: list[Path] | None = None) -> list[dict]:
    """Return the records of a JSON-lines file in their order; none if there is neither this file nor NAME.gz.

    A last line that is half written is left out, and its path put into `cut`, if that is given. Raises ValueError for
    any other line that is not JSON.
    """
    text, records = "", []
    packed = path.with_name(f"{path.name}.gz")
    if path.exists():
        text = path.read_text(encoding="utf-8")
    elif packed.exists():
        text = gzip.decompress(packed.read_bytes()).decode()
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if cut is not None and number == len(lines) and not text.endswith("\n"):
                cut.append(path)
                break
            where = f"{path}, line {number} of {len(lines)}"
            raise ValueError(f"{where} is not JSON: {error}; fix or delete the line") from None
    return records


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
