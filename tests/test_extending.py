"""What docs/extending.md shows: every file of a user's own loads and works, and every diff applies and trains."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from algos import LossInputs
from algos.inputs import couples_tokens
from asyncrl import user_code as own
from asyncrl.config import Config, OptimOptions
from asyncrl.engine.score import load_score
from asyncrl.tasks import load_task, prepare_environment, score_of
from asyncrl.trainer.advantage import choose_estimator, try_estimator
from asyncrl.trainer.optimizer import make_optimizer, try_optimizer

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^```python\n# (my_\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
DIFFS = dict(
    re.findall(r"^\*\*(.+?)\*\*[^\n]*\n\n```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
)
OPTIONS = (
    "steps=3",
    "groups-per-step=4",
    "group-size=4",
    "max-response-tokens=24",
    "eval-every=0",
    "run-name=run",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("own")
    for name, source in FILES.items():
        (path / name).write_text(source)
    return path


def test_the_page_has_all_its_recipes():
    assert len(FILES) == 7 and len(DIFFS) == 3


def test_the_loss_is_a_loss(folder):
    loss = own.load(f"{folder}/my_loss.py:loss", "--algo")
    values = torch.tensor([-1.0, -2.0], requires_grad=True)
    zeros = torch.zeros(2)
    inputs = LossInputs(
        values, zeros - 2, zeros, zeros + 1, zeros, zeros.long(), lags=torch.tensor([0, 2])
    )
    per_token, stats = loss(inputs, cap=2.0, decay=0.5)
    per_token.sum().backward()
    assert stats["weight"].tolist() == [2.0, 0.25]
    assert values.grad.tolist() == [-2.0, -0.25] and set(stats) == {"ratio", "weight"}


def test_the_advantage_halves_with_each_step_of_lag(folder):
    config = Config(advantage=f"{folder}/my_advantage.py:fresher")
    try_estimator(config)
    columns = torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([0, 2])
    assert choose_estimator(config)(*columns).tolist() == [0.5, -0.125]


def test_the_loss_that_couples_an_update_does_not_see_its_micro_batches(folder):
    loss = own.load(f"{folder}/my_update_loss.py:loss", "--algo")
    assert couples_tokens(loss)
    logprobs, zeros = torch.tensor([-1.0, -2.0, -0.5]), torch.zeros(3)
    whole = LossInputs(logprobs, zeros - 1, zeros, zeros + 1, zeros, zeros.long())
    parts = [
        LossInputs(*(getattr(whole, f.name)[i : i + 1] for f in fields(whole))) for i in range(3)
    ]
    weights = torch.cat([loss(part, whole)[1]["weight"] for part in parts])
    assert torch.equal(weights, loss(whole, whole)[1]["weight"])
    assert float(weights.mean()) == pytest.approx(1.0)


def test_the_optimizer_steps_by_its_signs_and_can_be_saved(folder):
    config = Config(
        optimizer=f"{folder}/my_optimizer.py:SignMomentum",
        lr=0.25,
        optim=OptimOptions(args=("momentum=0.5",)),
    )
    try_optimizer(config)
    weight = torch.tensor([1.0, 1.0], requires_grad=True)
    optimizer = make_optimizer(config, [{"params": [weight], "lr": 0.25}])
    for gradient in ([2.0, -2.0], [-1.0, -1.0]):
        weight.grad = torch.tensor(gradient)
        optimizer.step()
    assert weight.tolist() == [0.75, 1.5], "down once, and then its average is 0; up twice"


def test_the_rewards_score_a_row(folder):
    score = load_score("jsonl", [f"{folder}/my_reward.py:score"])
    row = json.dumps({"prompt": "Name a prime above 10.", "least": 10})
    assert score(row, "It is 13.") == (2.0, {"prime": 1.0, "above": 1.0})
    assert score(row, "none") == (0.0, {"prime": 0.0, "above": 0.0})
    assert load_score("jsonl", [f"{folder}/my_reward.py:judge*0.2"]).is_async


def test_the_task_asks_and_scores(folder):
    text = f"{folder}/my_task.py:Double"
    task = load_task(text, 3, None, ("factor=3",))
    held_out = {problem.prompt for problem in task.eval_problems(50)}
    assert not held_out & {task.train_problem(index).prompt for index in range(100)}
    assert (
        score_of(text)(task.train_problem(0).answer, "18") == 1.0
        and score_of(text)("18", "17") == 0.0
    )


def test_the_environment_is_played(folder):
    environment = prepare_environment(f"environment:{folder}/my_env.py:Echo")()
    observation, _ = environment.reset(seed=1)
    assert environment.step("?")[1:4] == (0.0, False, False)
    assert environment.step(observation)[1:4] == (1.0, True, False)


def test_every_diff_applies_alone_and_all_train_together(tmp_path):
    """A whole job, with sampling that follows from seeds in place of an engine."""
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "runs", "results", "docs", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for options in (["--check"], []):
        for diff in DIFFS.values():
            command = ["git", "apply", *options, "-"]
            subprocess.run(command, cwd=copy, input=diff.encode(), check=True)
    options = [*(f"--{option}" for option in OPTIONS), f"--runs-dir={copy / 'runs'}"]
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
    assert len((copy / "runs/run/metrics.jsonl").read_text().splitlines()) == 3
