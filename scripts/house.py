"""Measure the house: how large its rooms, its reading path, classes and functions are, and how many options it has.

    python scripts/house.py

Prints a line per size with its limit, and exits with status 1 if one is above it. That imports run only downwards is
tests/test_house.py's.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from config import Config

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("job", "trainer", "controller", "engine", "weights", "cluster", "records", "data", "algos")
READING_PATH = (
    "train_async.py", "rollout.py", "config.py", "job/node.py", "job/publisher.py", "controller/controller.py",
    "controller/announcements.py", "controller/dispatcher.py", "controller/buffer.py", "controller/tickets.py",
    "data/messages.py", "engine/proxy.py", "engine/episode.py", "trainer/policy.py", "trainer/batch.py",
    "trainer/packing.py", "trainer/logprobs.py", "weights/transport.py",
)  # fmt: skip
"""What a fork must understand to follow one step."""
MAX_FILES_AT_TOP, MAX_ROOM_FILES, MAX_ROOM_LINES = 3, 12, 2100
MAX_READING_PATH, MAX_SCRIPTS = 3900, 7300
MAX_CLASS, MAX_FUNCTION, MAX_MEDIAN_FUNCTION, MAX_OPTIONS = 260, 45, 10, 67


@dataclass(frozen=True)
class Size:
    """Something that was counted, and its limit."""

    what: str
    count: float
    limit: float

    @property
    def is_kept(self) -> bool:
        """Whether the count is within its limit."""
        return self.count <= self.limit

    def __str__(self) -> str:
        return f"{self.what:52} {self.count:6g}  of {self.limit:g}{'' if self.is_kept else '  TOO LARGE'}"


def sizes(root: Path = ROOT) -> Iterator[Size]:
    """Count everything that has a limit."""
    yield Size("files at the top", len(list(root.glob("*.py"))), MAX_FILES_AT_TOP)
    for room in ROOMS:
        files = [path for path in (root / room).glob("*.py") if path.name != "__init__.py"]
        if room != "algos":
            yield Size(f"{room}/ files", len(files), MAX_ROOM_FILES)
        yield Size(f"{room}/ lines", sum(map(num_lines, files)), MAX_ROOM_LINES)
    yield Size("reading path, lines of 18 files", sum(num_lines(root / p) for p in READING_PATH), MAX_READING_PATH)
    yield Size("scripts/ lines", sum(map(num_lines, (root / "scripts").rglob("*.py"))), MAX_SCRIPTS)
    core = [path for room in ROOMS for path in (root / room).glob("*.py")] + list(root.glob("*.py"))
    classes = largest(core, (ast.ClassDef,))
    functions = largest(core, (ast.FunctionDef, ast.AsyncFunctionDef))
    yield Size(f"largest class, {classes[-1][1]}", classes[-1][0], MAX_CLASS)
    yield Size(f"largest function, {functions[-1][1]}", functions[-1][0], MAX_FUNCTION)
    yield Size("median function", statistics.median(lines for lines, _ in functions), MAX_MEDIAN_FUNCTION)
    yield Size("options", len(fields(Config)), MAX_OPTIONS)


def num_lines(path: Path) -> int:
    """Lines of a file, all of them."""
    return len(path.read_text(encoding="utf-8").splitlines())


def largest(files: list[Path], kinds: tuple[type, ...]) -> list[tuple[int, str]]:
    """(lines, name) of every definition of these kinds, the largest last."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds))
    return sorted((node.end_lineno - node.lineno + 1, node.name) for node in nodes)


def main() -> None:
    """Print all sizes."""
    counted = list(sizes())
    print(*counted, sep="\n")
    sys.exit(not all(size.is_kept for size in counted))


if __name__ == "__main__":
    main()
