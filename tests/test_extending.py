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
    re.findall(r"^\*\*([^*]+)\*\*[^\n]*\n\n```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
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


def copy_with(diffs, folder):
    """A copy of the repository in which these diffs are applied, beside the files of the page."""
    for name, source in FILES.items():
        (folder / name).write_text(source)
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "runs", "results", "docs"))
    for options in (["--check"], []):
        for diff in diffs:
            command = ["git", "apply", *options, "-"]
            subprocess.run(command, cwd=copy, input=diff.encode(), check=True)
    return copy


def test_every_diff_applies_alone_and_all_train_together_with_loss_advantage_and_optimizer(
    tmp_path,
):
    """A whole job, with sampling that follows from seeds in place of an engine."""
    assert len(FILES) == 9 and len(DIFFS) == 4
    copy = copy_with(DIFFS.values(), tmp_path)
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


def test_a_model_of_another_shape_is_made_and_accepted(tmp_path):
    copy = copy_with([], tmp_path)
    (copy / "my_model.py").write_text(FILES["my_model.py"])
    limits = ["--max-prompt-tokens", "40", "--max-response-tokens", "48"]
    for command in (
        ["my_model.py"],
        ["train_async.py", "--model", "my_model", *limits, "--dry-run"],
    ):
        job = run_python(*command, cwd=copy, PYTHONPATH=str(copy))
        assert job.returncode == 0, job.stderr[-1500:]


@pytest.mark.e2e
@pytest.mark.slow
def test_a_new_column_reaches_the_loss_from_the_engine(tmp_path):
    copy = copy_with([DIFFS["The log-prob of the runner-up"]], tmp_path)
    options = [*OPTIONS[3:], "--algo=../my_margin.py:loss"]
    job = run_python("train_async.py", *options, cwd=copy, PYTHONPATH=str(copy))
    assert job.returncode == 0, job.stderr[-1500:]
    metrics = read(copy / "runs/run/metrics.jsonl")
    # a trained model mostly samples the likeliest token
    assert len(metrics) == 3 and all(1 < line["loss/margin"] < 30 for line in metrics)


def test_the_table_of_private_names_of_vllm_names_what_each_file_uses():
    section = PAGE.partition("## Another version of vLLM")[2]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", section, re.MULTILINE)
    assert len(rows) == 8
    for path, cell in rows:
        source = (ROOT / path).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"`([^`]+)`", cell) if name not in source]
        assert not missing, path
