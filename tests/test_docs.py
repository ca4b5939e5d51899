"""README and docs/: what they show is what the records and the code say, and what they tell one to type works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from dataclasses import replace

import pytest
from cogapp import Cog
from programs import ROOT
from test_extending import FILES

from asyncrl.config import RENAMED, Config, switch
from asyncrl.job.choices import try_choices
from asyncrl.job.command_line import read_options
from asyncrl.runlog.manifest import FORMAT
from asyncrl.trainer.lag_stats import LAG_BUCKETS
from asyncrl.trainer.optimizer import choose_lr
from extras.swarm.wire import PROTOCOL
from scripts.bench import gpu

PAGES = [ROOT / "README.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("extras/*/README.md")])]
COMMANDS, COMMITS, CHANGES = (
    ("command", "options"),
    ("commit", "git_commit"),
    ("dirty", "git_dirty", "git_diff"),
)
"""Keys under which a record says how it was made. The cell of a grid has the options of its train_async.py."""
SIZES = {
    "tiny": [120_000], "data/tiny/guess_number": [120_000], "smollm2": [134_515_008],
    "Qwen/Qwen3-8B-Base": [8_190_735_360], "Qwen/Qwen3-1.7B-Base": [1_720_574_976],
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": [1_777_088_000], "PATH": [134_515_008, 8_190_735_360],
}  # fmt: skip
"""Parameters of the models that the pages name. PATH or FOLDER may have any number."""
NOT_BUILT = [ROOT / name for name in ("AGENTS.md", "CHANGELOG.md", "WORKLOG.md", "tests/README.md")]
"""Pages without blocks and commands. History names files that are gone."""
PLACEHOLDERS = {"mine.py", "FILE.py", "test_FILE.py"}
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
                        found[1].replace("…", "").partition('"$@"')[0],
                        id=f"{page.stem}:{found[1][:40].strip()}",
                    )


@pytest.mark.parametrize("options", jobs())
def test_every_job_that_the_pages_show_is_accepted(options, tmp_path, monkeypatch):
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_NAME", "job")
    (tmp_path / "run.json").write_text(json.dumps({"config": Config().as_dict()}))
    words = os.path.expandvars(options.replace("runs/NAME", str(tmp_path)))
    config = read_options(shlex.split(words)).checked()
    for size in SIZES.get(config.model.removesuffix("-tools"), SIZES["PATH"]):
        fitting, _ = choose_lr(replace(config, lr=None, optimizer="adamw"), size)
        chosen, line = choose_lr(config, size)
        assert "warning" not in line
        assert fitting.lr / 10 <= chosen.lr <= fitting.lr * 10
    if "8b" in config.model.lower() and "--task" in options:  # a cut command has none
        assert config.eval_every == 0 or config.eval_every >= 40, "an evaluation takes minutes"
    if " my_" in options:
        try_choices(config)


FIRST_HOUR = (
    (ROOT / "docs/devices.md")
    .read_text("utf-8")
    .partition("### First hour")[2]
    .partition("\n##")[0]
)


def test_the_first_hour_has_time_for_all_parts_of_each_line_and_installs_pytest_first():
    lines = re.findall(r"^bash scripts/gpu_check\.sh (.+?)  #", FIRST_HOUR, re.M)
    assert len(lines) == 3
    for line in lines:
        options, _, names = line.partition("--only ")
        budget = re.search(r"--budget-s (\d+)", options)
        parts = gpu.chosen_parts("cuda", names.split(), 8).values()
        assert sum(part.limit_s for part in parts) <= (float(budget[1]) if budget else gpu.BUDGET_S)
    assert FIRST_HOUR.partition("```\n")[2].startswith("bash scripts/install.sh --dev;")


def test_the_first_hour_allows_the_mismatch_of_healthy_runs_in_bfloat16():
    (allowed,) = re.findall(r"`mismatch/abs_mean` below ([\d.]+)", FIRST_HOUR)
    records = records_of(ROOT / "results/mismatch/smollm2_h200.jsonl")
    healthy = [r["mismatch/abs_mean"] for r in records if r.get("dtype") == "bfloat16"]
    assert len(healthy) > 5 and float(allowed) >= max(healthy)


def anchors_of(page):
    """What a link to a heading of a page may be."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_file_that_the_pages_name_is_tracked_and_every_linked_heading_is_there():
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {ROOT / line for line in git.stdout.splitlines()}
    folders = "scripts|tests|algos|results|extras|asyncrl"
    for page in [*PAGES, *NOT_BUILT]:
        text = page.read_text(encoding="utf-8")
        names = re.findall(rf"(?<![\w/])((?:{folders})/[\w/]+\.\w+)", text)
        is_history = page.name in ("CHANGELOG.md", "WORKLOG.md")
        paths = set() if is_history else {ROOT / name for name in names}
        for name, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
            linked = (page.parent / name).resolve() if name else page
            paths.add(linked)
            assert not anchor or anchor in anchors_of(linked), f"{page.name} links {name}#{anchor}"
        missing = {path for path in paths - tracked if path.name not in PLACEHOLDERS}
        assert not missing, f"{page.name} names {missing}, which git does not track"


