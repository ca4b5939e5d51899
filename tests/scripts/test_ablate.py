"""Grids of runs that a stub of the training script makes: which cells there are, which are run, what is kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from algos import LOSSES
from scripts import ablate
from scripts.ablate import cell_name, grid, options, read_value, run_cell, run_missing
from scripts.grids import key, read_records, record_of, replay_table
from scripts.runs import load

ROOT = Path(__file__).parents[2]

STUB = """
import json, pathlib, sys
given = dict(option[2:].split("=") for option in sys.argv[1:])
run = pathlib.Path(given["runs-dir"], given["run-name"])
run.mkdir()
header = {"git_commit": "c", "git_diff": "", "hardware": {}, "packages": {}, "config": given}
(run / "run.json").write_text(json.dumps(header))
line = {"step": 1, "samples": 8, "reward/mean": 1 / 3, "staleness/mean": 0.0, "staleness/max": 0, "time/step_s": 2.0,
        "eval/accuracy": 0.5, "eval/policy_version": 1}
(run / "metrics.jsonl").write_text("" if given["algo"] == "gspo" else json.dumps(line) + "\\n")
if given["algo"] in ("kimi", "gspo"):
    sys.exit("a trace\\nerror: the loss is not finite")
if given["algo"] == "aipo":
    import os
    os.kill(os.getpid(), 9)
