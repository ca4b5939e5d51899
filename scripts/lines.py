"""What all scripts read and show: records as lines of JSON, tables as lines of Markdown."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from asyncrl.runlog.trajectory_lines import expand


def read(path: Path, cut: list[Path] | None = None) -> list[dict]:
    """The records of a JSON-lines file, in their order; none if there is no file.

    A last line that is half written is left out, and its path put into `cut`, if that is given. Raises ValueError for
    any other line that is not JSON.
    """
    text, records = path.read_text(encoding="utf-8") if path.exists() else "", []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if cut is not None and number == len(lines) and not text.endswith("\n"):
                cut.append(path)
                break
            where = f"{path}, line {number} of {len(lines)}"
            raise ValueError(f"{where} is not JSON: {error}; mend or delete the line") from None
    return records


def read_events(path: Path, cut: list[Path] | None = None) -> list[dict]:
    """As `read` of an events.jsonl, with trajectories as objects that name their fields."""
    return expand(read(path, cut), str(path))


def markdown(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table."""
    return [f"| {' | '.join(map(str, cells))} |" for cells in (heading, ["---"] * len(heading), *rows)]
