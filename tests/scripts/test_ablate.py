"""Grids of runs that a stub of the training script makes: which cells there are, which are run, what is kept."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from programs import start_python, wait_until
from user_files import write_jsonl, write_user_code

from asyncrl.config import words_of
from scripts import ablate
from scripts.ablate import cell_name, read_arguments
from scripts.grids import code_version, key, read_records

STUB = """
import json, os, pathlib, sys
given = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
run = pathlib.Path(given["runs-dir"], given["run-name"])
run.mkdir()
options = {"minibatches": 4, "optim.epochs": 2}
header = {"git_commit": "c", "git_diff": "", "hardware": {}, "packages": {}, "config": options}
(run / "run.json").write_text(json.dumps(header))
line = {"step": 1, "samples": 8, "reward/mean": 1 / 3, "staleness/mean": 0.0, "staleness/max": 0, "time/step_s": 2.0,
        "eval/accuracy": 0.5, "eval/policy_version": 1, "drift/k3": 0.25}
(run / "metrics.jsonl").write_text(json.dumps(line) + "\\n")
if given["algo"] == "kimi":
    sys.exit("a trace\\nerror: a rank left\\nerror: loss nan and gradient norm inf at update 1 must be finite: look")
if given["algo"] == "aipo":
    os.kill(os.getpid(), 9)
"""
SLEEPER = """
import signal, subprocess, time
if given["seed"] == "1":
    signal.signal(signal.SIGTERM, {handler})
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True)
    pathlib.Path({pids!r}).write_text(json.dumps([os.getsid(0), engine.pid]) + "\\n")
    time.sleep(120)
"""
"""A stub whose second seed sleeps, and starts an engine in another session."""


def cells_of(*words):
    return ablate.cells_of(read_arguments(words))


def test_a_grid_has_whole_seeds_first_and_losses_beside_each_other_and_sweeps_any_option():
    cells = cells_of(
        *("--algos", "grpo", "tis:clip_low=0.1 clip_high=4.0", "--async-ratio", "0", "1"),
        *("--publish-delay", "0", "4", "--sweep", "compile=true|false", "--sweep", "lr=1e-4"),
        *("--sweep", "optim.warmup_steps=3", "--seeds", "2", "--", "--steps=5"),
    )
    assert len({cell_name(cell) for cell in cells}) == len({key(cell) for cell in cells}) == 32
    assert [cell_name(cell) for cell in cells[:8]] == [
        f"{loss}-a{ratio}-k0-s0-compile={value}-lr=0.0001-optim.warmup_steps=3"
        for ratio in (0, 1)
        for value in ("true", "false")
        for loss in ("grpo", "tis+clip_low=0.1+clip_high=4.0")
    ]
    assert [cell["seed"] for cell in cells] == [0] * 16 + [1] * 16
    assert words_of(cells[1]) == [
        "--algo=tis", "--algo-args", "clip_low=0.1", "clip_high=4.0", "--async-ratio=0.0", "--publish-delay=0",
        "--seed=0", "--compile", "--lr=0.0001", "--optim.warmup-steps=3",
    ]  # fmt: skip


@pytest.fixture
def ablate_stub(tmp_path, monkeypatch, capsys):
    """Runs a grid of the stub, and returns its errors and then its output."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.setattr(ablate, "TRAIN", (sys.executable, tmp_path / "stub.py"))

    def run(*words):
        words = "--async-ratio", "0", "--seeds", "1", "--out", str(tmp_path / "grid"), *words
        monkeypatch.setattr(sys, "argv", ["ablate.py", *words])
        ablate.main()
        printed = capsys.readouterr()
        return printed.err + printed.out

    return run


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, "lambda *_: sys.exit('error: stopped by SIGTERM')"),
        (signal.SIGTERM, "signal.SIG_IGN"),
    ],
)
def test_a_signal_ends_the_running_cells_and_the_same_command_continues(number, handler, tmp_path):
    stub, pids, grid = tmp_path / "stub.py", tmp_path / "pids", tmp_path / "my grid"
    stub.write_text(STUB + SLEEPER.format(handler=handler, pids=str(pids)))
    words = "--algos", "grpo", "--async-ratio", "0", "--seeds", "3", "--out", str(grid)
    code = (
        "import sys; from scripts import ablate; ablate.GRACE_S = 1.0\n"
        f"ablate.TRAIN = sys.executable, {str(stub)!r}\n"
        "ablate.main()"
    )
    script = start_python("-c", code, *words, stderr=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    for _ in range(2):  # `timeout` sends its signal twice, and people press Ctrl-C twice
        script.send_signal(number)
        time.sleep(0.4)
    printed, line = script.communicate(timeout=60)
    assert line == (
        f"stopped: 1 of 3 cells are finished; the same command with --out '{grid}' continues\n"
    )
    assert script.returncode == 1 and "grpo-a0-k0-s2" not in printed
    assert [record["cell"]["seed"] for record in read_records(grid / "cells.jsonl")] == [0]
    session_and_engine = json.loads(pids.read_text())
    assert script.pid not in session_and_engine
    for pid in session_and_engine:
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), timeout_s=10)


