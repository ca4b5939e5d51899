"""The GPU bench: its arithmetic, the profile of a step, what it runs again, and its table."""

import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from programs import wait_until
from real_job import words_of

from asyncrl.job.command_line import read_options
from extras.planning.memory import CONTEXT_BYTES, GIB, LINKS_BYTES
from extras.planning.shape import ModelShape
from scripts.bench import gpu
from scripts.bench.fake_ranks import plan
from scripts.bench.trainer_alone import Setup, profile, training_flops
from scripts.lines import read


def test_flops_are_those_of_every_multiply_add():
    """Norms aside; and the formula takes half a square for the causal triangle, which is one diagonal more."""
    layers, hidden, intermediate, heads, keys, head_dim, vocab = 3, 64, 160, 4, 2, 16, 1000
    attention = hidden * (heads + 2 * keys) * head_dim + heads * head_dim * hidden
    layer = attention + 3 * hidden * intermediate
    shape = ModelShape(0, layer, 0, 0, layers, hidden, intermediate, heads, keys, head_dim, vocab)
    lengths, num_trained = [50, 200], 170
    # two per multiply-add, weight by weight and query by key
    forward = 2 * hidden * vocab * num_trained
    for length in lengths:
        for position in range(length):
            forward += layers * (2 * layer + 2 * (position + 1) * heads * head_dim * 2)
    expected = 3 * forward  # forward and backward
    assert training_flops(shape, lengths, num_trained) == pytest.approx(expected, rel=0.005)


def test_the_profile_of_a_step_lists_its_costliest_operations(tmp_path):
    numbers = profile(Setup("cpu", "tiny", tmp_path))
    assert numbers["step_s"] > 0 and "aten::mm" in numbers["kernels"]
    record = {
        "case": "profile tiny",
        "kind": "profile",
        "model": "tiny",
        "gpu": None,
        "numbers": numbers,
    }
    assert numbers["kernels"] in gpu.table([record])


def test_a_machine_with_several_gpus_begins_with_nccl_and_each_part_sees_its_gpus(monkeypatch):
    alone, all_parts = (gpu.chosen_parts("cuda", None, num_gpus) for num_gpus in (1, 8))
    assert {part.num_gpus for part in alone.values()} == {1}
    assert not any("nccl" in name for name in alone)
    assert all_parts.keys() - alone.keys() == {n for n in all_parts if "nccl" in n} != set()
    num_gpus = [part.num_gpus for part in all_parts.values()]
    first_alone = num_gpus.index(1)
    assert first_alone == 8 and set(num_gpus[first_alone:]) == {1}, "NCCL comes first"
    assert max(part.limit_s for part in all_parts.values()) <= gpu.BUDGET_S
    assert {part.num_gpus for part in gpu.chosen_parts("cuda", None, 3).values()} == {1, 2, 3}
    with pytest.raises(ValueError, match="'job-nccl 8b' is none of the parts for 4 GPUs"):
        gpu.chosen_parts("cuda", ["job-nccl 8b"], 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu.first_gpus(2) == "0,1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5,6")
    assert [gpu.first_gpus(n) for n in (1, 3)] == ["4", "4,GPU-5,6"]


def test_every_part_has_a_function_and_selects_tests_that_are_there():
    from scripts.bench import fake_ranks, gpu_parts, trainer_alone

    functions = trainer_alone.FUNCTIONS | fake_ranks.FUNCTIONS | gpu_parts.FUNCTIONS
    names = {
        name.split()[0]
        for table in ("parts", "parts_of_several", "tiny_parts")
        for name in gpu.TABLES[table]
    }
    assert names == functions.keys()
    assert {name.split("-")[0] for name in names} == gpu.TABLES["rows"].keys()
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *trainer_alone.NCCL_TESTS]
    found = subprocess.run(command, cwd=gpu.ROOT, stdout=subprocess.PIPE, text=True).stdout
    tests = [line for line in found.splitlines() if "::" in line]
    selected = {
        name: [test for test in tests if is_selected(test, functions[name].keywords["names"])]
        for name in names
        if name.startswith(("tests-nccl", "tests-ranks"))
    }
    assert sorted(map(len, selected.values())) == [1, 1, 1, 1, 1, 3] and len(tests) == 8
    assert {test for chosen in selected.values() for test in chosen} == set(tests)


def test_ranks_get_a_gpu_each_where_there_are_three():
    num_gpus = [
        gpu.chosen_parts("cuda", ["tests-ranks"], n)["tests-ranks -"][1] for n in (1, 2, 3, 8)
    ]
    assert num_gpus == [1, 2, 3, 3]


def test_a_job_saves_no_checkpoint_and_leaves_no_folder(tmp_path, monkeypatch):
    from scripts.bench import gpu_parts

    configs = []

    def run(command, **_):
        configs.append(read_options(command[command.index("train_async.py") + 1 :]))
        run_path = Path(configs[0].runs_dir, configs[0].run_name)
        shutil.copytree(gpu.ROOT / "results/smollm2/one_digit-s0", run_path)

    monkeypatch.setattr(gpu_parts.subprocess, "run", run)
    numbers = gpu_parts.job(Setup("cpu", "tiny", tmp_path), async_ratio=1.0)
    (config,) = configs
    assert numbers["step_s"] > 0
    assert config.save_every is None and not Path(config.runs_dir).exists()
    options = runpy.run_path(str(gpu.ROOT / "tests/gpu/conftest.py"))["OPTIONS"]
    assert read_options(words_of(options)).save_every is None


