"""What docs/extending.md shows: every file of a user's own loads and works, and every diff applies and trains."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from user_files import write_jsonl

from asyncrl.engine.score import load_score
from asyncrl.job.command_line import parse_config
from asyncrl.tasks import load_task, prepare_environment, score_of
from scripts.lines import read

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DIFFS = dict(
    re.findall(r"^\*\*(.+?)\*\*[^\n]*\n\n```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
COMMANDS = re.findall(r"^\.venv/bin/python train_async.py (.*my_\w+\.py.*)$", PAGE, re.MULTILINE)
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


def test_rewards_task_and_environment_answer_as_they_say(folder):
    score = load_score("jsonl", [f"{folder}/my_reward.py:score"])
    row = json.dumps({"prompt": "Name a prime above 10.", "least": 10})
    assert score(row, "It is 13.") == (2.0, {"prime": 1.0, "above": 1.0})
    assert score(row, "none") == (0.0, {"prime": 0.0, "above": 0.0})
    assert load_score("jsonl", [f"{folder}/my_reward.py:judge*0.2"]).is_async
    text = f"{folder}/my_task.py:Double"
    task = load_task(text, 3, None, ("factor=3",))
    held_out = {problem.prompt for problem in task.eval_problems(50)}
    assert not held_out & {task.train_problem(index).prompt for index in range(100)}
    scores = [score_of(text)(task.train_problem(0).answer, response) for response in ("18", "17")]
    assert scores == [1.0, 0.0]
    environment = prepare_environment(f"environment:{folder}/my_env.py:Echo")()
    observation, _ = environment.reset(seed=1)
    steps = [environment.step(action)[1:4] for action in ("?", observation)]
    assert steps == [(0.0, False, False), (1.0, True, False)]


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
    alone = {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.run(
        [sys.executable, "tests/fake_job.py", *options],
        cwd=copy,
        env={**os.environ, **alone},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert job.returncode == 0, job.stdout[-1500:]
    metrics = read(copy / "runs/run/metrics.jsonl")
    assert len(metrics) == 3 and all("loss/weight" in line for line in metrics)
