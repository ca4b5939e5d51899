"""README and docs/: what they show is what the records and the code say, and what they tell one to type works."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from cogapp import Cog

from asyncrl.config import Config
from asyncrl.job.command_line import read_options
from extras.swarm import swarm

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("extras/*/README.md")])]
COMMANDS, COMMITS, CHANGES = (
    ("command", "options"),
    ("commit", "git_commit"),
    ("dirty", "git_dirty", "git_diff"),
)
"""Keys under which a record says how it was made. The cell of a grid has the options of its train_async.py."""
BESIDE_RUN_JSON = ("metrics.jsonl", "events.jsonl", "events.jsonl.gz", "samples.jsonl")


def made(page, tmp_path):
    """A copy of a page with all of its blocks made again."""
    copy = tmp_path / page.name
    assert Cog().main(["cog", "-o", str(copy), "-I", str(ROOT), str(page)]) == 0
    return copy.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_what_the_records_and_the_code_make(page, tmp_path):
    text = page.read_text(encoding="utf-8")
    assert made(page, tmp_path) == text, f"run `.venv/bin/cog -r {page.relative_to(ROOT)}`"


def jobs():
    """Every command of the pages that starts a training run, and its page."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if found := re.search(
                    r"(?:python|torchrun\b.*|…) train_async\.py(.*)", line.partition("  #")[0]
                ):
                    yield pytest.param(
                        found[1].replace("…", ""), id=f"{page.stem}:{found[1][:40].strip()}"
                    )


@pytest.mark.parametrize("options", jobs())
def test_every_job_that_the_pages_show_is_accepted(options, tmp_path, monkeypatch):
    text = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    for name, source in re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", text, re.M | re.S):
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"config": Config().as_dict()}))
    read_options(shlex.split(options.replace("runs/NAME", str(tmp_path)))).checked()


def test_every_file_that_the_pages_name_is_tracked():
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {Path(line) for line in git.stdout.splitlines()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        linked = [page.parent / name for name in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        named = [
            ROOT / name
            for name in re.findall(
                r"(?<![\w/])((?:scripts|tests|algos|results|extras|asyncrl)/[\w/]+\.\w+)", text
            )
        ]
        for path in [*linked, *named]:
            name = path.resolve().relative_to(ROOT)
            assert name in tracked or name.name == "mine.py", (
                f"{page.name} names {name}, which git does not track"
            )


def test_the_recipe_for_a_notebook_runs_as_it_stands(tmp_path, monkeypatch):
    section = (
        (ROOT / "docs/extending.md")
        .read_text(encoding="utf-8")
        .partition("## A run in a notebook")[2]
    )
    read, draw = re.findall(
        r"^```python\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL
    )
    run = tmp_path / "runs/NAME"
    shutil.copytree(ROOT / "results/staleness/a1-s0", run)
    times = {"time": 1.0, "started_at": 0.5, "ended_at": 0.9}
    of_run = [
        {"event": "trajectory", "group": 3, "tokens": 7, **times},
        {"event": "step", "step": 1, "groups": [3, 4]},
    ]
    (run / "events.jsonl").write_text(
        "".join(json.dumps({"time": 1.0} | event) + "\n" for event in of_run)
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    (tmp_path / "docs").mkdir()
    known = {}
    exec(read, known)
    assert known["used"].to_numpy().tolist() == [[1, 3], [1, 4]]
    exec(draw, known)
    assert (tmp_path / "docs/notebook.png").stat().st_size > 10_000 and known["drift"].shape == (
        80,
        3,
    )


def test_the_figures_of_the_results_are_drawn_by_what_the_page_shows(tmp_path, monkeypatch):
    for name in ("staleness", "smollm2"):
        shutil.copytree(
            ROOT / "results" / name,
            tmp_path / "results" / name,
            ignore=shutil.ignore_patterns("*.png"),
        )
    monkeypatch.chdir(tmp_path)
    known = {}
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, known)
    for name in ("staleness/staleness.png", "smollm2/curves.png"):
        assert (tmp_path / "results" / name).stat().st_size > 10_000
    assert known["phases"].shape == (3, 3)


def test_every_heading_that_is_linked_is_there():
    for page in PAGES:
        for name, anchor in re.findall(
            r"\]\(([\w/.]*)#([^)]+)\)", page.read_text(encoding="utf-8")
        ):
            text = (page.parent / name if name else page).read_text(encoding="utf-8")
            anchors = [
                re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.+)$", text, re.M)
            ]
            assert anchor in anchors, f"{page.name} links {name}#{anchor}"


def test_the_reference_has_every_metric_of_machines_that_join():
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    of_machine = swarm._metrics(Counter(trajectories=1), 1.0)
    for name in [*swarm.COUNTS, *of_machine]:
        assert re.search(rf"`(swarm/(NAME/)?)?{name}`", text), name


def fault_of(path):
    """What is missing in how a run.json or a file of records says it was made; the first record speaks for all."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        parts = list(tomllib.loads(text).values())
    else:
        parts = [
            json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])
        ]
    records = [record for record in parts if isinstance(record, dict)]
    if not records:
        return "has no record"
    for keys in (COMMANDS, COMMITS):
        if not any(records[0].get(key) for key in keys):
            return f"its first record has no {' or '.join(keys)}"
    commits = [str(record[key]) for record in records for key in COMMITS if key in record]
    if not all(re.fullmatch("[0-9a-f]{12,40}", commit) for commit in commits):
        return "a commit is none"
    return (
        "has uncommitted changes"
        if any(record.get(key) for record in records for key in CHANGES)
        else None
    )


RECORDS = [
    path for path in sorted((ROOT / "results").rglob("*.json*")) if path.name not in BESIDE_RUN_JSON
]
RECORDS += sorted((ROOT / "results/mutation").glob("*.toml"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_every_record_says_how_it_was_made(path):
    assert fault_of(path) is None


def test_every_folder_of_results_has_records():
    for folder in (path for path in (ROOT / "results").iterdir() if path.is_dir()):
        assert any(folder in path.parents for path in RECORDS), folder.name