def test_the_changes_have_every_old_name_and_the_formats_of_today():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for old, new in RENAMED.items():
        assert f"| `{switch(old, True)}` | `{switch(new, True)}` |" in text
    assert f"Checkpoints have format {FORMAT}.**" in text
    assert f"speak protocol {PROTOCOL}.**" in text


def listed_metrics():
    """A pattern of all metrics of docs/reference.md. A name without a slash has the folder of the name before it."""
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    section = text.partition("## Metrics")[2].partition("\n## ")[0]
    patterns = []
    for names in re.findall(r"^\| (`.+?) \| ", section, re.M):
        folder = ""
        for name in re.findall("`(.+?)`", names):
            name = name if "/" in name else folder + name
            folder = name[: name.rfind("/") + 1]
            pattern = re.escape(name).replace(r"\{", "(").replace(r"\}", ")").replace(",", "|")
            if not name.startswith("NAME/"):
                patterns.append(re.sub(r"NAME|REASON|\\\*", ".+", pattern))
    return "|".join(patterns)


def test_every_metric_of_the_page_on_telemetry_is_in_the_reference():
    text = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
    rows = re.findall(r'^\| <a id="([\w-]+)"></a>(.+?\?) \| (.+?) \|', text, re.M)
    assert len(rows) >= 15 and len({place for place, *_ in rows}) == len(rows)
    words = re.findall("`(.+?)`", text)
    buckets = "|".join(map(re.escape, LAG_BUCKETS))
    metrics = {word for word in words if re.fullmatch(r"[a-z_]+/[\w/+-]+", word)}
    assert len(metrics) > 30 and all("`" in names for *_, names in rows)
    for metric in metrics:
        by_lag = re.fullmatch(rf"((?:loss|drift)/\w+)/lag_({buckets})", metric)
        assert re.fullmatch(listed_metrics(), by_lag[1] if by_lag else metric), metric


def test_what_the_pages_read_and_draw_in_python_is_read_and_drawn(tmp_path, monkeypatch):
    no_figures = shutil.ignore_patterns("*.png")
    for name in ("staleness", "smollm2"):
        shutil.copytree(ROOT / "results" / name, tmp_path / "results" / name, ignore=no_figures)
    shutil.copytree(ROOT / "results/smollm2/one_digit-s0", tmp_path / "runs/NAME")
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    known = {}
    for page, start in (("extending", "## A run in a notebook"), ("results", "# Results")):
        text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        for block in re.findall(r"(?sm)^```python\n(.*?)^```", text[text.index(start) :]):
            exec(block, known)
    for name in ("docs/notebook", "results/staleness/staleness", "results/smollm2/curves"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert known["used"]["groups"].nunique() > 100 and known["phases"].shape == (3, 3)


def records_of(path):
    """The records of a file, or of a run.json."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return [part for part in tomllib.loads(text).values() if isinstance(part, dict)]
    return [json.loads(line) for line in (text.splitlines() if path.suffix == ".jsonl" else [text])]


@pytest.mark.parametrize(
    "folder",
    [
        folder
        for folder in sorted((ROOT / "results").glob("*/"))
        if [path.name for path in folder.iterdir()] != ["plan.md"]  # committed before the first run
    ],
    ids=lambda path: path.name,
)
def test_every_folder_of_results_has_records_that_say_how_they_were_made(folder):
    """The first record of a file speaks for all."""
    kind = "*.toml" if folder.name == "mutation" else "*.json*"
    paths = [path for path in folder.rglob(kind) if path.name not in BESIDE_RUN_JSON]
    assert paths
    for path in paths:
        records = records_of(path)
        assert any(records[0].get(key) for key in COMMANDS), path
        commits = [str(record[key]) for record in records for key in COMMITS if record.get(key)]
        assert commits and all(re.fullmatch("[0-9a-f]{12,40}", commit) for commit in commits), path
        assert not any(record.get(key) for record in records for key in CHANGES), path