def test_parallel_runs_divide_the_cores():
    cores = os.sched_getaffinity(0)
    assert ablate.divide_cores(1) == [cores]
    shares = ablate.divide_cores(len(cores))
    assert set.union(*shares) == cores and {len(share) for share in shares} == {1}
    assert ablate.divide_cores(len(cores) + 1) == [cores] * (len(cores) + 1)


def test_a_dry_run_checks_and_prints_the_cells_and_what_the_tables_answer(ablate_stub, tmp_path):
    two = "--algos", "grpo", "tis", "--publish-delay", "0", "4"
    _, *lines = ablate_stub(*two, "--dry-run").splitlines()  # first the warning of few seeds
    cells = [f"  {loss}-a0-k{lag}-s0" for lag in (0, 4) for loss in ("grpo", "tis")]
    assert lines[:5] == ["4 runs:", *cells] and list(tmp_path.iterdir()) == [tmp_path / "stub.py"]
    assert lines[5].startswith("paired.md: what do stale data cost each loss?")
    assert lines[6] == "against.md: is a loss better than grpo at the same lag?"
    assert lines[7].startswith("time: not known yet; a default run takes one to three minutes")
    *_, paired, against, _ = ablate_stub("--algos", "tis", "--dry-run").splitlines()
    assert "Not made: it needs fresh and stale cells" in paired
    assert "than tis at the same lag? Not made: it needs two losses" in against
    with pytest.raises(SystemExit, match=r"error: cell tis.*: --algo-args clip=1: "):
        ablate_stub("--algos", "tis:clip=1", "--dry-run")
    made = cells_of("--algos", "grpo", "dppo", "--async-ratio", "0", "--seeds", "1")
    records = [
        {"cell": cell, "series": {}, "seconds": seconds}
        for cell, seconds in zip(made, (90, 150), strict=True)
    ]
    write_jsonl(tmp_path / "grid/cells.jsonl", records)
    for parallel, minutes in (("1", 6), ("2", 4)):
        *_, line = ablate_stub(*two, "--parallel", parallel, "--dry-run").splitlines()
        assert line == f"time: about {minutes} min for 3 unfinished runs"


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("--publish-delay", "0", "16", "--", "--steps=40"), "lag of 16 can leave 4 versions"),
        (("--publish-delay", "16", "--sweep", "steps=80|10"), "10 steps with a lag of 16 can leave 0"),
        (("--async-ratio", "1.5", "--", "--steps=12"), "lag of 2 can leave 4 versions"),
        (("--publish-delay", "0", "16", "--", "--steps=41"), None),
        (("--async-ratio", "1.5", "--", "--steps=13"), None),
    ],
)  # fmt: skip
def test_too_few_steps_for_a_level_are_reported_at_the_start(words, warning, capsys):
    arguments = read_arguments(("--algos", "grpo", "--async-ratio", "0", *words))
    ablate.warn_of_few_versions(ablate.cells_of(arguments), arguments.extra)
    printed = capsys.readouterr().err
    assert warning in printed if warning else not printed


@pytest.mark.parametrize(("num_seeds", "is_warned"), [(2, True), (3, False)])
def test_too_few_seeds_for_an_interval_are_reported_at_the_start(num_seeds, is_warned, capsys):
    ablate.warn_of_few_seeds(num_seeds)
    assert ("need --seeds 3" in capsys.readouterr().err) == is_warned


