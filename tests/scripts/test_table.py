"""Tables of runs: a row per run, or per value of options of any type."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.runs import load
from scripts.table import COLUMNS, spread, table

ROOT = Path(__file__).parents[2]


def write_run(path, accuracies, step_s, **config):
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"config": {"run_name": path.name, **config}}))
    lines = [
        {
            "step": step,
            "samples": step * 8,
            "reward/mean": 0.5,
            "eval/accuracy": accuracy,
            "eval/policy_version": step,
            "staleness/mean": 1.0,
            "staleness/max": 1,
            "tokens/generated": 100 * step,
            "time/step_s": step_s,
            "time/wait_s": step_s / 4,
        }
        for step, accuracy in enumerate(accuracies, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return load(path)


@pytest.fixture
def runs(tmp_path):
    same = {"seed": 0, "share_prefix": "off"}
    tis = {"algo": "tis", "async_ratio": 10.0, "algo_args": []}
    grpo = {"algo": "grpo", "async_ratio": 2.0, "algo_args": ["clip_high=0.3"]}
    return [
        write_run(tmp_path / "a", [0.25, 0.5], 2.0, **tis, **same),
        write_run(tmp_path / "b", [0.25, 0.75], 2.0, **tis, **same),
        write_run(tmp_path / "c", [0.25, 1.0], 4.0, **grpo, **same),
    ]


def test_without_an_option_each_run_has_a_row_with_the_options_in_which_they_differ(runs):
    head, _, first, _, last = table(runs)
    assert head.startswith(
        "| run | `algo` | `async_ratio` | `algo_args` | held-out accuracy, first |"
    )
    assert first == "| a | tis | 10 | none | 0.250 | 0.500 | 1.00 | 1 | 2.00 | 50 | 25% |"
    assert last.startswith("| c | grpo | 2 | clip_high=0.3 | 0.250 | 1.000 |")


def test_a_row_of_unlike_runs_says_in_what_else_they_differ(runs):
    assert (
        table(runs, ["share_prefix"])[-1]
        == "Runs of one row also differ in `algo`, `async_ratio`, `algo_args`."
    )
    assert table(runs, ["algo"])[-1].startswith("| tis |")


@pytest.mark.parametrize(
    ("by", "labels"),
    [
        (["async-ratio"], ["2", "10"]),
        (["algo"], ["grpo", "tis"]),
        (["algo_args"], ["clip_high=0.3", "none"]),
        (["share_prefix", "algo"], ["off | grpo", "off | tis"]),
    ],
)
def test_runs_with_the_same_values_share_a_row_with_mean_and_standard_deviation(runs, by, labels):
    rows = table(runs, by)[2:]
    cells = {"1": "1 | 0.250 | 1.000 | 1.00 | 1 | 4.00 | 25 | 25% |"}
    cells["2"] = "2 | 0.250 | 0.625 ± 0.177 | 1.00 | 1 | 2.00 | 50 | 25% |"
    n = {
        label: "1" if label.split(" | ")[-1] in ("2", "grpo", "clip_high=0.3") else "2"
        for label in labels
    }
    assert rows == [f"| {label} | {cells[n[label]]}" for label in labels]


def test_a_run_that_was_stopped_early_adds_a_column_of_the_steps_made(tmp_path):
    whole = write_run(tmp_path / "whole", [0.25] * 3, 2.0, algo="tis", steps=3)
    cut = write_run(tmp_path / "cut", [0.25] * 2, 2.0, algo="tis", steps=3)
    assert "steps made" not in table([whole])[0]
    head, _, first, second = table([whole, cut])
    assert head.startswith("| run | steps made | held-out") and first.startswith(
        "| whole | 3 of 3 | 0.250 |"
    )
    assert second.startswith("| cut | 2 of 3 | 0.250 |")
    assert table([whole, cut], ["algo"])[2].startswith("| tis | 2 | 3 of 3, 2 of 3 | 0.250 |")


def test_a_spread_of_whole_numbers_has_digits_that_tell_it_from_another():
    form = COLUMNS["staleness_max"][1]
    assert (spread([1, 4], form), spread([2, 2], form), spread([120, 120], form)) == (
        "2.5 ± 2.12",
        "2",
        "120",
    )


def test_an_option_that_no_run_has_is_an_error_that_names_the_nearest(runs):
    with pytest.raises(
        ValueError,
        match=r"--by async_ration: run\.json has no such option; did you mean async_ratio",
    ):
        table(runs, ["async_ration"])


def test_the_table_of_the_recorded_runs_is_made_again():
    recorded = ROOT / "results" / "staleness"
    command = [
        sys.executable,
        "scripts/table.py",
        *sorted(recorded.glob("a*-s*")),
        "--by",
        "async_ratio",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == (recorded / "table.md").read_text(), done.stderr


def test_a_directory_that_is_no_run_is_one_line(tmp_path):
    command = [sys.executable, "scripts/table.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
