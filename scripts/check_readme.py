"""Whether the README and results/ agree: `python scripts/check_readme.py`. One line for each thing that does not.

Tables are made again from the committed records and compared cell by cell, numbers of the running text with what the
records say, at the digits that are shown; readme_claims.py has both. Every table under «Results» and every number in
the column «measured here» must be in it. Besides: a table's command stands in its section, the scripts, records and
figures that the README names are tracked, and the records in results/ say by which command and at which commit, without
uncommitted changes, they were made.
"""

import argparse
import functools
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.readme_claims import CLAIMS, README, RESULTS, ROOT, TABLES, Table

CHECKED_CHAPTER, CHECKED_COLUMN = "## Results", "measured here"
OF_A_TEST = "tests/"
"""In a cell of CHECKED_COLUMN: the numbers are held by a test and by no record."""
NUMBER = re.compile(r"\d+(?:\.\d+)?")
COMMANDS, COMMITS, CHANGES = ("command", "options"), ("commit", "git_commit"), ("dirty", "git_dirty", "git_diff")
"""Keys under which a record says how it was made. The cell of a grid has the options of its train_async.py."""
BESIDE_RUN_JSON = ("metrics.jsonl", "events.jsonl", "samples.jsonl")


@dataclass(frozen=True)
class Comparison:
    """A piece of a document and what it should be."""

    document: str
    start: int
    """Characters before it."""
    line: int
    shown: str
    recorded: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: says {self.shown!r}, the records say {self.recorded!r}"


Row = list[tuple[str, int]]
"""Cells of a table's row, and the characters of the document before each."""


def check(readme: str) -> list[str]:
    """All that is wrong, with `readme` as the README's text."""
    comparisons = compare(readme)
    differing = [str(comparison) for comparison in comparisons if comparison.shown != comparison.recorded]
    faults = [faults_of_tables(readme), faults_of_claims(readme, comparisons), untracked(readme), unexplained(RESULTS)]
    return differing + list(itertools.chain(*faults))


@functools.cache
def expected_tables() -> list[tuple[Table, list[list[str]]]]:
    """Every table, and the cells of its rows."""
    return [(table, [[cell for cell, _ in _cells(line)] for line in _rows(table.make())]) for table in TABLES]


@functools.cache
def expected_claims() -> list[tuple[re.Pattern, tuple[float | str, ...], str]]:
    """Every claim's pattern, values and command."""
    return [
        (re.compile(claim.pattern.replace(" ", r"\s+")), claim.expected(), command)
        for command, claims in CLAIMS.items()
        for claim in claims
    ]


def compare(readme: str) -> list[Comparison]:
    """Each cell and each number that has something to be compared with."""
    return [*compare_tables(readme), *compare_claims(readme)]


# Tables


def compare_tables(readme: str) -> Iterator[Comparison]:
    """Each cell of each table that the records make."""
    for table, expected in expected_tables():
        text = _text(table, readme)
        for row, expected_row in zip(find_table(text, expected[0]), expected, strict=False):
            for (cell, start), expected_cell in zip(row, expected_row, strict=False):
                yield Comparison(table.document, start, _line(text, start), cell, expected_cell)


def faults_of_tables(readme: str) -> Iterator[str]:
    """Tables that are missing, are of another size or lack their command, and those that nobody compares."""
    for table, expected in expected_tables():
        text = _text(table, readme)
        shown = find_table(text, expected[0])
        if not shown:
            yield f"{table.document}: has no table with the heading {' | '.join(expected[0])}"
            continue
        where = f"{table.document}:{_line(text, shown[0][0][1])}"
        if [len(row) for row in shown] != [len(row) for row in expected]:
            yield f"{where}: has {len(shown) - 1} rows, the records make {len(expected) - 1}; or a row is not as wide"
        if table.command not in section(text, shown[0][0][1]):
            yield f"{where}: `{table.command}`, which makes this table, is not in its section"
    headings = [expected[0] for table, expected in expected_tables() if table.document == README]
    for (cell, start), *others in (rows[0] for rows in find_tables(readme)):
        if chapter(readme, start) == CHECKED_CHAPTER and [cell, *(other for other, _ in others)] not in headings:
            yield f"{README}:{_line(readme, start)}: nothing checks this table; add it to TABLES in readme_claims.py"


def find_table(text: str, heading: list[str]) -> list[Row]:
    """The rows, heading first, of the table with this heading; none if there is none."""
    return next((rows for rows in find_tables(text) if [cell for cell, _ in rows[0]] == heading), [])


def find_tables(text: str) -> list[list[Row]]:
    """The tables of a Markdown text, without the rules below their headings."""
    tables, start, inside = [], 0, False
    for line in text.splitlines(keepends=True):
        if line.startswith("|") and not inside:
            tables.append([])
        if _rows([line]):
            tables[-1].append([(cell, start + offset) for cell, offset in _cells(line)])
        inside = line.startswith("|")
        start += len(line)
    return tables


def _rows(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("|") and not re.fullmatch(r"[|\s:-]+", line)]


