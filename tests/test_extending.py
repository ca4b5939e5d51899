"""What docs/extending.md shows: every diff applies, and trains with the page's files. test_docs.py has its commands."""

import re
import shutil
import subprocess

import pytest
from programs import ROOT, run_python

from scripts.lines import read

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DIFFS = dict(
    re.findall(r"^\*\*(.+?)\*\*[^\n]*\n\n```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
OPTIONS = (
    "--algo=../my_loss.py:loss",
    "--advantage=../my_advantage.py:fresher",
    "--optimizer=../my_optimizer.py:SignMomentum",
    "--steps=3",
    "--lr=0.001",
    "--async-ratio=0",
    "--groups-per-step=4",
    "--group-size=4",
    "--max-response-tokens=24",
    "--eval-every=0",
    "--run-name=run",
)


def test_every_diff_applies_alone_and_all_train_together_with_loss_advantage_and_optimizer(
    tmp_path,
):
    """A whole job, with sampling that follows from seeds in place of an engine."""
    assert len(FILES) == 7 and len(DIFFS) == 3
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "results", "docs"))
    for options in (["--check"], []):
        for diff in DIFFS.values():
            command = ["git", "apply", *options, "-"]
            subprocess.run(command, cwd=copy, input=diff.encode(), check=True)
    variables = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    job = run_python("tests/fake_job.py", *OPTIONS, cwd=copy, **variables)
    assert job.returncode == 0, job.stderr[-1500:]
    metrics = read(copy / "runs/run/metrics.jsonl")
    assert len(metrics) == 3 and all("loss/weight" in line for line in metrics)
    # From step 2 on there is one replayed group of four responses beside four new groups.
    assert [line["samples"] for line in metrics] == [16, 36, 56]
    assert [line["staleness/max"] for line in metrics[:2]] == [0, 1]
    for line in metrics:
        assert line["staleness/mean"] == pytest.approx(line["staleness/max"] / 5)