SLEEPER = """
import pathlib, subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path({path!r}).write_text(str(sleeper.pid))
time.sleep(60)
"""


def test_a_part_that_hangs_leaves_nothing_that_it_started_in_another_session(tmp_path, monkeypatch):
    pid_path, part = tmp_path / "pid", tmp_path / "part.py"
    part.write_text(SLEEPER.format(path=str(pid_path)))
    monkeypatch.setattr(gpu, "__file__", str(part))
    start = time.monotonic()
    outcome = gpu.run_part("tests-job -", gpu.Part(1.0, 0), "cpu", str(tmp_path))
    assert outcome["failed"].startswith("took more than 1 s; it printed nothing")
    wait_until(lambda: not psutil.pid_exists(int(pid_path.read_text())), timeout_s=10)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            "E   RuntimeError: NCCL error\nFAILED tests/gpu/test_x.py - RuntimeError: NCCL error\n1 failed\n"
            "subprocess.CalledProcessError: Command '[...]' returned non-zero exit status 1.",
            "FAILED tests/gpu/test_x.py - RuntimeError: NCCL error",
        ),
        (
            "error: the model does not fit\ntorch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
            "subprocess.CalledProcessError: Command '[...]' returned non-zero exit status 1.",
            "error: the model does not fit",
        ),
        ("starts\nends", "ends"),
    ],
)
def test_a_part_fails_by_the_error_of_its_test_or_its_run(log, error):
    assert gpu.last_error(log) == error


def is_selected(test, names):
    """What `pytest -k` says of the expressions here."""
    words = names.split(" and ")
    return all((word.removeprefix("not ") in test) != word.startswith("not ") for word in words)


def run_bench(out, budget_s):
    with pytest.raises(SystemExit) as ended:
        gpu.main(out, ["trainer"], "cpu", budget_s)
    (record,) = read(out / "gpu.jsonl")
    return int(ended.value.code), record


def test_the_bench_runs_without_a_gpu_what_failed_and_nothing_twice(tmp_path):
    status, record = run_bench(tmp_path, budget_s=0)
    assert status == 1 and record["failed"] == "not run: it can take 200 s, and 0 s are left"
    status, record = run_bench(tmp_path, budget_s=400)
    assert status == 0, record
    assert record["numbers"]["steps"] == 3 and record["numbers"]["mfu"] > 0
    assert "no GPU: the numbers mean nothing" in (tmp_path / "table.md").read_text()
    assert run_bench(tmp_path, budget_s=0) == (0, record)


def test_records_of_two_gpus_stand_beside_each_other(tmp_path, monkeypatch):
    path, outcomes = (
        tmp_path / "gpu.jsonl",
        iter([{"summary": "1 passed"}, {"summary": "2 passed"}]),
    )
    monkeypatch.setattr(gpu, "run_part", lambda *_: {"numbers": next(outcomes)})
    for name in ("H100, 80 GiB", "H200, 140 GiB", "H100, 80 GiB"):
        monkeypatch.setattr(gpu, "gpu_name", lambda name=name: name)
        gpu.run_parts({"tests-job -": gpu.Part(400, 1)}, "cuda", 500, path)
    assert gpu.table(read(path)).splitlines() == [
        "H100, 80 GiB", "tests-job  1 passed", "", "H200, 140 GiB", "tests-job  2 passed"
    ]  # fmt: skip


def test_one_rank_of_four_has_the_savings_and_the_memory_that_the_dry_run_plans(tmp_path):
    """docs/devices.md shows 73.81 GiB: with a context, and NCCL's groups, which are no tensors of this rank."""
    config, _, planned_bytes = plan(Setup("cuda", "8b", tmp_path), 4)
    assert config.save_memory == ("layers", "head") and config.max_tokens_per_microbatch == 4096
    others_gib = (CONTEXT_BYTES + LINKS_BYTES) / GIB
    assert planned_bytes / GIB + others_gib == pytest.approx(73.81, abs=0.005)
    with pytest.raises(SystemExit, match="False"):
        gpu.main(tmp_path / "out", ["rank-of-4"], "cpu", 400)
    (record,) = read(tmp_path / "out" / "gpu.jsonl")
    assert record["numbers"]["steps"] == 3 and record["numbers"]["planned_gib"] > 0
    measured = {"trainer_peak_gib": 90.0, "reserved_over_peak": 1.0, "outside_gib": 1.2}
    record |= {
        "case": "rank-of-4 8b",
        "numbers": record["numbers"] | measured | {"planned_gib": 60.0},
    }
    shown = gpu.table([record])
    assert " 90, predicted 60, 1.50 ×: " in shown
    assert "CHANGE saved_bytes_per_token" in shown


def test_the_stored_records_give_the_rows_of_the_stored_table():
    """The records have numbers far from the prediction, and parts that failed."""
    stored = gpu.ROOT / "results/gpu"
    shown = gpu.table(read(stored / "gpu.jsonl"))
    assert f"```\n{shown}\n```" in (stored / "table.md").read_text()
