"""Grids of runs that a stub of the training script makes: which cells there are, which are run, what is kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from algos import LOSSES
from scripts import ablate
from scripts.ablate import cell_name, options, run_cell, run_missing
from scripts.grids import key, read_records, record_of, replay_table
from scripts.runs import load

ROOT = Path(__file__).parents[2]

STUB = """
import json, os, pathlib, sys
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
    os.kill(os.getpid(), 9)
"""


def make_cell(algo="grpo", seed=0, **more):
    return {"algo": algo, "async_ratio": 0.0, "publish_delay": 0, "seed": seed, **more}


def make_record(cell, **more):
    names = ("reward", "staleness_mean", "staleness_max", "step_s", "samples")
    series = {name: [1.0] for name in names}
    made = {"options": options(cell), "seconds": 1.0, "evaluations": [[1, 0.5]], "series": series}
    return made | {"cell": cell} | more


def write_cells(out, records):
    (out / "cells.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def cells_of(*arguments):
    return ablate.cells_of(ablate.read_arguments([*arguments]))


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
    cells = cells_of(
        *("--algos", "grpo", "tis:clip_low=0.1 clip_high=4.0", "--async-ratio", "0", "1"),
        *("--publish-delay", "0", "4", "--seeds", "2"),
    )
    assert len({key(cell) for cell in cells}) == len(cells) == 16
    tis = "tis+clip_low=0.1+clip_high=4.0"
    assert [cell_name(cell) for cell in cells[:5]] == [
        "grpo-a0-k0-s0", f"{tis}-a0-k0-s0", "grpo-a1-k0-s0", f"{tis}-a1-k0-s0", "grpo-a0-k4-s0",
    ]  # fmt: skip
    assert [cell["seed"] for cell in cells] == [0] * 8 + [1] * 8
    assert options(cells[1]) == [
        "--algo=tis", "--algo-args", "clip_low=0.1", "clip_high=4.0", "--async-ratio=0.0", "--publish-delay=0",
        "--seed=0",
    ]  # fmt: skip


def test_any_option_can_be_swept_whatever_its_type():
    sweeps = {"lr": ["0.001", "1e-4"], "drop_zero_variance": ["true", "false"], "compile": ["true"]}
    sweeps |= {"optim.warmup": ["3"], "algo_args": ["", "clip_high=0.4"]}
    words = (("--sweep", f"{name}={'|'.join(values)}") for name, values in sweeps.items())
    cells = cells_of("--algos=grpo", "--async-ratio=0", "--seeds=1", *sum(words, ()))
    assert len({cell_name(cell) for cell in cells}) == 8
    assert {(cell["lr"], cell["drop_zero_variance"]) for cell in cells} == {
        (0.001, True), (0.001, False), (0.0001, True), (0.0001, False),
    }  # fmt: skip
    assert options(cells[0])[1] == "--algo-args" and options(cells[0])[-4:] == [
        "--lr=0.001", "--drop-zero-variance", "--compile", "--optim.warmup=3",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sweep lr", "--sweep takes OPTION=V1|V2, as in lr=0.001|0.0003, got 'lr'"),
        ("--sweep lrr=1|2", "--lrr is no option; did you mean lr"),
        ("--sweep lr=a|2", "--lr must be above 0 and at most 1,000,000,000, got 'a'"),
        ("--sweep share_prefix=off|yes", "--share-prefix must be off or prompt or tree, got 'yes'"),
        ("--sweep compile=yes|no", "--compile must be true or false, got 'yes'"),
        ("--algos grop", "--algo 'grop' is none of"),
        ("--algos grpo grpo", "grpo-a0-k0-s0, or an option of it, is there twice"),
        ("--algos grpo:cap=1 --sweep algo_args=cap=2", "or an option of it, is there twice; name"),
        ("--sweep lr=1e-3|2e-3 --sweep lr=3e-3", "--sweep lr has values already; sweep an option"),
        ("--algos grpo --sweep algo=tis", "--sweep algo has values already"),
        ("--sweep async-ratio=1|2", "--sweep async-ratio has values already"),
        ("--sweep seed=7", "--sweep seed has values already"),
        ("-- --async-ratio 1", "cell grpo-a0-k0-s0: --async-ratio is the grid's; give it before"),
        ("-- --algo=topr", "--algo is the grid's; give it before --"),
        ("--sweep lr=0.1|0.2 -- --lr=0.2", "--lr is the grid's; give it before --"),
        ("--algos grpo:clip_high=0.4 -- --algo-args clip_low=0.1", "--algo-args is the grid's"),
        ("--seeds 0", "--seeds must be at least 1, got 0"),
        ("--algos grpo tis:clip_high=0.3", "cell tis+clip_high=0.3-a0-k0-s0: "),
        ("-- --groups-per-step=0", "--groups-per-step must be"),
    ],
)
def test_what_no_run_would_accept_is_refused_before_the_first_run(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        cells_of(*arguments.split())
    assert "\n" not in str(error.value)


def test_options_of_every_run_that_the_grid_does_not_vary_go_after_two_dashes(capsys):
    assert len(cells_of("--sweep", "lr=0.1|0.2", "--seeds=1", "--", "--steps=5", "--seed=0")) == 12
    with pytest.raises(SystemExit):
        ablate.read_arguments(["--algos", "grpo", "--steps", "5"])
    said = capsys.readouterr().err
    assert said.endswith("arguments: --steps; options of every run go after --\n")


# Runs


@pytest.fixture
def cells():
    """Three losses, a seed."""
    return [make_cell(algo) for algo in ("reinforce", "grpo", "tis")]


def test_only_the_cells_that_are_not_finished_are_run_and_each_is_kept(tmp_path, cells):
    finished = [make_record(cells[2]), make_record(cells[0], error="error: it broke")]
    write_cells(tmp_path, finished)
    ran = []

    def run(cell):
        ran.append(cell)
        return make_record(cell)

    path = tmp_path / "cells.jsonl"
    for parallel in (1, 2):
        run_missing(cells, path, run, parallel=parallel)
        assert ran == [cells[1]]
        assert read_records(path) == [*finished, make_record(cells[1])]


def test_after_an_error_no_other_cell_is_started_and_what_is_finished_is_kept(tmp_path, cells):
    ran = []

    def run(cell):
        ran.append(cell)
        if cell["algo"] == "grpo":
            raise ValueError("it does not start")
        return make_record(cell)

    path = tmp_path / "cells.jsonl"
    with pytest.raises(ValueError, match="it does not start"):
        run_missing(cells, path, run)
    assert ran == cells[:2] and [record["cell"] for record in read_records(path)] == cells[:1]


def test_a_mistake_is_one_line_and_nothing_is_made(tmp_path):
    refused = run_script("--report", cwd=tmp_path)
    assert refused.stderr == "error: --report needs --out, the directory of a grid\n"
    assert refused.returncode == 1 and not list(tmp_path.iterdir())


def test_ctrl_c_does_not_make_a_result_of_the_run_that_it_ends(tmp_path):
    script = f"""
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
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
    assert said == f"stopped; the same --out continues: --out {tmp_path}\n" and job.returncode == 1
    assert rest == "" and not (tmp_path / "cells.jsonl").exists()


