"""Tables of runs: a row per run, or per value of options of any type, and a stored table made again."""

import json

import pytest
from programs import ROOT, run_python

from scripts.runs import load
from scripts.table import table

CONFIGS = {
    "a": {"algo": "tis", "async_ratio": 10.0, "algo_args": [], "seed": 0},
    "b": {"algo": "tis", "async_ratio": 10.0, "algo_args": [], "seed": 1, "steps": 5},
    "c": {"algo": "grpo", "async_ratio": 2.0, "algo_args": ["clip_high=0.3"], "seed": 0},
    "d": {"algo": "tis", "async_ratio": 2.0, "algo_args": [], "seed": 0, "publish_delay": 4},
}


@pytest.fixture
def runs(tmp_path):
    """Runs of three steps; one was to make five."""
    for name, config in CONFIGS.items():
        run = tmp_path / name
        run.mkdir()
        header = {"config": {"run_name": name, "steps": 3, "share_prefix": "off"} | config}
        run.joinpath("run.json").write_text(json.dumps(header))
        lines = (ROOT / "results/staleness/a1-s0/metrics.jsonl").read_text().splitlines(True)
        run.joinpath("metrics.jsonl").write_text("".join(lines[:3]))
    return [load(tmp_path / name) for name in CONFIGS]


def cells_of(lines):
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


@pytest.mark.parametrize(
    ("by", "labels", "others"),
    [
        (["algo_args"], ["clip_high=0.3 3 of 3 1", "none 3 of 3 2", "none 3 of 5 1"],
         "`steps`, `async_ratio`, `publish_delay`"),
        (["publish_delay"], ["4 3 of 3 1", "none 3 of 3 2", "none 3 of 5 1"],
         "`steps`, `algo`, `async_ratio`, `algo_args`"),
        (["algo", "async-ratio", "steps"],
         ["grpo 2 3 3 of 3 1", "tis 2 3 3 of 3 1", "tis 10 3 3 of 3 1", "tis 10 5 3 of 5 1"], ""),
    ],
)  # fmt: skip
def test_a_row_is_of_the_runs_that_share_its_values_and_made_as_many_steps(
    runs, by, labels, others
):
    lines = table(runs, by)
    rows = [" ".join(row[: len(by) + 2]) for row in cells_of(lines)[2:]]
    assert rows == labels
    assert lines[-1].startswith(f"Runs of one row also differ in {others}." if others else "|")


def test_the_table_of_the_recorded_runs_is_made_again():
    recorded = ROOT / "results" / "staleness"
    runs = sorted(recorded.glob("a*-s*"))
    done = run_python("scripts/table.py", *runs, "--by", "async_ratio")
    assert done.stdout == (recorded / "table.md").read_text(), done.stderr
