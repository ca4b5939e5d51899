"""The summary and the figure of runs, from records as a run writes them."""

import json
from collections import Counter

import numpy as np
import pytest

from controller.evaluation import evaluation_metrics
from data.messages import SampledTokens
from data.records import Group, Trajectory
from records.metrics import RolloutReport, batch_metrics, rollout_metrics
from scripts import plot


def trajectory(reward, version):
    return Trajectory(
        ticket_id=0,
        group_id=0,
        member=0,
        tokens=np.arange(3),
        loss_mask=np.array([False, True, True]),
        behavior_logprobs=np.zeros(3, dtype=np.float32),
        policy_versions=np.array([-1, version, version], dtype=np.int32),
        reward=reward,
        finish_reason="stop",
        failure="",
        num_turns=1,
        started_at=0.0,
        ended_at=1.0,
        worker=0,
    )


class Evaluated:
    """An evaluation that has ended, as the controller hands it over."""

    def __init__(self, version, accuracy):
        self.version, self.accuracy, self.trajectories, self.num_failed = version, accuracy, [], 0


def step_line(step, reward, evaluation=None):
    """One line of metrics.jsonl: 4 samples, 2 s of which 0.5 s waiting, 100 tokens, one step stale after the first."""
    groups = [Group(0, tuple(trajectory(reward, max(0, step - 2)) for _ in range(4)))]
    report = RolloutReport([0.1], SampledTokens(new=100), Counter(), Counter(tokens_generated=100 * step), 0)
    return {
        "step": step,
        "samples": 4 * step,
        **batch_metrics(groups, policy_version=step - 1),
        **evaluation_metrics([evaluation] if evaluation else []),
        **rollout_metrics(report, 100 * (step - 1), 2.0),
        "time/wait_s": 0.5,
        "time/train_s": 1.0,
        "time/publish_s": 0.5,
        "time/step_s": 2.0,
    }


@pytest.fixture
def run(tmp_path):
    lines = [step_line(step, step / 20) for step in range(1, 21)]
    lines[1] |= evaluation_metrics([Evaluated(0, 0.25)])
    lines[19] |= evaluation_metrics([Evaluated(20, 0.75)])
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_summary_has_the_ends_of_the_curves_the_staleness_and_the_speed(run):
    summary = plot.summarise(plot.read_metrics(run))
    assert summary == {
        "steps": 20,
        "samples": 80,
        "seconds": 40.0,
        "reward_first": pytest.approx(0.075),
        "reward_last": pytest.approx(0.975),
        "accuracy_first": 0.25,
        "accuracy_last": 0.75,
        "staleness_mean": pytest.approx(19 / 20),
        "staleness_max": 1,
        "tokens_per_s": 50.0,
        "wait_share": 0.25,
    }
    assert set(summary) == set(plot.TABLE)


def test_a_run_without_evaluations_has_no_accuracy():
    summary = plot.summarise([step_line(1, 0.5), step_line(2, 0.5)])
    assert summary["accuracy_first"] is None and summary["accuracy_last"] is None


def test_an_evaluation_stands_where_its_version_was_made_not_where_it_was_reported(run):
    metrics = plot.read_metrics(run)
    assert plot.evaluations(metrics) == [(0, 0.25), (20, 0.75)]
    assert plot.samples_by_version(metrics)[0] == 0 and plot.samples_by_version(metrics)[20] == 80
    assert plot.seconds_by_version(metrics)[0] == 0 and plot.seconds_by_version(metrics)[20] == 40


def test_an_evaluation_in_which_nothing_could_be_scored_is_left_out():
    assert plot.evaluations([step_line(1, 0.5) | {"eval/accuracy": None, "eval/policy_version": 0}]) == []


def test_the_figure_is_a_png_of_all_runs(run, tmp_path, capsys):
    metrics = plot.read_metrics(run)
    out = tmp_path / "curves.png"
    plot.draw({"a": metrics, "b": metrics[:5]}, out)
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    plot.print_table({"a": metrics, "b": metrics[:5]})
    printed = capsys.readouterr().out
    assert "25.0%" in printed and "0.975" in printed


def test_a_directory_that_is_no_run_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl does not exist; give the directory of a run"):
        plot.read_metrics(tmp_path)


def test_a_run_without_a_step_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="has not finished a step"):
        plot.read_metrics(tmp_path)


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    with pytest.raises(ValueError, match="line 2 of 2 is not JSON"):
        plot.read_metrics(tmp_path)
