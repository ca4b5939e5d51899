"""Evaluation of a model without training: what is counted, by hand, and one with the real engine."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from programs import ROOT, run_python

from asyncrl.controller.evaluation import Evaluation
from scripts.evaluate import choose_options, describe, pass_at


def evaluation_of(rewards, failed=()):
    """An evaluation of responses with these rewards; those with the numbers of `failed` have failed."""
    evaluation = Evaluation(0, len(rewards))
    for member, reward in enumerate(rewards):
        reason = "failed" if member in failed else "stop"
        evaluation.trajectories.append(
            SimpleNamespace(
                member=member,
                reward=reward,
                finish_reason=reason,
                failure="no" * (member in failed),
            )
        )
    return evaluation


def test_pass_at_k_is_the_share_of_all_draws_of_k_samples_that_hold_a_right_one():
    for num_right in range(5):
        samples = [True] * num_right + [False] * (4 - num_right)
        for k in (1, 2, 3, 4):
            draws = [any(draw) for draw in itertools.combinations(samples, k)]
            share = sum(draws) / len(draws)
            assert pass_at(k, np.array([num_right]), 4) == pytest.approx([share])
    lines = describe(evaluation_of([1.0] + [0.0] * 11), 6)
    names = ["mean reward", "pass@1", "pass@2", "pass@4", "pass@6"]
    assert [line[:12].strip() for line in lines[1:]] == names


@pytest.mark.parametrize(("best", "is_told"), [(0.75, True), (1.0, False), (0.0, False)])
def test_what_is_right_is_told_if_there_are_rewards_and_no_right_response(best, is_told):
    *_, last = describe(evaluation_of([0.0, best, 0.0, best / 2]), 2)
    told = (
        "No response is right: a right one has a reward of at least 1, the best has 0.75; "
        "--right-from sets another limit."
    )
    assert (last == told) == is_told


def test_passes_are_counted_by_problem_and_a_failed_response_is_wrong():
    # two samples of three problems; the last but two failed
    assert describe(evaluation_of([0.0, 1.0]), 2)[1:3] == ["mean reward 0.500", "pass@1      0.500"]
    evaluation = evaluation_of([1.0, 0.0, 0.5, 1.0, 0.0, 0.0], failed=[3])
    assert describe(evaluation, 2) == [
        "3 problems, 2 samples each, 1 failed; right: a reward of at least 1; ± is the standard error over problems",
        "mean reward 0.250 ± 0.144",
        "pass@1      0.167 ± 0.167",
        "pass@2      0.333 ± 0.333",
    ]
    assert describe(evaluation, 2, 0.5)[2].split() == ["pass@1", "0.333", "±", "0.167"]
    assert describe(evaluation, 2, 0.0)[2].split() == ["pass@1", "0.833", "±", "0.167"]


def test_the_newest_checkpoint_of_a_run_is_sampled_as_the_run_samples(tmp_path):
    run = tmp_path / "run"
    for step in (2, 10):
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
    options = {"temperature": 0.7, "algo": "tis", "eval_problems": 5, "max_response_tokens": 32000}
    options |= {"listen": "127.0.0.1:7711", "num_rollout_workers": 0}
    options["max_tokens_per_microbatch"] = 40000
    (run / "run.json").write_text(json.dumps({"config": options}))
    config = choose_options(str(run), ["--eval-problems", "9"])
    assert config.model == str(run / "checkpoints" / "step_10")
    assert (config.temperature, config.eval_problems, config.algo) == (0.7, 9, "grpo")
    assert config.max_response_tokens == 32000
    older = str(run / "checkpoints" / "step_2")
    config = choose_options(older, [])
    assert (config.model, config.temperature, config.eval_problems) == (older, 0.7, 5)
    assert config.save_every is None  # so no room for checkpoints is asked for


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("task", ["addition", "frozen_lake", "guess_number"])
def test_cold_samples_of_the_real_engine_pass_all_or_none_and_the_tiny_model_of_a_task_knows_it(
    task, tmp_path
):
    options = f"--task={task} --eval-samples=3 --eval-problems=24 --temperature=0.01"
    path = tmp_path / "responses.jsonl"
    output = run_python("scripts/evaluate.py", "tiny", *options.split(), f"--out={path}")
    rates = dict(re.findall(r"^(mean reward|pass@\d) +(\d\.\d+)", output.stdout, re.MULTILINE))
    assert set(rates) == {"mean reward", "pass@1", "pass@2", "pass@3"}
    assert len({*rates.values()}) == 1 and float(rates["pass@1"]) >= 0.85
    for word in ("freshness", "lr: ", "run directory"):
        assert word not in output.stdout, "it trains nothing"
    assert Path(f"{path}.summary.txt").read_text() in output.stdout
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    places = [(row["problem"], row["sample"]) for row in rows]
    assert places == list(itertools.product(range(24), range(3)))
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards) == pytest.approx(float(rates["mean reward"]), abs=1e-3)
    assert all(row["response"] and row["prompt"] for row in rows)
    if task == "addition":
        is_right = [row["response"].startswith(f"{row['answer']}<eos>") for row in rows]
        assert is_right == [reward == 1 for reward in rewards]


WRONG_WEIGHTS = """import sys

from asyncrl.job import node
from asyncrl.weights.shm import ShmTransport
from scripts.evaluate import main


class Doubling(ShmTransport):
    def stage(self, version, parameters):
        return super().stage(version, [(name, 2 * tensor) for name, tensor in parameters])


if __name__ == "__main__":
    node.ShmTransport = Doubling
    main()
"""


@pytest.mark.e2e
@pytest.mark.slow
def test_an_engine_that_has_other_weights_than_the_model_ends_an_evaluation(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WRONG_WEIGHTS)
    ended = run_python(script, "tiny", "--eval-problems=2", PYTHONPATH=str(ROOT))
    assert ended.returncode == 1
    assert "error: worker 0 does not have the trainer's weights: at version 0" in ended.stderr
