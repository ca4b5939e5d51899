"""What all scripts read and show: records as lines of JSON, tables as lines of Markdown."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path


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


def markdown(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table."""
    cells = [heading, ["---"] * len(heading), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in cells]