def test_a_grid_keeps_each_run_and_its_error_ends_with_one_that_is_killed_and_resumes(
    ablate_stub, tmp_path
):
    grid = tmp_path / "grid"
    words = "--keep-runs", "--", "--steps=1"
    with pytest.raises(SystemExit, match="error: cell aipo-a0-k0-s0 was killed or broke"):
        ablate_stub("--algos", "grpo", "kimi", "aipo", "tis", *words)
    record, failed = read_records(grid / "cells.jsonl")
    assert record["options"] == [*words_of(record["cell"]), "--steps=1"]
    assert record["git_dirty"] is False and "error" not in record
    assert record["series"]["reward"] == [0.3333333] and record["evaluations"] == [[1, 0.5]]
    summary = record["summary"]
    assert summary["reward_last"] == 1 / 3 and summary["accuracy_last"] == 0.5
    assert summary["drift/k3"] == 0.25 and summary["wait_share"] is summary["loss/ess"] is None
    assert record["updates_per_step"] == 8 and record["user_code"] == {}
    error = "error: loss nan and gradient norm inf at update 1 must be finite: look"
    assert failed["error"] == error and failed["series"]["samples"] == [8]
    assert (grid / "runs/grpo-a0-k0-s0/metrics.jsonl").exists()
    (grid / "runs/tis-a0-k0-s0").mkdir()  # of a grid that was killed
    printed = ablate_stub("--algos", "tis", "kimi", "--parallel", "2", *words)
    assert "2 cells, 1 of them finished before" in printed and "| grpo |" in printed
    assert "  time: all runs are finished\n" in printed
    assert "tis-a0-k0-s0 starts, 2 of 2\n" in printed
    algos = [made["cell"]["algo"] for made in read_records(grid / "cells.jsonl")]
    assert algos == ["grpo", "kimi", "tis"]
    assert {"curves.png", "cells.csv"} < {path.name for path in grid.iterdir()}
    assert "cells, " not in ablate_stub("--report")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("error: No space left on device", "No space left on device"),
        ("error: rewards must be finite, got [nan]", "rewards must be finite, got [nan]"),
        ("a trace", "a trace"),
    ],
)
def test_an_error_that_is_no_result_is_reported_and_the_same_command_runs_the_cell_again(
    error, reason, ablate_stub, tmp_path
):
    stub, cells = tmp_path / "stub.py", tmp_path / "grid/cells.jsonl"
    stub.write_text(f"{STUB}\nsys.exit({error!r})")
    how = f"which is no result; the same command with --out {tmp_path}/grid runs it again: {reason}"
    with pytest.raises(SystemExit, match=re.escape(f"grpo-a0-k0-s0 was killed or broke, {how}")):
        ablate_stub("--algos", "grpo")
    assert not read_records(cells)
    stub.write_text(STUB)
    ablate_stub("--algos", "grpo")
    (record,) = read_records(cells)
    write_jsonl(cells, [record | {"error": error}])  # older code kept it
    assert "1 cells, 0 of them finished before" in ablate_stub("--algos", "grpo")
    assert read_records(cells)[0].keys() == record.keys()


def test_a_run_is_started_in_the_folder_of_the_caller(ablate_stub, tmp_path, monkeypatch):
    folder = tmp_path / "user"
    folder.mkdir()
    (tmp_path / "stub.py").write_text(f"{STUB}\npathlib.Path('here').write_text(given['runs-dir'])")
    monkeypatch.chdir(folder)
    ablate_stub("--algos", "grpo", "--out", "mine", "--keep-runs")
    assert (folder / "here").read_text() == str(folder / "mine/runs")
    assert (folder / "mine/table.md").exists() and not (tmp_path / "mine").exists()


def test_a_file_in_the_folder_of_the_caller_hides_no_module_of_torchrun(tmp_path):
    (tmp_path / "random.py").write_text("raise RuntimeError('hidden')")
    result = subprocess.run([*ablate.TORCHRUN, "--help"], cwd=tmp_path, capture_output=True)
    assert result.returncode == 0, result.stderr
    assert os.path.isfile(ablate.TRAIN[-1]) and os.path.isabs(ablate.TRAIN[-1])


LOSS = """
from {helper} import SCALE


def loss(inputs):
    return -SCALE * inputs.log_ratio.exp() * inputs.advantages, {{}}
"""
REWARD = """
def score(response, answer):
    return float(response == answer)
"""


@pytest.fixture
def user_words(tmp_path):
    """The words of a grid with a loss, which imports a helper, and a reward; and the three files."""
    helper = write_user_code(tmp_path, "SCALE = 1.0\n")
    algo = write_user_code(tmp_path, LOSS.format(helper=helper.stem))
    reward = write_user_code(tmp_path, REWARD)
    return ("--algos", f"{algo}:loss", "--", f"--reward={reward}:score"), [helper, algo, reward]


