"""What docs/extending.md shows: every file of a user's own loads and works, and every diff applies and trains."""

import re
import shlex
import shutil
import subprocess

import pytest
from programs import ROOT, run_python
from user_files import write_jsonl

from asyncrl.job.command_line import parse_config
from scripts.lines import read

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DIFFS = dict(
    re.findall(r"^\*\*(.+?)\*\*[^\n]*\n\n```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
COMMANDS = re.findall(
    r"^\.venv/bin/python train_async.py (.*my_\w+\.py.*)$", PAGE.replace("\\\n", ""), re.MULTILINE
)
OPTIONS = (
    "steps=3",
    "groups-per-step=4",
    "group-size=4",
    "max-response-tokens=24",
    "eval-every=0",
    "run-name=run",
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """All files of the page, in the folder where its commands are given."""
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    rows = [{"prompt": f"Name a prime above {least}.", "least": least} for least in (10, 20)]
    write_jsonl(tmp_path / "mine.jsonl", rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_command_of_the_page_takes_its_files(folder):
    assert len(FILES) == 7 and len(DIFFS) == 3 and len(COMMANDS) == 6
    for command in COMMANDS:
        parse_config(shlex.split(command))


def test_every_diff_applies_alone_and_all_train_together_with_loss_advantage_and_optimizer(folder):
    """A whole job, with sampling that follows from seeds in place of an engine."""
    copy = folder / "copy"
    left_out = shutil.ignore_patterns(".*", "runs", "results", "docs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for options in (["--check"], []):
        for diff in DIFFS.values():
            command = ["git", "apply", *options, "-"]
            subprocess.run(command, cwd=copy, input=diff.encode(), check=True)
    own = {"algo": "my_loss.py:loss", "advantage": "my_advantage.py:fresher"}
    own |= {"optimizer": "my_optimizer.py:SignMomentum", "runs-dir": "copy/runs"}
    options = [f"--{name}={folder}/{value}" for name, value in own.items()]
    options += [f"--{option}" for option in OPTIONS]
    variables = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    job = run_python("tests/fake_job.py", *options, cwd=copy, **variables)
    assert job.returncode == 0, job.stderr[-1500:]
    metrics = read(copy / "runs/run/metrics.jsonl")
    assert len(metrics) == 3 and all("loss/weight" in line for line in metrics)