"""


def make_cell(algo="grpo", seed=0, **more):
    return {"algo": algo, "async_ratio": 0.0, "publish_delay": 0, "seed": seed, **more}


def make_record(cell, **more):
    return {
        "cell": cell,
        "options": options(cell),
        "seconds": 1.0,
        "evaluations": [[1, 0.5]],
        "series": {},
    } | more


def write_cells(out, records):
    (out / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def axes(algos=("grpo",), ratios=("0",), delays=("0",), seeds=1, **sweeps):
    chosen = {
        "algo": algos,
        "async_ratio": ratios,
        "publish_delay": delays,
        "seed": map(str, range(seeds)),
        **sweeps,
    }
    return {name: [read_value(name, value) for value in values] for name, values in chosen.items()}


def run_script(*arguments, cwd=ROOT):
    command = [sys.executable, ROOT / "scripts/ablate.py", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_stub(tmp_path):
    """Runs a cell by the stub, and keeps its directory if it is told where."""
    (tmp_path / "stub.py").write_text(STUB)
    return lambda cell, keep_in=None: run_cell(
        cell, [sys.executable, tmp_path / "stub.py", *options(cell)], keep_in
    )


# Cells


def test_a_grid_has_whole_seeds_first_and_all_losses_beside_each_other():
    cells = grid(axes(["grpo", "tis"], ["0", "1"], ["0", "4"], seeds=2))
    assert len({key(cell) for cell in cells}) == len(cells) == 16
    assert [cell_name(cell) for cell in cells[:5]] == [
        "grpo-a0-k0-s0", "tis-a0-k0-s0", "grpo-a1-k0-s0", "tis-a1-k0-s0", "grpo-a0-k4-s0",
    ]  # fmt: skip
    assert [cell["seed"] for cell in cells] == [0] * 8 + [1] * 8
    assert options(cells[0]) == [
        "--algo=grpo",
        "--async-ratio=0.0",
        "--publish-delay=0",
        "--seed=0",
    ]


def test_one_grid_may_have_losses_with_options_of_their_own():
    bare, high, tis = grid(axes(["grpo", "grpo:clip_low=0.1 clip_high=0.4", "tis"]))
    assert options(high)[:4] == ["--algo=grpo", "--algo-args", "clip_low=0.1", "clip_high=0.4"]
    assert (
        "algo_args" not in bare | tis
        and cell_name(high) == "grpo+clip_low=0.1+clip_high=0.4-a0-k0-s0"
    )


def test_any_option_can_be_swept_whatever_its_type():
    sweeps = {
        "lr": ["0.001", "1e-4"],
        "drop_zero_variance": ["true", "false"],
        "algo_args": ["", "clip_high=0.4"],
    }
    cells = grid(axes(**sweeps))
    assert len(cells) == 8 and {(cell["lr"], cell["drop_zero_variance"]) for cell in cells} == {
        (0.001, True), (0.001, False), (0.0001, True), (0.0001, False),
    }  # fmt: skip
    assert options(cells[0])[1] == "--algo-args" and options(cells[0])[-2:] == [
        "--lr=0.001",
        "--drop-zero-variance",
    ]
    assert len({cell_name(cell) for cell in cells}) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "lr"], "--sweep takes OPTION=V1|V2, as in lr=0.001|0.0003, got 'lr'"),
        (["--sweep", "lrr=1|2"], "--lrr is no option; did you mean --lr"),
        (["--sweep", "lr=a|2"], "--lr must be above 0 and at most 1,000,000,000"),
        (
            ["--sweep", "share_prefix=off|yes"],
            "--share-prefix must be one of off, prompt, tree, got 'yes'",
        ),
        (["--sweep", "compile=yes|no"], "--compile is true or false, got 'yes'"),
        (["--algos", "grop"], "--algo 'grop' is none of"),
        (["--algos", "grpo", "grpo"], "grpo-a0-k0-s0, or an option of it, is there twice"),
        (
            ["--algos", "grpo:cap=1", "--sweep", "algo_args=cap=2"],
            "or an option of it, is there twice; name each value and option",
        ),
        (
            ["--sweep", "lr=1e-3|2e-3", "--sweep", "lr=3e-3"],
            "--sweep lr has values already; sweep an option once",
        ),
        (
            ["--algos", "grpo", "--sweep", "algo=tis"],
            "--sweep algo has values already; sweep an option once, and --al",
        ),
        (["--sweep", "async-ratio=1|2"], "--sweep async-ratio has values already"),
        (["--sweep", "seed=7"], "--sweep seed has values already"),
        (
            ["--", "--async-ratio", "1"],
            "cell grpo-a0-k0-s0: --async-ratio is the grid's; give it before --",
        ),
        (["--", "--algo=topr"], "--algo is the grid's; give it before --"),
        (["--sweep", "lr=0.1|0.2", "--", "--lr=0.2"], "--lr is the grid's; give it before --"),
        (
            ["--algos", "grpo:clip_high=0.4", "--", "--algo-args", "clip_low=0.1"],
            "--algo-args is the grid's",
        ),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--algos", "grpo", "tis:clip_high=0.3"], "cell tis+clip_high=0.3-a0-k0-s0: "),
    ],
)
def test_what_no_run_would_accept_is_refused_before_the_first_run(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ablate.cells_of(ablate.read_arguments(arguments))
    assert "\n" not in str(error.value)


def test_the_script_says_a_mistake_in_one_line_and_makes_nothing(tmp_path):
    done = run_script("--out", tmp_path / "out", "--", "--groups-per-step=0")
    assert done.returncode == 1 and done.stderr.startswith(
        "error: cell grpo-a0-k0-s0: --groups-per-step must be"
    )
    assert done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_options_of_every_run_that_the_grid_does_not_vary_go_after_two_dashes(capsys):
    same = ["--sweep", "lr=0.1|0.2", "--seeds", "1", "--", "--steps=5", "--seed=0"]
    assert len(ablate.cells_of(ablate.read_arguments(same))) == 3 * 2 * 2
    with pytest.raises(SystemExit):
        ablate.read_arguments(["--algos", "grpo", "--steps", "5"])
    assert "unrecognized arguments: --steps" in (said := capsys.readouterr().err)
    assert said.endswith("; options of every run go after --\n")


# Runs


def test_only_the_cells_that_are_not_finished_are_run_and_each_is_kept(tmp_path):
    cells = grid(axes(["grpo", "tis"], seeds=2))
    write_cells(
        tmp_path,
        [make_record(make_cell("tis")), make_record(make_cell("grpo", 1), error="error: it broke")],
    )
    ran = []

    def run(cell):
        ran.append(cell)
        return make_record(cell)

    run_missing(cells, tmp_path / "cells.jsonl", run)
    assert ran == [make_cell("grpo"), make_cell("tis", 1)]
    assert {key(record["cell"]) for record in read_records(tmp_path / "cells.jsonl")} == set(
        map(key, cells)
    )
    run_missing(cells, tmp_path / "cells.jsonl", run, parallel=2)
    assert len(ran) == 2


def test_after_an_error_no_other_cell_is_started_and_what_is_finished_is_kept(tmp_path):
    cells = grid(axes(["reinforce", "grpo", "tis"]))
    ran = []

    def run(cell):
        ran.append(cell)
        if cell["algo"] == "grpo":
            raise ValueError("it does not start")
        return make_record(cell)

    with pytest.raises(ValueError, match="it does not start"):
        run_missing(cells, tmp_path / "cells.jsonl", run)
    assert (
        ran == cells[:2]
        and [record["cell"] for record in read_records(tmp_path / "cells.jsonl")] == cells[:1]
    )


def test_ctrl_c_does_not_make_a_result_of_the_run_that_it_ends(tmp_path):
    script = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
from algos import LOSSES
from scripts import ablate

def run(cell, command, keep_in):
    print("running", flush=True)
    time.sleep(4)
    return {{"cell": cell, "evaluations": [], "error": "SignalException"}}

ablate.run_cell = run
sys.argv[1:] = ["--out", {str(tmp_path)!r}]
ablate.main()
"""
    job = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while job.stdout.readline() != "running\n":
        assert job.poll() is None
    job.send_signal(2)
    rest, said = job.communicate(timeout=30)
    assert said == f"stopped; the same --out goes on: --out {tmp_path}\n" and job.returncode == 1
    assert rest == "" and not (tmp_path / "cells.jsonl").exists()


