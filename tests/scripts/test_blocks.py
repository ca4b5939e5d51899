"""What scripts in the history made is of the records that are there, and those scripts can be run again."""

import hashlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = [p for p in sorted(ROOT.glob("results/*/*.md")) if p.read_text().startswith("<!-- Made by")]
DIGESTS = {
    "results/bandit/README.md": "745d4ffad080c3a5",
    "results/bandit/bandit.jsonl": "786f8d6ad04c28fe",
    "results/parts/table.md": "4c62f103845b0903",
    "results/planner/table.md": "f4a8c2c0997a902b",
    "results/peers/table.md": "dcc84c10b34ca078",
    "results/replay/replays.jsonl": "18059aa0c69d8369",
    "results/replay/table.md": "83459852b5b33866",
    "results/study/tables.md": "20150b643c3cf208",
    "results/study/cost.png": "172da36ceda7c9f2",
    "data/tiny/addition/model.safetensors": "e5710d14cdaa5789",
    "data/tiny/frozen_lake/model.safetensors": "b305683ef663e48d",
    "data/tiny/guess_number/model.safetensors": "9b3f633b31fb815f",
}
"""Whoever makes a file again writes its digest here, and the commit of its script into results/README.md."""


def sha256(data):
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("page", KEPT, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_kept_table_is_of_the_records_that_are_there(page):
    head, body = page.read_text().split("\n", 1)
    names, *digests = re.fullmatch(
        r"<!-- .* from (.*), sha256 (\w+)…, page sha256 (\w+)…. -->", head
    ).groups()
    records = b"".join((page.parent / name).read_bytes() for name in names.split())
    assert digests == [sha256(records), sha256(body.encode())] and body.startswith(("| ", "- "))


def test_what_was_made_in_the_history_is_as_it_was_made():
    assert {name: sha256((ROOT / name).read_bytes()) for name in DIGESTS} == DIGESTS


def test_the_scripts_in_the_history_are_at_the_commits_that_the_page_names():
    git = ["git", "-C", ROOT]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], stdout=subprocess.PIPE)
    if shallow.stdout == b"true\n":
        pytest.skip("this clone has no history")
    page = (ROOT / "results/README.md").read_text()
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)` \| (\w{12}) \|$", page, re.MULTILINE)
    assert len(rows) == 13
    for script, commit in rows:
        assert not (ROOT / script).exists(), f"{script} is here, so it needs no row"
        subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], check=True)
        subprocess.run([*git, "cat-file", "-e", f"{commit}:{script}"], check=True)
