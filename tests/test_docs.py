"""README and docs/: what they show is what the records and the code say, and what they tell one to type works."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
from cogapp import Cog
from programs import ROOT
from user_files import write_jsonl

from asyncrl.config import Config
from asyncrl.job.command_line import read_options

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


def anchors_of(page):
    """What a link to a heading of a page may be."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_file_that_the_pages_name_is_tracked_and_every_linked_heading_is_there():
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {ROOT / line for line in git.stdout.splitlines()}
    folders = "scripts|tests|algos|results|extras|asyncrl"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        paths = {
            ROOT / name for name in re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+\.\w+)", text)
        }
        for name, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
            linked = (page.parent / name).resolve() if name else page
            paths.add(linked)
            assert not anchor or anchor in anchors_of(linked), f"{page.name} links {name}#{anchor}"
        missing = {path for path in paths - tracked if path.name != "mine.py"}
        assert not missing, f"{page.name} names {missing}, which git does not track"


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
    write_jsonl(run / "events.jsonl", [{"time": 1.0} | event for event in of_run])
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


def records_of(path):
    """The records of a file, or of a run.json."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        parts = tomllib.loads(text).values()
    else:
        parts = map(json.loads, text.splitlines() if path.suffix == ".jsonl" else [text])
    return [part for part in parts if isinstance(part, dict)]


RECORDS = [
    path for path in sorted((ROOT / "results").rglob("*.json*")) if path.name not in BESIDE_RUN_JSON
]
RECORDS += sorted((ROOT / "results/mutation").glob("*.toml"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(ROOT / "results")))
def test_every_record_says_how_it_was_made(path):
    """The first record speaks for all."""
    records = records_of(path)
    assert any(records[0].get(key) for key in COMMANDS)
    commits = [str(record[key]) for record in records for key in COMMITS if record.get(key)]
    assert commits and all(re.fullmatch("[0-9a-f]{12,40}", commit) for commit in commits)
    assert not any(record.get(key) for record in records for key in CHANGES)


def test_every_folder_of_results_has_records():
    for folder in (path for path in (ROOT / "results").iterdir() if path.is_dir()):
        assert any(folder in path.parents for path in RECORDS), folder.name