def test_cells_of_a_grid_with_other_options_are_refused(tmp_path):
    write_cells(tmp_path, [make_record(make_cell())])
    with pytest.raises(
        ValueError, match=r"grpo-a0-k0-s0 ran with .*--seed=0, not .*--steps=5; give another --out"
    ):
        run_missing([make_cell()], tmp_path / "cells.jsonl", None, ["--steps=5"])


def test_a_cell_is_a_process_whose_curves_are_kept_also_if_it_ends_with_an_error(run_stub):
    cell = make_cell(seed=3)
    record = run_stub(cell)
    assert record["cell"] == cell and record["git_dirty"] is False and "error" not in record
    assert record["series"]["reward"] == [0.33333] and record["evaluations"] == [(1, 0.5)]
    failed = run_stub(make_cell("kimi"))
    assert failed["error"] == "error: the loss is not finite" and failed["series"]["samples"] == [8]


def test_a_run_that_was_killed_is_no_result(run_stub):
    with pytest.raises(
        ValueError, match=r"^cell aipo-a0-k0-s0 was killed or broke, which is no result"
    ):
        run_stub(make_cell("aipo"))


def test_a_run_that_makes_no_step_is_an_error_that_has_the_run_s_own(run_stub):
    with pytest.raises(
        ValueError, match=r"^cell gspo-a0-k0-s0 has no metrics: error: the loss is not finite$"
    ):
        run_stub(make_cell("gspo"))


