"""Grids and their report, from synthetic cells and from runs that a stub of the training script makes."""

import csv
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from scripts import ablate
from scripts import ablation_report as grid_report
from scripts.ablate import Cell

ROOT = Path(__file__).parents[2]

FIGURES = ("curves.png", "wallclock.png", "staleness.png")
STUB = """
import json, pathlib, sys
given = dict(option[2:].split("=") for option in sys.argv[1:])
if given["algo"] == "gspo":
    sys.exit("error: no room for gspo")
run = pathlib.Path(given["runs-dir"], given["run-name"])
run.mkdir()
header = {"git_commit": "c", "git_diff": "", "hardware": {}, "packages": {}, "config": given}
(run / "run.json").write_text(json.dumps(header))
line = {"step": 1, "samples": 8, "reward/mean": 1 / 3, "staleness/mean": 0.0, "staleness/max": 0, "time/step_s": 2.0,
        "eval/accuracy": 0.5, "eval/policy_version": 1}
(run / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
if given["algo"] == "kimi":
    sys.exit("a trace\\nerror: the loss is not finite")
"""


def make_record(algo="grpo", ratio=0.0, delay=0, seed=0, last=0.75, steps=20, error=None):
    """The record of a run whose accuracy goes from 0.25 up to 1.0 and ends with `last`."""
    cell = Cell(algo, ratio, delay, seed)
    series = {
        "reward": [step / 20 for step in range(1, steps + 1)],
        "staleness_mean": [min(step, delay) + ratio for step in range(steps)],
        "staleness_max": [min(step, delay) + 2 for step in range(steps)],
        "step_s": [2.0] * steps,
        "samples": [8 * step for step in range(1, steps + 1)],
    }
    record = {"cell": asdict(cell), "options": cell.options(), "seconds": 50.0, "series": series}
    evaluations = [[0, 0.25], [0, 0.25], [steps // 2, 1.0], [steps, last]]
    return record | {"evaluations": evaluations} | ({"error": error} if error else {})


def write_cells(out, records):
    out.mkdir(exist_ok=True)
    (out / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return out


def run_script(name, *arguments):
    command = [sys.executable, f"scripts/{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def body(records):
    """The rows of the table, without their first column and the heading, by that first column."""
    rows = [line.strip("| ").split(" | ") for line in grid_report.table(records).splitlines()[2:] if line[:1] == "|"]
    return {row[0]: row[1:] for row in rows}


def test_a_grid_has_whole_seeds_first_and_all_losses_beside_each_other():
    cells = ablate.grid(["grpo", "tis"], [0.0, 1.0], [0, 4], seeds=2)
    assert len(set(cells)) == len(cells) == 16
    assert [cell.name for cell in cells[:5]] == [
        "grpo-a0-k0-s0", "tis-a0-k0-s0", "grpo-a1-k0-s0", "tis-a1-k0-s0", "grpo-a0-k4-s0",
    ]  # fmt: skip
    assert [cell.seed for cell in cells] == [0] * 8 + [1] * 8
    assert cells[0].options() == ["--algo=grpo", "--async-ratio=0.0", "--publish-delay=0", "--seed=0"]


def test_only_the_cells_that_are_not_finished_are_run_and_each_is_kept(tmp_path):
    cells = ablate.grid(["grpo", "tis"], [0.0], [0], seeds=2)
    write_cells(tmp_path, [make_record("tis", seed=0), make_record("grpo", seed=1, error="error: it broke")])
    ran = []

    def run(cell, extra):
        ran.append(cell)
        return make_record(cell.algo, seed=cell.seed)

    ablate.run_grid(cells, tmp_path, 1, [], run)
    assert ran == [Cell("grpo", 0.0, 0, 0), Cell("tis", 0.0, 0, 1)]
    assert set(ablate.read_cells(tmp_path)) == set(cells)
    ablate.run_grid(cells, tmp_path, 2, [], run)
    assert len(ran) == 2


def test_after_an_error_no_other_cell_is_started_and_what_is_finished_is_kept(tmp_path):
    cells = ablate.grid(["reinforce", "grpo", "tis"], [0.0], [0], seeds=1)
    ran = []

    def run(cell, extra):
        ran.append(cell)
        if cell.algo == "grpo":
            raise ValueError("it does not start")
        return make_record(cell.algo)

    with pytest.raises(ValueError, match="it does not start"):
        ablate.run_grid(cells, tmp_path, 1, [], run)
    assert ran == cells[:2] and list(ablate.read_cells(tmp_path)) == cells[:1]


def test_ctrl_c_does_not_make_a_result_of_the_run_that_it_ends(tmp_path):
    script = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
from scripts import ablate
from pathlib import Path

def run(cell, extra):
    print("running", flush=True)
    time.sleep(1)
    return {{"cell": vars(cell), "evaluations": [], "seconds": 1.0, "error": "SignalException"}}

ablate.run_grid(ablate.grid(["grpo", "tis"], [0.0], [0], 2), Path({str(tmp_path)!r}), 1, [], run)
"""
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while job.stdout.readline() != "running\n":
        assert job.poll() is None
    job.send_signal(2)
    rest, trace = job.communicate(timeout=30)
    assert "KeyboardInterrupt" in trace and rest == "" and not (tmp_path / "cells.jsonl").exists()


def test_cells_of_a_grid_with_other_options_are_refused(tmp_path):
    write_cells(tmp_path, [make_record()])
    with pytest.raises(ValueError, match=r"grpo-a0-k0-s0 was run with .*--seed=0, not .*--steps=5; give another --out"):
        ablate.run_grid([Cell("grpo", 0.0, 0, 0)], tmp_path, 1, ["--steps=5"], run=None)


def test_a_cell_is_a_process_whose_curves_are_kept_also_if_it_ends_with_an_error(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    record = ablate.run_cell(Cell("grpo", 1.0, 0, 3), ["--steps=1"], (sys.executable, str(stub)))
    assert record["cell"] == {"algo": "grpo", "async_ratio": 1.0, "publish_delay": 0, "seed": 3}
    assert record["series"]["reward"] == [0.33333] and record["evaluations"] == [(1, 0.5)] and "error" not in record
    assert record["options"][-1] == "--steps=1" and record["git_dirty"] is False
    failed = ablate.run_cell(Cell("kimi", 1.0, 0, 3), [], (sys.executable, str(stub)))
    assert failed["error"] == "error: the loss is not finite" and failed["series"]["samples"] == [8]


def test_a_run_that_makes_no_step_is_an_error_that_has_the_run_s_own(tmp_path):
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    with pytest.raises(ValueError, match=r"gspo-a0-k0-s0 has no metrics .exit status 1.: error: no room for gspo$"):
        ablate.run_cell(Cell("gspo", 0.0, 0, 0), [], (sys.executable, str(stub)))


def test_a_run_is_reduced_to_its_ends_and_its_staleness_after_the_warm_up():
    assert grid_report.summarise(make_record(delay=4, ratio=0.5, seed=2, error="error:\n  it broke\n")) == {
        "algo": "grpo",
        "async_ratio": 0.5,
        "publish_delay": 4,
        "seed": 2,
        "steps": 20,
        "samples": 160,
        "final_accuracy": 0.75,
        "best_accuracy": 1.0,
        "final_reward": pytest.approx(0.975),
        "staleness_mean": 4.5,
        "staleness_max": 6,
        "seconds": 40.0,
        "error": "error: it broke",
    }


def test_a_cell_of_the_table_is_mean_and_standard_deviation_over_the_seeds_that_did_not_fail():
    records = [make_record("tis", seed=seed, last=last) for seed, last in enumerate((0.5, 0.7, 0.9))]
    records += [make_record("grpo", seed=seed, last=0.8, error="e" * (seed > 0)) for seed in range(3)]
    records += [make_record("grpo", delay=4, seed=seed, error="e") for seed in range(3)]
    assert body(records) == {
        "before training": ["0.250 ± 0.000", "0.250 ± 0.000"],
        "`grpo`": ["0.800, failed 2/3", "failed 3/3"],
        "`tis`": ["0.700 ± 0.200", "–"],
    }
    head, *_, caption = grid_report.table(records).splitlines()
    assert head == "|  | `async_ratio` 0, `publish_delay` 0 | `async_ratio` 0, `publish_delay` 4 |"
    assert "standard deviation over n = 3 seeds; failed k/m" in caption and "per run: 160." in caption


def test_the_table_says_n_in_each_cell_where_it_is_not_the_same():
    records = [make_record("tis", seed=0, last=0.5), make_record("tis", seed=1, last=0.6), make_record("grpo")]
    assert body(records) == {
        "before training": ["0.250 ± 0.000, n = 2"],
        "`grpo`": ["0.750, n = 1"],
        "`tis`": ["0.550 ± 0.071, n = 2"],
    }


def test_accuracy_before_training_is_averaged_over_the_losses_and_then_over_seeds():
    records = [make_record(algo, seed=seed) for algo in ("grpo", "tis") for seed in range(2)]
    for record, start in zip(records, (0.1, 0.5, 0.3, 0.7), strict=True):
        record["evaluations"] = [[0, start], [20, 0.8]]
    assert grid_report.initial_accuracies(records) == [pytest.approx(0.2), pytest.approx(0.6)]


def test_one_seed_has_no_spread_and_no_evaluation_no_accuracy():
    records = [make_record("tis"), make_record("grpo") | {"evaluations": []}]
    assert body(records) == {"before training": ["0.250"], "`grpo`": ["–"], "`tis`": ["0.750"]}
    assert "accuracy, n = 1 seed. " in grid_report.table(records)


def test_runs_are_averaged_at_the_same_step_as_far_as_they_have_come():
    long = (np.array([0.0, 2.0, 4.0]), np.array([0.0, 20.0, 40.0]), np.array([0.0, 1.0, 1.0]))
    short = (np.array([1.0, 2.0]), np.array([30.0, 40.0]), np.array([0.0, 0.5]))
    x, mean, low, high = grid_report.average([long, short])
    assert x.tolist() == [0, 20, 30, 40]
    assert mean.tolist() == [0, 0.25, 0.75, 1]
    assert low.tolist() == [0, 0, 0.5, 1] and high.tolist() == [0, 0.5, 1, 1]


def test_curves_stand_at_the_samples_of_a_version_and_at_the_seconds_of_a_step():
    steps, samples, accuracies = grid_report.accuracy_over_samples(make_record())
    assert steps.tolist() == [0, 10, 20] and samples.tolist() == [0, 80, 160] and accuracies.tolist() == [0.25, 1, 0.75]
    steps, seconds, rewards = grid_report.reward_over_seconds(make_record())
    assert steps[[0, -1]].tolist() == [2, 20] and seconds[[0, -1]].tolist() == [4, 40]
    assert rewards[[0, -1]].tolist() == pytest.approx([0.075, 0.975])


def test_no_two_losses_look_alike_and_an_unknown_one_has_a_look():
    names = [*ablate.Algo.__args__, "old_loss"]
    assert len({tuple(grid_report.style(name, names).values()) for name in names}) == len(names)
    assert grid_report.algos([{"algo": name} for name in reversed(names)]) == names


GRIDS = {
    "many losses, settings and seeds, of unlike lengths, some of them failed": [
        make_record(algo, ratio, delay, seed, 0.5 + seed / 10, 20 - 3 * seed, "e" * (algo == "gspo" and seed > delay))
        for algo in ("tis", "gspo")
        for ratio, delay in ((0.0, 0), (0.0, 4), (1.0, 0), (2.0, 0))
        for seed in range(2)
    ],
    "one run": [make_record()],
    "one step, of a run that failed": [make_record(steps=1, error="e")],
    "no evaluations": [make_record() | {"evaluations": []}],
}


@pytest.mark.parametrize("records", GRIDS.values(), ids=GRIDS)
def test_a_report_writes_the_table_the_csv_and_figures_that_show_something(records, tmp_path, capsys):
    out = write_cells(tmp_path, records)
    grid_report.report(out)
    printed = capsys.readouterr().out
    assert (out / "table.md").read_text() in printed
    for name in FIGURES:
        pixels = imread(out / name)
        assert pixels.shape[1] >= 800 and 0.01 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5
        assert str(out / name) in printed
    rows = list(csv.DictReader((out / "cells.csv").open()))
    assert len(rows) == len(records) and tuple(rows[0]) == grid_report.COLUMNS


def test_the_csv_is_sorted_and_rounded_and_leaves_blank_what_was_not_measured(tmp_path):
    records = [make_record("tis", seed=1, last=1 / 3), make_record("tis", error='a "b",\nc'), make_record("grpo", 1.0)]
    records[2]["evaluations"] = []
    grid_report.write_csv([grid_report.summarise(record) for record in records], tmp_path / "cells.csv")
    assert (tmp_path / "cells.csv").read_text().splitlines()[1:] == [
        'tis,0.0,0,0,20,160,0.75,1.0,0.975,0.0,2,40.0,"a ""b"", c"',
        "tis,0.0,0,1,20,160,0.33333,1.0,0.975,0.0,2,40.0,",
        "grpo,1.0,0,0,20,160,,,0.975,1.0,2,40.0,",
    ]


def test_a_cell_that_was_written_twice_counts_once(tmp_path):
    out = write_cells(tmp_path, [make_record(last=0.5), make_record(last=0.6)])
    assert [record["evaluations"][-1][1] for record in grid_report.read_records(out)] == [0.6]


def test_a_broken_line_is_named_and_so_is_the_way_out(tmp_path):
    write_cells(tmp_path, [make_record()])
    with open(tmp_path / "cells.jsonl", "a") as file:
        file.write('{"cell": {"al')
    with pytest.raises(ValueError, match=r"line 2 of 2 is not a cell \(JSONDecodeError.*delete the line"):
        ablate.read_cells(tmp_path)


def test_a_directory_without_cells_is_an_error_in_one_line(tmp_path):
    done = run_script("ablation_report.py", tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "has no finished cell; scripts/ablate.py --out" in done.stderr


def test_the_script_reports_a_grid_that_is_finished_without_running_anything(tmp_path):
    out = write_cells(tmp_path, [make_record("tis", seed=seed) for seed in range(2)])
    done = run_script("ablate.py", "--algos", "tis", "--async-ratio", 0, "--seeds", 2, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "2 cells, 2 of them finished before" in done.stdout and "| `tis` | 0.750 ± 0.000 |" in done.stdout
    assert all((out / name).exists() for name in FIGURES)


def test_the_script_refuses_options_that_a_run_would_not_accept(tmp_path):
    done = run_script("ablate.py", "--out", tmp_path, "--", "--groups-per-step=0")
    assert done.returncode != 0 and "grpo-a0-k0-s0" in done.stderr and not (tmp_path / "cells.jsonl").exists()
