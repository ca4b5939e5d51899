"""What all scripts read and show: records as lines of JSON, tables as lines of Markdown."""

import gzip
import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

SHORT_LINES = "trajectory_lines"
"""Field of an event of older runs: the lists after it are trajectories, and how to read them."""
OPTIONAL = ("min_version", "max_version", "failure")
"""What a trajectory lacks where a list has null."""


def read(path: Path, cut: list[Path] | None = None) -> list[dict]:
    """The records of a JSON-lines file, in their order; none if there is neither this file nor NAME.gz.

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
            raise ValueError(f"{where} is not JSON: {error}; mend or delete the line") from None
    return records


def read_events(path: Path, cut: list[Path] | None = None) -> list[dict]:
    """As `read` of an events.jsonl. In older runs a trajectory is a list; it is returned as an object.

    Raises ValueError for a list before which no event says how to read it.
    """
    events, columns = [], None
    for line in read(path, cut):
        if isinstance(line, dict):
            columns = line.get(SHORT_LINES, columns)
        elif columns is None:
            what = f"trajectory {line} stands before the event with {SHORT_LINES!r}"
            raise ValueError(f"{path}: {what}; restore the file's beginning")
        else:
            line = _trajectory(line, **columns)
        events.append(line)
    return events


def _trajectory(values: list, since: float, columns: list[str]) -> dict:
    """The event of a list. Its times are milliseconds, each since the one before it, and the first since `since`."""
    event = {"event": "trajectory"} | dict(zip(columns, values, strict=False))
    event = {
        name: value for name, value in event.items() if name not in OPTIONAL or value is not None
    }
    moments = [round(since + ms / 1000, 3) for ms in accumulate(event.pop("times_ms"))]
    started_at, *turns, ended_at, time = moments
    turns = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    return event | {"time": time, "started_at": started_at, "ended_at": ended_at, "turns": turns}


def markdown(heading: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table."""
    return [
        f"| {' | '.join(map(str, cells))} |" for cells in (heading, ["---"] * len(heading), *rows)
    ]
