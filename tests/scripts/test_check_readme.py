import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import check_readme
from scripts.check_readme import (
    CHECKED_COLUMN,
    check,
    compare,
    faults_of_claims,
    faults_of_tables,
    find_table,
    find_tables,
)

ROOT = Path(__file__).parents[2]

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_and_the_committed_records_agree():
    assert check(README) == []


def test_every_other_digit_is_told_with_its_line_what_it_says_and_what_the_records_say():
    numbers = [c for c in compare(README) if c.document == "README.md" and re.search(r"\d", c.shown)]
    assert len(numbers) > 80
    for number in numbers:
        position = number.start + re.search(r"\d(?=\D*$)", number.shown).start()
        digit = str((int(README[position]) + 1) % 10)
        changed = README[:position] + digit + README[position + 1 :]
        comparisons = compare(changed)
        told = {str(c) for c in comparisons if c.shown != c.recorded} - {str(number)}
        shown = changed[number.start : number.start + len(number.shown)]
        of_heading = any("has no table with the heading" in fault for fault in faults_of_tables(changed))
        expected = f"README.md:{number.line}: says {shown!r}, the records say {number.recorded!r}"
        assert expected in told or of_heading, (number, told)


OF_README = [(table, cells) for table, cells in check_readme.expected_tables() if table.document == "README.md"]


def told(changed):
    """What is said of a changed README; each thing in one line."""
    assert changed != README
    found = check(changed)
    assert all("\n" not in line for line in found)
    return "\n".join(found)


@pytest.mark.parametrize(("table", "cells"), OF_README, ids=lambda value: getattr(value, "command", ""))
def test_a_row_too_few_or_too_many_another_heading_and_a_missing_command_are_told(table, cells):
    last = find_table(README, cells[0])[-1]
    row = next(line for line in README[last[0][1] - 2 :].splitlines(keepends=True))
    assert f"has {len(cells) - 2} rows, the records make {len(cells) - 1}" in told(README.replace(row, ""))
    assert f"has {len(cells)} rows, the records make {len(cells) - 1}" in told(README.replace(row, row + row))
    heading = " | ".join(cells[0])
    assert f"has no table with the heading {heading}" in told(README.replace(f"| {heading} |", f"| {heading}! |"))
    assert f"`{table.command}`, which makes this table, is not in its" in told(README.replace(table.command, "…"))


def test_a_table_of_results_or_a_measured_number_that_nothing_checks_is_told():
    added = README.replace("\n## Results\n", "\n## Results\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert "nothing checks this table; add it to TABLES" in told(added)
    cell = check_readme._checked_cells(README)[0][0]
    assert f"nothing checks '3.5' in '{cell}, 3.5 of 5'" in told(README.replace(cell, f"{cell}, 3.5 of 5"))


def test_a_claim_that_the_readme_does_not_make_any_more_is_told():
    for pattern, _, _ in check_readme.expected_claims():
        assert f"has nothing like {pattern.pattern}" in "\n".join(faults_of_claims(pattern.sub("", README), []))


def test_a_number_whose_command_is_not_in_its_section_is_told():
    for command in check_readme.CLAIMS:
        assert f"`{command}`, which makes this number, is not in its section" in told(README.replace(command, "…"))


def test_a_figure_or_script_that_is_not_tracked_is_told():
    figure = re.search(r"!\[[^\]]*\]\((results/[^)]+)\)", README)[1]
    assert "results/none.png is not tracked" in told(README.replace(figure, "results/none.png"))
    assert "scripts/none.sh is not tracked" in told(README.replace("scripts/quickstart.sh", "scripts/none.sh"))


def test_cells_are_found_where_they_are_also_beside_escaped_bars_and_empty_cells():
    text = "text\n| a \\| b | c |\n|---|:-:|\n|  | d|\n\n| e |\n"
    first, second = find_tables(text)
    assert [[cell for cell, _ in row] for row in first] == [["a \\| b", "c"], ["", "d"]]
    assert all(text[start:].startswith(cell) for row in [*first, *second] for cell, start in row)


def test_cells_whose_numbers_a_test_holds_need_no_record():
    cell = next(cell for cell, _ in check_readme._checked_cells(README) if "faster than" in cell)
    table = f"| {CHECKED_COLUMN} |\n|---|\n| 7 steps (tests/test_buffer.py) |\n| {cell} |\n"
    told = [fault for fault in faults_of_claims(table, []) if "nothing checks" in fault]
    assert told and all("faster than" in fault for fault in told)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"command": "c", "commit": "0123456789ab", "dirty": False}, None),
        ({"options": ["--a"], "git_commit": "0" * 40, "git_diff": ""}, None),
        ([], "has no record"),
        ({"commit": "0123456789ab"}, "its first record has no command or options"),
        ({"command": "c"}, "its first record has no commit or git_commit"),
        ({"command": "c", "commit": "0123456789ab-dirty"}, "'0123456789ab-dirty' is no commit"),
        ({"command": "c", "commit": "0123456789ab", "dirty": True}, "was made with uncommitted changes"),
        ({"command": "c", "git_commit": "0" * 40, "git_diff": "diff"}, "was made with uncommitted changes"),
    ],
)
def test_records_say_how_they_were_made(record, told, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "one.jsonl").write_text(json.dumps(record) + "\n" + '{"value": 1}\n' * bool(record))
    found = list(check_readme.unexplained(tmp_path))
    assert found == ([f"{tmp_path.name}/new/one.jsonl: {told}"] if told else [])


def test_a_folder_without_records_is_told(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "figure.png").touch()
    assert list(check_readme.unexplained(tmp_path)) == [f"{tmp_path.name}/new: has no record, *.jsonl or run.json"]


def test_the_script_fails_on_a_copy_with_another_digit_and_says_where(tmp_path):
    cell = next(c for c in compare(README) if re.fullmatch(r"0\.\d+ ± 0\.\d+", c.shown))
    changed = cell.shown[:2] + str((int(cell.shown[2]) + 1) % 10) + cell.shown[3:]
    copy = tmp_path / "README.md"
    copy.write_text(README[: cell.start] + changed + README[cell.start + len(cell.shown) :])
    command = [sys.executable, "scripts/check_readme.py", copy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"README.md:{cell.line}: says {changed!r}, the records say {cell.shown!r}\n" in done.stdout