def _cells(line: str) -> Row:
    """Cells of a line, and where each starts in it; `\\|` is no border."""
    bounds = [match.end() for match in re.finditer(r"(?<!\\)\|", line)]
    cells = [(line[start : end - 1], start) for start, end in itertools.pairwise(bounds)]
    return [(cell.strip(), start + len(cell) - len(cell.lstrip())) for cell, start in cells]


def _text(table: Table, readme: str) -> str:
    return readme if table.document == README else (ROOT / table.document).read_text(encoding="utf-8")


def _line(text: str, start: int) -> int:
    return text.count("\n", 0, start) + 1


def section(text: str, position: int) -> str:
    """What stands between the headings before and after a position."""
    headings = [match.start() for match in re.finditer(r"^##+ ", text, re.MULTILINE)]
    start = max((heading for heading in headings if heading <= position), default=0)
    return text[start : min((heading for heading in headings if heading > position), default=len(text))]


def chapter(text: str, position: int) -> str:
    """The heading of the second level above a position, empty if there is none."""
    return max(((m.start(), m[0]) for m in re.finditer(r"^## .*$", text[:position], re.MULTILINE)), default=(0, ""))[1]


# Running text


def compare_claims(readme: str) -> Iterator[Comparison]:
    """Each number of each claim."""
    for pattern, expected, _ in expected_claims():
        for match in pattern.finditer(readme):
            for group, value in enumerate(expected, start=1):
                start, shown = match.start(group), match[group]
                yield Comparison(README, start, _line(readme, start), shown, _as_shown(value, shown))


def _as_shown(value: float | str, shown: str) -> str:
    """The value with as many digits as are shown, and thousands apart if they are."""
    if isinstance(value, str):
        return value
    return f"{value:,.{len(shown.partition('.')[2])}f}".replace(",", " " if " " in shown else "")


def faults_of_claims(readme: str, comparisons: list[Comparison]) -> Iterator[str]:
    """Claims that the README does not make any more or lack their command, and numbers of CHECKED_COLUMN in none."""
    for pattern, _, command in expected_claims():
        match = pattern.search(readme)
        if match is None:
            yield f"{README}: has nothing like {pattern.pattern}, a claim of readme_claims.py"
        elif command not in section(readme, match.start()):
            line = _line(readme, match.start())
            yield f"{README}:{line}: `{command}`, which makes this number, is not in its section"
    claimed = {c.start + i for c in comparisons if c.document == README for i in range(len(c.shown))}
    for cell, start in _checked_cells(readme):
        for number in NUMBER.finditer(cell):
            if start + number.start() not in claimed:
                line = _line(readme, start)
                yield f"{README}:{line}: nothing checks {number[0]!r} in {cell!r}; add it to CLAIMS in readme_claims.py"


def _checked_cells(readme: str) -> Row:
    columns = [rows for rows in find_tables(readme) if rows[0][-1][0] == CHECKED_COLUMN]
    return [row[-1] for rows in columns for row in rows[1:] if OF_A_TEST not in row[-1][0]]


# Files


def untracked(readme: str) -> Iterator[str]:
    """Scripts, records and figures that the README names and git does not track."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = git.stdout.splitlines()
    for match in re.finditer(r"(scripts/\w+\.(?:py|sh))|\]\((results/[^)]+)\)", readme):
        if (name := match[1] or match[2]) not in tracked:
            yield f"{README}:{_line(readme, match.start())}: {name} is not tracked"


def unexplained(results: Path) -> Iterator[str]:
    """Folders of records of which one does not say how it was made."""
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        files = [path for path in sorted(folder.rglob("*.json*")) if path.name not in BESIDE_RUN_JSON]
        if not files:
            yield f"{folder.relative_to(results.parent)}: has no record, *.jsonl or run.json"
        for path in files:
            if fault := _fault_of_origin(path):
                yield f"{path.relative_to(results.parent)}: {fault}"


def _fault_of_origin(path: Path) -> str | None:
    """What is wrong with the origin of a run.json or of the records of a *.jsonl; the first may speak for all."""
    text = path.read_text(encoding="utf-8")
    records = [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]
    records = [record for record in records if isinstance(record, dict)]
    if not records:
        return "has no record"
    of_first = [[records[0].get(key) for key in keys if records[0].get(key)] for keys in (COMMANDS, COMMITS)]
    if not all(of_first):
        return f"its first record has no {' or '.join((COMMANDS, COMMITS)[of_first.index([])])}"
    commits = [str(record[key]) for record in records for key in COMMITS if key in record]
    if wrong := next((commit for commit in commits if not re.fullmatch("[0-9a-f]{12,40}", commit)), None):
        return f"{wrong!r} is no commit"
    if any(record.get(key) for record in records for key in CHANGES):
        return "was made with uncommitted changes"
    return None


def main() -> None:
    """Print what is wrong, and exit with status 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("readme", nargs="?", type=Path, default=ROOT / README, help="another text of it to check")
    readme = parser.parse_args().readme.read_text(encoding="utf-8")
    found = check(readme)
    print("\n".join(found) or f"{README} and results/ agree: {len(compare(readme))} cells and numbers compared")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
