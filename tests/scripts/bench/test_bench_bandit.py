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


@pytest.fixture(scope="module")
def problem():
    """Arms, rewards, and the logits of a policy before and after each of 4 updates: 2 tokens with 3 choices."""
    arms, rewards = bandit.all_arms(num_tokens=2, num_choices=3)
    return arms, rewards, bandit.policies(4, 3, 2.0, arms, rewards, seed=1)


def test_rewards_and_the_optimum_are_those_of_the_definition():
    arms, rewards = bandit.all_arms(num_tokens=3, num_choices=2)
    for arm, reward in zip(arms.tolist(), rewards.tolist(), strict=True):
        assert reward == (1.0 if arm.count(0) >= math.ceil(3 / 2) else 0.0)
    target = torch.tensor([[60.0, 0.0]] * 3, dtype=torch.float64)
    assert bandit.mean_reward(target, arms, rewards).item() == pytest.approx(1.0)
    assert bandit.true_gradient(target, arms, rewards).abs().max() < 1e-12


def test_the_closed_form_gradient_is_that_of_autograd_and_its_steps_raise_the_reward(problem):
    arms, rewards, path = problem
    for logits in path:
        logits = logits.clone().requires_grad_()
        (expected,) = torch.autograd.grad(bandit.mean_reward(logits, arms, rewards), logits)
        torch.testing.assert_close(bandit.true_gradient(logits.detach(), arms, rewards), expected)
    earned = [bandit.mean_reward(logits, arms, rewards).item() for logits in path]
    assert earned == sorted(earned) and earned[-1] > earned[0] + 0.1


@pytest.mark.parametrize("algo", bandit.ROWS)
def test_on_fresh_arms_no_loss_is_biased(problem, algo):
    arms, rewards, path = problem
    true = bandit.true_gradient(path[-1], arms, rewards)
    found = bandit.measure(*bandit.arm_gradients(algo, path[-1], path[-1], arms, rewards), true)
    assert found["bias"] < 1e-12 and found["cosine"] == pytest.approx(1) and found["std"] > 0


@pytest.mark.parametrize("lag", range(5))
def test_weights_of_whole_arms_are_unbiased_at_every_lag_and_no_weights_are_not(problem, lag):
    arms, rewards, path = problem
    true = bandit.true_gradient(path[-1], arms, rewards)
    bias = {
        algo: bandit.measure(
            *bandit.arm_gradients(algo, path[-1], path[-1 - lag], arms, rewards), true
        )["bias"]
        for algo in ("sequence_is", "reinforce")
    }
    assert bias["sequence_is"] < 1e-12
    assert lag == 0 or bias["reinforce"] > 0.01


def stale_arms(lag, rows=bandit.ROWS):
    """Measures of the rows on arms of 4 tokens that a policy `lag` large updates earlier sampled."""
    arms, rewards = bandit.all_arms(num_tokens=4, num_choices=3)
    path = bandit.policies(8, 3, 4.0, arms, rewards, seed=1)
    true = bandit.true_gradient(path[-1], arms, rewards)
    return {
        row: bandit.measure(
            *bandit.arm_gradients(row, path[-1], path[-1 - lag], arms, rewards), true
        )
        for row in rows
    }


@pytest.mark.parametrize("lag", [2, 8])
def test_on_stale_arms_only_the_ratios_of_whole_sequences_are_unbiased(lag):
    found = stale_arms(lag)
    assert {row for row, of in found.items() if of["bias"] < 0.05} == {"sequence_is"}
    assert found["sequence_is"]["bias"] < 1e-9


def test_on_very_stale_arms_none_varies_as_much_as_whole_sequences_and_a_cap_trades_that_for_bias(
    monkeypatch,
):
    monkeypatch.setitem(LOSSES, "capped", functools.partial(LOSSES["sequence_is"], cap=2.0))
    found = stale_arms(8, (*bandit.ROWS, "capped"))
    whole, capped = found.pop("sequence_is"), found.pop("capped")
    assert whole["std"] > 1.5 * max(of["std"] for of in found.values())
    assert capped["std"] < whole["std"] / 2 and capped["bias"] > 0.05


def test_on_arms_of_one_token_a_token_s_weight_is_the_arm_s():
    arms, rewards = bandit.all_arms(num_tokens=1, num_choices=3)
    path = bandit.policies(1, 3, 0.5, arms, rewards, seed=0)
    of_token, of_arm = (
        bandit.arm_gradients(algo, *path[::-1], arms, rewards)[0]
        for algo in ("aipo", "sequence_is")
    )
    torch.testing.assert_close(of_token, of_arm)


@pytest.mark.parametrize("algo", ["reinforce", "tis", "gspo", "kimi", "sequence_is"])
def test_exact_mean_and_variance_agree_with_sampled_arms(problem, algo):
    arms, rewards, path = problem
    gradients, probs = bandit.arm_gradients(algo, path[-1], path[0], arms, rewards)
    true = bandit.true_gradient(path[-1], arms, rewards)
    found = bandit.measure(gradients, probs, true)
    num = 200_000
    drawn = torch.multinomial(
        probs, num, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    samples = gradients.flatten(1)[drawn]
    spread = samples.var(dim=0).sum().sqrt()
    assert found["std"] == pytest.approx((spread / true.norm()).item(), rel=0.02)
    error = (samples.mean(dim=0) - probs @ gradients.flatten(1)).norm()
    assert error < 4 * spread / math.sqrt(num)
    assert found["bias"] == pytest.approx(
        ((samples.mean(dim=0) - true.flatten()).norm() / true.norm()).item(),
        abs=4 * found["std"] / math.sqrt(num),
    )


def test_the_drift_is_the_divergence_per_token(problem):
    _, _, (first, *_, last) = problem
    p, q = first.softmax(-1).tolist(), last.softmax(-1).tolist()
    expected = (
        sum(a * math.log(a / b) for i in range(2) for a, b in zip(p[i], q[i], strict=True)) / 2
    )
    assert bandit.token_drift(last, first) == pytest.approx(expected)


@pytest.mark.slow
def test_the_script_writes_records_with_their_command_a_table_and_a_figure(tmp_path):
    options = [
        "--tokens",
        "1",
        "2",
        "--choices",
        "2",
        "--max-lag",
        "2",
        "--starts",
        "2",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "scripts/bench/bandit.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made_by, *records = map(json.loads, (tmp_path / "bandit.jsonl").read_text().splitlines())
    assert (
        made_by["command"].startswith("python scripts/bench/bandit.py --tokens 1 2")
        and made_by["n"] == 2
    )
    keys = {(r["tokens"], r["algo"], r["lag"]) for r in records}
    measured = {*LOSSES} - {"m2po"}
    assert keys == set(itertools.product((1, 2), measured, range(3))) and len(records) == len(keys)
    text = (tmp_path / "README.md").read_text()
    assert made_by["command"] in text and "n = 2" in text and text.count("| `gspo` | 0.00 |") == 2
    assert (tmp_path / "bandit.png").read_bytes().startswith(b"\x89PNG")


def test_the_recorded_page_is_made_from_its_records_whatever_losses_came_since(tmp_path):
    recorded = ROOT / "results" / "bandit"
    shutil.copy(recorded / "bandit.jsonl", tmp_path)
    bandit.write(tmp_path)
    assert (tmp_path / "README.md").read_text() == (recorded / "README.md").read_text()