@pytest.mark.parametrize("number", range(3))
def test_a_finished_cell_of_other_user_code_is_refused(number, ablate_stub, user_words, tmp_path):
    words, files = user_words
    ablate_stub(*words)
    assert "1 of them finished before" in ablate_stub(*words)
    files[number].write_text(files[number].read_text() + "\n# other code\n")
    what = f"-a0-k0-s0 is of other code in {files[number]} than is there now; give another --out"
    with pytest.raises(SystemExit, match=re.escape(what)):
        ablate_stub(*words)
    cells = tmp_path / "grid/cells.jsonl"
    (record,) = read_records(cells)
    assert record["user_code"].keys() == {*map(str, files)}
    del record["user_code"]  # older code kept none
    write_jsonl(cells, [record])
    assert "1 of them finished before" in ablate_stub(*words)


def test_user_code_that_changes_while_a_grid_runs_ends_it(ablate_stub, user_words, tmp_path):
    words, (helper, *_) = user_words
    edit = f"\npathlib.Path({str(helper)!r}).write_text('SCALE = 2.0')"
    (tmp_path / "stub.py").write_text(STUB + edit)
    with pytest.raises(SystemExit, match=f"is of other code in {helper} than is there now"):
        ablate_stub("--seeds", "2", *words)
    assert len(read_records(tmp_path / "grid/cells.jsonl")) == 1


def test_cells_of_several_versions_of_this_code_are_reported(ablate_stub, tmp_path):
    ablate_stub("--algos", "grpo", "--seeds", "1")
    record = read_records(tmp_path / "grid/cells.jsonl")[0]
    assert record["code"] == "c"
    stub = (tmp_path / "stub.py").read_text()
    (tmp_path / "stub.py").write_text(stub.replace('"git_diff": ""', '"git_diff": "+ an edit"'))
    printed = ablate_stub("--algos", "grpo", "--seeds", "2")
    begin, end = [line for line in printed.splitlines() if "versions of" in line]
    now = code_version(ablate.git("rev-parse", "HEAD"), ablate.uncommitted_changes())
    assert "have 2 versions of this code" in begin and now in begin
    assert "have 2 versions of this code, c, c with changes dca92ec5;" in end


@pytest.mark.parametrize("commands", [["ab"], ["a", "b"]])
def test_losses_of_two_files_of_one_name_have_two_folders(commands, ablate_stub, tmp_path):
    algos = {}
    for folder in "ab":
        path = tmp_path / folder / f"same_name_{len(commands)}.py"
        path.parent.mkdir()
        path.write_text(LOSS.replace("{helper}", "math").replace("SCALE", "pi").format())
        algos[folder] = f"{path}:loss"
    for command in commands:
        words = "--algos", *(algos[folder] for folder in command), "--keep-runs"
        described = ablate_stub(*words, "--dry-run")
        printed = ablate_stub(*words)
    assert ("needs two losses" in described) == (len(commands) == 2)
    runs = [json.loads(path.read_text()) for path in tmp_path.glob("grid/runs/*/run.json")]
    assert len(runs) == 2
    name = algos[commands[-1][0]]
    assert f"is a loss better than {name} at the same lag?" in printed
    names = re.findall(r"^  (.+-a0-k0-s0)$", described, re.M)
    assert len({*names}) == len(names) and all((tmp_path / "grid/runs" / n).exists() for n in names)


def test_the_order_of_sweep_makes_no_other_cell(ablate_stub, tmp_path):
    sweeps = ("--sweep", "lr=0.1"), ("--sweep", "dtype=bfloat16")
    made = [cells_of("--algos", "grpo", *a, *b) for a, b in (sweeps, sweeps[::-1])]
    assert [*map(str, made[0])] == [*map(str, made[1])]
    words = "--algos", "grpo", *sweeps[0], *sweeps[1], "--", "--steps=1"
    ablate_stub(*words)
    cells = tmp_path / "grid/cells.jsonl"
    (record,) = read_records(cells)
    cell = dict(reversed(record["cell"].items()))  # older code kept the order of --sweep
    write_jsonl(cells, [record | {"cell": cell, "options": [*words_of(cell), "--steps=1"]}])
    assert "1 of them finished before" in ablate_stub(*words)