def test_cells_of_a_grid_with_other_options_are_refused(tmp_path):
    write_cells(tmp_path, [make_record(make_cell())])
    message = r"grpo-a0-k0-s0 ran with .*--seed=0, not .*--steps=5; give another --out"
    with pytest.raises(ValueError, match=message):
        run_missing([make_cell()], tmp_path / "cells.jsonl", None, ["--steps=5"])


def test_a_cell_is_a_process_whose_curves_are_kept_also_if_it_ends_with_an_error(
    run_stub, tmp_path
):
    path = tmp_path / "cells.jsonl"
    run_missing([make_cell(seed=3), make_cell("kimi")], path, run_stub, ["--steps=1"])
    record, failed = read_records(path)
    assert record["options"] == [*options(make_cell(seed=3)), "--steps=1"]
    assert record["git_dirty"] is False and "error" not in record
    assert record["series"]["reward"] == [0.33333] and record["evaluations"] == [[1, 0.5]]
    assert failed["error"] == "error: the loss is not finite" and failed["series"]["samples"] == [8]


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ("aipo", r"^cell aipo-a0-k0-s0 was killed or broke, which is no result"),
        ("gspo", r"^cell gspo-a0-k0-s0 has no metrics: error: the loss is not finite$"),
    ],
)
def test_a_run_that_was_killed_or_makes_no_step_is_no_result(run_stub, algo, message):
    with pytest.raises(ValueError, match=message):
        run_stub(make_cell(algo))


def test_the_directories_of_runs_are_kept_if_asked_for_and_a_half_made_one_is_replaced(
    run_stub, tmp_path
):
    for _ in range(2):
        assert "error" not in run_stub(make_cell(), tmp_path / "runs")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["grpo-a0-k0-s0"]
    assert (tmp_path / "runs" / "grpo-a0-k0-s0" / "metrics.jsonl").exists()


# The study