def test_the_directories_of_the_runs_are_kept_if_asked_for_and_a_half_made_one_is_replaced(
    run_stub, tmp_path
):
    for _ in range(2):
        assert "error" not in run_stub(make_cell(), tmp_path / "runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["grpo-a0-k0-s0"]
    assert (tmp_path / "runs" / "grpo-a0-k0-s0" / "metrics.jsonl").exists()


def test_every_record_has_the_options_that_all_runs_were_given(run_stub, tmp_path):
    run_missing([make_cell()], tmp_path / "cells.jsonl", run_stub, ["--steps=1"])
    assert read_records(tmp_path / "cells.jsonl")[0]["options"] == [
        *options(make_cell()),
        "--steps=1",
    ]


def test_the_script_goes_on_with_a_grid_that_is_finished_without_running_anything(tmp_path):
    series = {
        "reward": [0.5],
        "staleness_mean": [0.0],
        "staleness_max": [0],
        "step_s": [1.0],
        "samples": [8],
    }
    write_cells(tmp_path, [make_record(make_cell("tis", seed), series=series) for seed in range(2)])
    done = run_script("--algos", "tis", "--async-ratio", 0, "--seeds", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "2 cells, 2 of them finished before" in done.stdout and "| `tis` | 0.500 |" in done.stdout
    )
    assert (tmp_path / "curves.png").exists()


@pytest.mark.slow
def test_the_study_is_cells_that_runs_accept_each_once_with_whole_seeds_first():
    parts = ablate.study([])
    assert list(parts) == ["lag", "others", "smollm2", "rates", "time"] and [
        *ablate.study(["rates"])
    ] == ["rates"]
    for name, (cells, extra) in parts.items():
        seeds = [cell["seed"] for cell in cells]
        assert len({key(cell) for cell in cells}) == len(cells) and seeds == sorted(seeds), name
        assert {f"--{word}" for word in ("async-ratio", "publish-delay", "seed")}.isdisjoint(
            extra
        ), name
    of_lag = [
        (cell["algo"], cell["publish_delay"]) for cell in parts["lag"][0] if cell["seed"] == 4
    ]
    assert len({algo for algo, lag in of_lag if lag == 16}) == 12, (
        "twelve losses at the longest lag"
    )
    assert {lag for _, lag in of_lag} == {0, 1, 4, 16}
    assert {cell["algo"] for part in ("lag", "others") for cell in parts[part][0]} == set(LOSSES)


@pytest.mark.slow
def test_a_part_of_the_study_goes_on_where_it_stopped_and_one_that_is_not_there_is_refused(
    tmp_path,
):
    cells, extra = ablate.study(["time"])["time"]
    (tmp_path / "time").mkdir()
    curves = {"reward": [0.5, 0.6], "staleness_mean": [0.0, 1.0], "staleness_max": [0, 1], "step_s": [1.0, 1.0],
              "samples": [8, 16]}  # fmt: skip
    write_cells(
        tmp_path / "time", [make_record(c, options=options(c, extra), series=curves) for c in cells]
    )
    finished = run_script("--study", "time", "--out", tmp_path)
    assert f"{len(cells)} cells, {len(cells)} of them finished before" in finished.stdout, (
        finished.stderr
    )
    assert (tmp_path / "time" / "table.md").exists()
    refused = run_script("--study", "lags", "--out", tmp_path)
    said = "error: --study lags: the parts are lag, others, smollm2, rates, time; did you mean lag?"
    assert refused.stderr.strip() == said and refused.returncode == 1


def test_a_report_needs_to_be_told_of_which_grid():
    done = run_script("--report")
    assert (
        done.returncode == 1
        and done.stderr == "error: --report needs --out, the directory of a grid\n"
    )


# Replays


def write_recorded(path, seed, accuracy):
    """A recorded run of ten steps: only the last one, a tenth of them, counts for the means."""
    (path / "checkpoints" / "step_10").mkdir(parents=True)
    (path / "checkpoints" / "step_10" / "model.safetensors").write_bytes(b"weights")
    header = {
        "command": ["torchrun", "train_async.py"],
        "git_commit": "0" * 40,
        "git_diff": "",
        "hardware": {},
    }
    config = {"config": {"algo": "grpo", "seed": seed}, "packages": {}}
    (path / "run.json").write_text(json.dumps(header | config))
    lines = [
        {"step": s, "drift/k3": s / 8, "loss/entropy": 0.5, "loss/ess": 1.0, "loss/grad_norm": 0.1}
        for s in range(1, 11)
    ]
    lines[0] |= {"eval/accuracy": 0.0, "eval/policy_version": 0}
    lines[-1] |= {"eval/accuracy": accuracy, "eval/policy_version": 10}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_recorded_runs_and_their_replays_are_rows_with_means_over_the_runs(tmp_path):
    recorded = [
        load(write_recorded(tmp_path / f"run-{seed}", seed, 0.25 + seed / 2)) for seed in (0, 1)
    ]
    cells = [{"kind": "recorded run", "of": run.name, "algo": "grpo"} for run in recorded]
    runs = [
        {"cell": cell} | record_of(run, cell) for run, cell in zip(recorded, cells, strict=True)
    ]
    replays = [
        run | {"cell": run["cell"] | {"kind": "replay", "algo": "tis"}, "accuracy": 1.0}
        for run in runs
    ]
    assert replay_table([runs[0], replays[0], runs[1], replays[1]])[2:] == [
        "| recorded run, `grpo` | 2 | 0.500 ± 0.354 | 1.2500 | 0.500 | 1.000 |",
        "| `tis` | 2 | 1.000 | 1.2500 | 0.500 | 1.000 |",
    ]
    assert (
        runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
        and runs[0]["command"] == "torchrun train_async.py"
    )


def test_a_replay_does_not_take_over_the_options_that_the_recorded_run_gave_its_loss():
    assert options({"kind": "replay", "of": "a run", "algo": "tis"}) == [
        "--algo=tis",
        "--algo-args",
    ]
    own = {"kind": "replay", "of": "a run", "algo": "grpo", "algo_args": ["clip_high=0.3"]}
    assert options(own) == ["--algo=grpo", "--algo-args", "clip_high=0.3"]


def test_a_replay_is_not_given_another_loss_than_its_row_says(tmp_path):
    run = str(write_recorded(tmp_path / "run", 0, 0.5))
    with pytest.raises(
        ValueError, match="cell tis-replay-run: --algo is the grid's; give it before --"
    ):
        ablate.cells_of(
            ablate.read_arguments(["--replay", run, "--algos", "tis", "--", "--algo=grpo"])
        )


@pytest.mark.slow
def test_a_replay_that_fails_ends_it_with_its_reason_and_keeps_what_was_made_in_the_working_directory(
    tmp_path,
):
    write_recorded(tmp_path / "run", 0, 0.5)
    done = run_script("--replay", "run", "--algos", "tis", cwd=tmp_path)
    assert done.returncode == 1 and "cell tis-replay-run has no metrics: error: " in done.stderr
    assert "was not recorded" in done.stderr
    (made,) = tmp_path.glob("runs/ablation-20*/replays.jsonl")
    assert [record["cell"]["kind"] for record in read_records(made)] == ["recorded run"]
