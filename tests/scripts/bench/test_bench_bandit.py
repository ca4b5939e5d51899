"""The bandit: its closed forms against definitions, autograd and samples, and its pages against their records."""

import functools
import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from algos import LOSSES
from scripts.bench import bandit

ROOT = Path(__file__).parents[3]


class Problem:
    """Arms, rewards, and the logits of a policy before and after each of some updates."""

    def __init__(self, num_tokens, num_choices, num_updates, lr, seed=1):
        self.arms, self.rewards = bandit.all_arms(num_tokens, num_choices)
        self.path = bandit.policies(num_updates, num_choices, lr, self.arms, self.rewards, seed)
        self.true = bandit.true_gradient(self.path[-1], self.arms, self.rewards)

    def gradients(self, algo, lag):
        return bandit.arm_gradients(
            algo, self.path[-1], self.path[-1 - lag], self.arms, self.rewards
        )

    def measure(self, algo, lag):
        return bandit.measure(*self.gradients(algo, lag), self.true)


@pytest.fixture(scope="module")
def problem():
    """2 tokens with 3 choices, 4 updates."""
    return Problem(2, 3, 4, 2.0)


@pytest.fixture(scope="module")
def large_steps():
    """4 tokens with 3 choices, 8 large updates."""
    return Problem(4, 3, 8, 4.0)


def test_rewards_and_the_optimum_are_those_of_the_definition():
    arms, rewards = bandit.all_arms(num_tokens=3, num_choices=2)
    assert rewards.tolist() == [float(arm.count(0) >= 2) for arm in arms.tolist()]
    target = torch.tensor([[60.0, 0.0]] * 3, dtype=torch.float64)
    assert bandit.mean_reward(target, arms, rewards).item() == pytest.approx(1.0)
    assert bandit.true_gradient(target, arms, rewards).abs().max() < 1e-12


def test_the_closed_form_gradient_is_that_of_autograd_and_its_steps_raise_the_reward(problem):
    earned = []
    for logits in problem.path:
        leaf = logits.clone().requires_grad_()
        reward = bandit.mean_reward(leaf, problem.arms, problem.rewards)
        found = bandit.true_gradient(logits, problem.arms, problem.rewards)
        torch.testing.assert_close(found, torch.autograd.grad(reward, leaf)[0])
        earned.append(reward.item())
    assert earned == sorted(earned) and earned[-1] > earned[0] + 0.1


@pytest.mark.parametrize("algo", bandit.ROWS)
def test_on_fresh_arms_no_loss_is_biased(problem, algo):
    found = problem.measure(algo, lag=0)
    assert found["bias"] < 1e-12 and found["cosine"] == pytest.approx(1) and found["std"] > 0


def test_on_stale_arms_only_the_ratios_of_whole_sequences_are_unbiased(
    problem, large_steps, monkeypatch
):
    for lag in range(1, 5):
        assert problem.measure("sequence_is", lag)["bias"] < 1e-12
        assert problem.measure("reinforce", lag)["bias"] > 0.01
    for lag in (2, 8):
        found = {algo: large_steps.measure(algo, lag) for algo in bandit.ROWS}
        assert {algo for algo in found if found[algo]["bias"] < 0.05} == {"sequence_is"}
    whole = found.pop("sequence_is")
    assert whole["bias"] < 1e-9
    assert whole["std"] > 1.5 * max(measured["std"] for measured in found.values())
    # a cap trades variance for bias
    monkeypatch.setitem(LOSSES, "capped", functools.partial(LOSSES["sequence_is"], cap=2.0))
    capped = large_steps.measure("capped", 8)
    assert capped["std"] < whole["std"] / 2 and capped["bias"] > 0.05


def test_on_arms_of_one_token_the_weight_of_a_token_is_that_of_the_arm():
    one_token = Problem(1, 3, 1, 0.5, seed=0)
    of_token, of_arm = (one_token.gradients(algo, 1)[0] for algo in ("aipo", "sequence_is"))
    torch.testing.assert_close(of_token, of_arm)


@pytest.mark.parametrize("algo", ["reinforce", "tis", "gspo", "kimi", "sequence_is"])
def test_exact_mean_and_variance_agree_with_sampled_arms(problem, algo):
    gradients, probs = problem.gradients(algo, 4)
    found, size, num = problem.measure(algo, 4), problem.true.norm(), 200_000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(probs, num, replacement=True, generator=generator)
    samples = gradients.flatten(1)[drawn]
    std = samples.var(dim=0).sum().sqrt() / size
    assert found["std"] == pytest.approx(std.item(), rel=0.02)
    bias = (samples.mean(dim=0) - problem.true.flatten()).norm() / size
    assert found["bias"] == pytest.approx(bias.item(), abs=4 * found["std"] / math.sqrt(num))


def test_the_drift_is_the_divergence_per_token(problem):
    p, q = (problem.path[place].softmax(-1) for place in (0, -1))
    expected = (p * (p / q).log()).sum() / 2
    drift = bandit.token_drift(problem.path[-1], problem.path[0])
    assert drift == pytest.approx(expected.item())


@pytest.mark.slow
def test_the_script_writes_records_with_their_command_a_table_and_a_figure(tmp_path):
    options = "--tokens 1 2 --choices 2 --max-lag 2 --starts 2 --out"
    command = [sys.executable, "scripts/bench/bandit.py", *options.split(), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made_by, *records = map(json.loads, (tmp_path / "bandit.jsonl").read_text().splitlines())
    assert made_by["command"].startswith("python scripts/bench/bandit.py --tokens 1 2")
    keys = [(r["tokens"], r["algo"], r["lag"]) for r in records]
    assert sorted(keys) == sorted(itertools.product((1, 2), {*LOSSES} - {"m2po"}, range(3)))
    text = (tmp_path / "README.md").read_text()
    assert made_by["command"] in text and "n = 2" in text and text.count("| `gspo` | 0.00 |") == 2
    assert (tmp_path / "bandit.png").read_bytes().startswith(b"\x89PNG")


def test_the_recorded_page_is_made_from_its_records_whatever_losses_came_since(tmp_path):
    recorded = ROOT / "results" / "bandit"
    shutil.copy(recorded / "bandit.jsonl", tmp_path)
    bandit.write(tmp_path)
    assert (tmp_path / "README.md").read_text() == (recorded / "README.md").read_text()
