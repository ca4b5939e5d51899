"""What scripts in the history made is of the records that are there, and those scripts can be run again."""

import hashlib
import re
import subprocess

import pytest
from programs import ROOT

from scripts import blocks

KEPT = [p for p in sorted(ROOT.glob("results/*/*.md")) if p.read_text().startswith("<!-- Made by")]


def sha256(data):
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.parametrize("page", KEPT, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_kept_table_is_of_the_records_that_are_there(page):
    head, body = page.read_text().split("\n", 1)
    names, *digests = re.fullmatch(
        r"<!-- .* from (.*), sha256 (\w+)…, page sha256 (\w+)…. -->", head
    ).groups()
    records = b"".join((page.parent / name).read_bytes() for name in names.split())
    assert digests == [sha256(records), sha256(body.encode())]
    assert body.startswith(("| ", "- ", "# ", "**"))


def test_the_losses_that_the_page_of_staleness_names_are_those_in_bold():
    page = (ROOT / "docs/staleness.md").read_text()
    short, costs = (
        page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        for heading in ("In short", "What lag costs")
    )
    rows = [line.strip("| ").split(" | ") for line in costs.splitlines() if line[:3] == "| `"]
    bold = [{row[0] for row in rows if row[column].startswith("**")} for column in range(1, 6)]
    for column, lag in enumerate(("1", "4", "16", "4", "16")):
        model = "SmolLM2-135M" if column > 2 else "tiny model"
        sentence = next(
            line for line in short.splitlines() if line.startswith(f"- {model}, lag {lag}:")
        )
        assert {*re.findall(r"`\w+`", sentence.partition(";")[0])} == bold[column], sentence


def test_the_scripts_in_the_history_are_at_the_commits_that_the_page_names():
    git = ["git", "-C", ROOT]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], stdout=subprocess.PIPE)
    if shallow.stdout == b"true\n":
        pytest.skip("this clone has no history")
    page = (ROOT / "results/README.md").read_text()
    rows = re.findall(r"^\| .* \| `([\w/]+\.py)` \| (\w{12}) \|$", page, re.MULTILINE)
    assert len(rows) == 24
    for script, commit in rows:
        assert not (ROOT / script).exists(), f"{script} is here, so it needs no row"
        subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], check=True)
        subprocess.run([*git, "cat-file", "-e", f"{commit}:{script}"], check=True)


def test_a_prediction_has_a_row_for_each_gpu_that_measured_it(monkeypatch):
    measured = [
        {"case": "sync 0.6b", "gpu": gpu, "numbers": {"load_s": load_s}}
        for gpu, load_s in (("H100", 0.097), ("H200", 0.194))
    ]
    monkeypatch.setattr(blocks, "records_of", lambda _: measured)
    (first, second) = (line for line in blocks.predictions().splitlines() if "load_s" in line)
    assert "| 0.097 | 0.097 | H100 | 1.00 |" in first
    assert "| 0.097 | 0.194 | H200 | 2.00 |" in second
