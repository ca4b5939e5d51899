"""Grids of runs that a stub of the training script makes: which cells there are, which are run, what is kept."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from scripts import ablate
from scripts.ablate import cell_name, options, read_arguments
from scripts.grids import key, read_records

ROOT = Path(__file__).parents[2]

STUB = """
import json, os, pathlib, sys
given = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
run = pathlib.Path(given["runs-dir"], given["run-name"])
run.mkdir()
header = {"git_commit": "c", "git_diff": "", "hardware": {}, "packages": {}, "config": given}
(run / "run.json").write_text(json.dumps(header))
line = {"step": 1, "samples": 8, "reward/mean": 1 / 3, "staleness/mean": 0.0, "staleness/max": 0, "time/step_s": 2.0,
        "eval/accuracy": 0.5, "eval/policy_version": 1, "drift/k3": 0.25}
(run / "metrics.jsonl").write_text("" if given["algo"] == "gspo" else json.dumps(line) + "\\n")
if given["algo"] in ("kimi", "gspo"):
    sys.exit("a trace\\nerror: the loss is not finite")
if given["algo"] == "aipo":
    os.kill(os.getpid(), 9)
"""


def cells_of(*words):
    return ablate.cells_of(read_arguments(words))


def test_a_grid_has_whole_seeds_first_and_losses_beside_each_other_and_sweeps_any_option():
    cells = cells_of(
        *("--algos", "grpo", "tis:clip_low=0.1 clip_high=4.0", "--async-ratio", "0", "1"),
        *("--publish-delay", "0", "4", "--sweep", "compile=true|false", "--sweep", "lr=1e-4"),
        *("--sweep", "optim.warmup=3", "--seeds", "2", "--", "--steps=5", "--seed=0"),
    )
    assert len({cell_name(cell) for cell in cells}) == len({key(cell) for cell in cells}) == 32
    assert [cell_name(cell) for cell in cells[:8]] == [
        f"{loss}-a{ratio}-k0-s0-compile={value}-lr=0.0001-optim.warmup=3"
        for ratio in (0, 1)
        for value in ("true", "false")
        for loss in ("grpo", "tis+clip_low=0.1+clip_high=4.0")
    ]
    assert [cell["seed"] for cell in cells] == [0] * 16 + [1] * 16
    assert options(cells[1], ["--steps=5"]) == [
        "--algo=tis", "--algo-args", "clip_low=0.1", "clip_high=4.0", "--async-ratio=0.0", "--publish-delay=0",
        "--seed=0", "--compile", "--lr=0.0001", "--optim.warmup=3", "--steps=5",
    ]  # fmt: skip


@pytest.fixture
def ablate_stub(tmp_path, monkeypatch, capsys):
    """Runs a grid of the stub, whole, and returns what it printed."""
    (tmp_path / "stub.py").write_text(STUB)
    for name in ("TRAIN", "REPLAY"):
        monkeypatch.setattr(ablate, name, (sys.executable, tmp_path / "stub.py"))

    def run(*words):
        words = "--async-ratio", "0", "--seeds", "1", "--out", str(tmp_path / "grid"), *words
        monkeypatch.setattr(sys, "argv", ["ablate.py", *words])
        ablate.main()
        return capsys.readouterr().out

    return run


def test_a_grid_keeps_each_run_and_its_error_and_resumes(ablate_stub, tmp_path):
    printed = ablate_stub("--algos", "grpo", "kimi", "--keep-runs", "--", "--steps=1")
    record, failed = read_records(tmp_path / "grid" / "cells.jsonl")
    assert record["options"] == [*options(record["cell"]), "--steps=1"]
    assert record["git_dirty"] is False and "error" not in record
    assert record["series"]["reward"] == [0.3333333] and record["evaluations"] == [[1, 0.5]]
    assert failed["error"] == "error: the loss is not finite" and failed["series"]["samples"] == [8]
    assert (tmp_path / "grid" / "runs" / "grpo-a0-k0-s0" / "metrics.jsonl").exists()
    assert "2 cells, 0 of them finished before" in printed and "| grpo |" in printed
    (tmp_path / "grid" / "runs" / "tis-a0-k0-s0").mkdir()  # of a grid that was killed
    printed = ablate_stub(
        "--algos", "tis", "kimi", "--keep-runs", "--parallel", "2", "--", "--steps=1"
    )
    assert "2 cells, 1 of them finished before" in printed
    algos = [made["cell"]["algo"] for made in read_records(tmp_path / "grid" / "cells.jsonl")]
    assert algos == ["grpo", "kimi", "tis"]
    assert {"curves.png", "cells.csv"} < {path.name for path in (tmp_path / "grid").iterdir()}
    assert "cells, " not in ablate_stub("--report")


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ("aipo", "error: cell aipo-a0-k0-s0 was killed or broke, which is no result: "),
        ("gspo", "error: cell gspo-a0-k0-s0 has no metrics: error: the loss is not finite"),
    ],
)
def test_after_a_run_without_a_result_no_other_is_started_and_what_is_finished_is_kept(
    ablate_stub, tmp_path, algo, message
):
    with pytest.raises(SystemExit) as ended:
        ablate_stub("--algos", "grpo", algo, "tis")
    assert ended.value.code == message
    (record,) = read_records(tmp_path / "grid" / "cells.jsonl")
    assert record["cell"]["algo"] == "grpo"


def test_ctrl_c_does_not_make_a_result_of_the_run_that_it_ends(ablate_stub, tmp_path, monkeypatch):
    is_interrupted = threading.Event()

    def interrupt(*_):
        is_interrupted.set()
        raise KeyboardInterrupt

    def run_cell(cell, command, keep_in):
        os.kill(os.getpid(), signal.SIGINT)
        assert is_interrupted.wait(60)
        return {"cell": cell, "evaluations": [], "error": "SignalException"}

    monkeypatch.setattr(ablate, "run_cell", run_cell)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(SystemExit) as ended:
            ablate_stub()
    finally:
        signal.signal(signal.SIGINT, before)
    grid = tmp_path / "grid"
    assert ended.value.code == f"stopped; the same --out continues: --out {grid}"
    assert not (grid / "cells.jsonl").exists()


def test_the_study_is_the_cells_and_options_of_its_records():
    for name, (cells, extra) in ablate.study([]).items():
        records = read_records(ROOT / "results" / "study" / name / "cells.jsonl")
        recorded = {key(record["cell"]): record["options"] for record in records}
        assert recorded == {key(cell): options(cell, extra) for cell in cells}, name


# Replays


def test_replays_of_recorded_runs_are_rows_with_means_over_the_runs(ablate_stub, tmp_path):
    words = ("--replay", "runs/a", "runs/b", "--algos", "grpo", "tis:clip_high=0.3")
    assert "| tis:clip_high=0.3 | 2 |" in ablate_stub(*words)
    records = read_records(tmp_path / "grid" / "cells.jsonl")
    assert [cell_name(record["cell"]) for record in records] == [
        "grpo-replay-a", "tis+clip_high=0.3-replay-a", "grpo-replay-b", "tis+clip_high=0.3-replay-b",
    ]  # fmt: skip
    assert [options(record["cell"]) for record in records[:2]] == [
        ["--algo-args", "--algo=grpo"],
        ["--algo-args", "clip_high=0.3", "--algo=tis"],
    ]
    assert "| 0.2500 |" in (tmp_path / "grid" / "table.md").read_text(), "drift"