def test_the_study_is_the_cells_and_options_of_its_records():
    for name, (cells, extra) in ablate.study([]).items():
        seeds = [cell["seed"] for cell in cells]
        assert seeds == sorted(seeds), name
        records = read_records(ROOT / "results" / "study" / name / "cells.jsonl")
        recorded = {key(record["cell"]): record["options"] for record in records}
        assert recorded == {key(cell): options(cell, extra) for cell in cells}, name
        assert len(cells) == len(recorded), name
    parts = ablate.study(["lag", "others"])
    assert {cell["algo"] for cells, _ in parts.values() for cell in cells} == set(LOSSES)


@pytest.mark.slow
def test_the_script_resumes_a_finished_part_and_refuses_what_is_not_there(tmp_path):
    cells, extra = ablate.study(["time"])["time"]
    (tmp_path / "time").mkdir()
    write_cells(
        tmp_path / "time", [make_record(cell, options=options(cell, extra)) for cell in cells]
    )
    finished = run_script("--study", "time", "--out", tmp_path)
    assert f"{len(cells)} cells, {len(cells)} of them finished before" in finished.stdout
    assert (tmp_path / "time" / "curves.png").exists() and "| `tis` | 0.500 |" in finished.stdout
    parts = "the parts are lag, others, smollm2, rates, time; did you mean lag?"
    refused = run_script("--study", "lags", "--out", tmp_path)
    assert refused.stderr == f"error: --study lags: {parts}\n" and refused.returncode == 1


# Replays


def write_recorded(path, seed, accuracy):
    """A recorded run of ten steps: only the last one, a tenth of them, counts for the means."""
    (path / "checkpoints" / "step_10").mkdir(parents=True)
    (path / "checkpoints" / "step_10" / "model.safetensors").write_bytes(b"weights")
    header = {"command": ["torchrun", "train_async.py"], "git_commit": "0" * 40, "git_diff": ""}
    header |= {"config": {"algo": "grpo", "seed": seed}, "packages": {}, "hardware": {}}
    (path / "run.json").write_text(json.dumps(header))
    lines = [
        {"step": s, "drift/k3": s / 8, "loss/entropy": 0.5, "loss/ess": 1.0, "loss/grad_norm": 0.1}
        for s in range(1, 11)
    ]
    lines[0] |= {"eval/accuracy": 0.0, "eval/policy_version": 0}
    lines[-1] |= {"eval/accuracy": accuracy, "eval/policy_version": 10}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_recorded_runs_and_their_replays_are_rows_with_means_over_the_runs(tmp_path):
    records = []
    for seed in (0, 1):
        run = load(write_recorded(tmp_path / f"run-{seed}", seed, 0.25 + seed / 2))
        cell = {"kind": "recorded run", "of": run.name, "algo": "grpo"}
        record = {"cell": cell} | record_of(run, cell)
        replay = {"cell": cell | {"kind": "replay", "algo": "tis"}, "accuracy": 1.0}
        records += [record, record | replay]
    assert replay_table(records)[2:] == [
        "| recorded run, `grpo` | 2 | 0.500 ± 0.354 | 1.2500 | 0.500 | 1.000 |",
        "| `tis` | 2 | 1.000 | 1.2500 | 0.500 | 1.000 |",
    ]
    assert records[0]["weights_sha256"] == records[2]["weights_sha256"]
    assert records[0]["command"] == "torchrun train_async.py"


def test_a_replay_has_the_loss_of_its_row_and_no_options_of_the_recorded_runs_loss(tmp_path):
    cell = {"kind": "replay", "of": "a run", "algo": "tis"}
    assert options(cell) == ["--algo=tis", "--algo-args"]
    cell["algo_args"] = ["clip_high=0.3"]
    assert options(cell) == ["--algo=tis", "--algo-args", "clip_high=0.3"]
    run = str(write_recorded(tmp_path / "run", 0, 0.5))
    message = "cell tis-replay-run: --algo is the grid's; give it before --"
    with pytest.raises(ValueError, match=message):
        cells_of("--replay", run, "--algos", "tis", "--", "--algo=grpo")


@pytest.mark.slow
def test_a_replay_that_fails_gives_its_reason_and_what_was_made_is_kept(tmp_path):
    write_recorded(tmp_path / "run", 0, 0.5)
    done = run_script("--replay", "run", "--algos", "tis", cwd=tmp_path)
    assert done.returncode == 1 and "cell tis-replay-run has no metrics: error: " in done.stderr
    assert "was not recorded" in done.stderr
    (made,) = tmp_path.glob("runs/ablation-20*/replays.jsonl")
    assert [record["cell"]["kind"] for record in read_records(made)] == ["recorded run"]
