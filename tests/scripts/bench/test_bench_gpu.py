"""The GPU bench: its arithmetic, its table, and that a part that fails leaves the others."""

import json
import subprocess
import sys

import pytest

from extras.planning.shape import ModelShape, read_shape
from scripts.bench import gpu
from scripts.bench.gpu_parts import FUNCTIONS, job_numbers
from scripts.bench.trainer_alone import FUNCTIONS as ALONE
from scripts.bench.trainer_alone import Setup, throughput, trainer, training_flops
from scripts.lines import read
from scripts.qwen3_shapes import qwen3_config


def brute_force_flops(
    layers, hidden, intermediate, heads, keys, head_dim, vocab, lengths, num_trained
):
    """Two per multiply-add, weight by weight and query by key, three times for forward and backward."""
    forward = 0
    for length in lengths:
        for position in range(length):
            for _ in range(layers):
                forward += (
                    2 * hidden * (heads + 2 * keys) * head_dim + 2 * heads * head_dim * hidden
                )
                forward += 3 * 2 * hidden * intermediate
                forward += 2 * (position + 1) * heads * head_dim * 2
    return 3 * (forward + 2 * hidden * vocab * num_trained)


def test_flops_are_those_of_every_multiply_add():
    """Norms aside; and the formula takes half a square for the causal triangle, which is one diagonal more."""
    layers, hidden, intermediate, heads, keys, head_dim, vocab = 3, 64, 160, 4, 2, 16, 1000
    layer = (
        hidden * (heads + 2 * keys) * head_dim
        + heads * head_dim * hidden
        + 3 * hidden * intermediate
    )
    shape = ModelShape(0, layer, 0, 0, layers, hidden, intermediate, heads, keys, head_dim, vocab)
    lengths = [50, 200]
    expected = brute_force_flops(
        layers, hidden, intermediate, heads, keys, head_dim, vocab, lengths, 170
    )
    assert training_flops(shape, lengths, 170) == pytest.approx(expected, rel=0.005)


def test_throughput_is_of_the_median_step_and_mfu_is_its_share_of_the_matmul_rate():
    found = throughput(1000, 6e12, [2.0, 1.0, 9.0], 12e12)
    assert (found["tokens_per_s"], found["tflops"], found["mfu"]) == (500.0, 3.0, 0.25)
    assert found["spread_s"] == 8.0


def test_a_jobs_numbers_leave_the_warm_up_out_but_not_its_disagreement():
    lines = [
        {
            "time/step_s": s,
            "time/publish_s": 0.1,
            "rollout/tokens_per_s": 10 * s,
            "mismatch/abs_mean": gap,
        }
        for s, gap in [(60.0, 0.003), (30.0, 0.001), (2.0, 0.001), (3.0, 0.001), (4.0, 0.002)]
    ]
    found = job_numbers([*lines[:-1], lines[-1] | {"memory/peak_gib": 7.5}])
    assert (found["step_s"], found["tokens_per_s"], found["spread_s"], found["steps"]) == (
        3.0,
        30.0,
        2.0,
        3,
    )
    assert (found["gap_mean"], found["peak_gib"]) == (0.003, 7.5)
    assert "peak_gib" not in job_numbers(lines), "on the CPU"


def record(part, **numbers):
    kind, model = part.split()
    return {"case": part, "kind": kind, "model": model, "gpu": None, "numbers": numbers}


JOB = {"step_s": 3.0, "spread_s": 0.1, "steps": 4, "publish_s": 0.02, "tokens_per_s": 9e3, "peak_gib": 20.0,
       "gap_mean": 2e-3}  # fmt: skip


def test_the_table_has_a_row_for_every_number_and_every_failure():
    shown = gpu.table(
        [
            record("sync 0.6b", transport="ipc", gb=1.2, stage_s=0.01, load_s=0.05, spread_s=0.004, gb_per_s=20.0,
                   rounds=5, gap_mean=3e-3, gap_max=0.03, gap_tokens=1020, trainer_peak_gib=5.0, gpu_used_gib=50.0),
            record("rollout 0.6b", tokens_per_s=9000.0, spread=100.0, steps=3, tokens=65536),
            record("bare 0.6b", tokens_per_s=10000.0, spread=100.0, steps=3, tokens=65536),
            record("job-sync 0.6b", **JOB),
            record("job-async 0.6b", **JOB | {"step_s": 2.0}),
            record("tests-trainer -", summary="30 passed, 2 skipped"),
            {"case": "trainer 0.6b", "kind": "trainer", "failed": "exited with 1; oh (/tmp/x)"},
        ]
    )  # fmt: skip
    rows = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
    assert (
        "1.20 GB in 0.010 + 0.050 s (trainer + engine), 20.0 GB/s" in rows["weight sync 0.6b, ipc"]
    )
    assert "mean 3.00e-03" in rows["|engine − trainer| 0.6b, nats"]
    assert rows["rollout over bare vLLM"].endswith("0.90")
    assert rows["job-async over job-sync"].endswith("1.50× faster per step")
    assert rows["trainer 0.6b"].endswith("exited with 1; oh (/tmp/x)")
    assert rows["memory, job-sync 0.6b"].endswith("20.0 GiB peak of the trainer")
    assert "9e+03, 0.13 × the prediction: 10 to 15 µs" in rows["rollout 0.6b, tokens_per_s"]
    assert "30 passed" in rows["tests-trainer"] and len(rows) == 19


def test_the_last_error_is_what_a_failed_part_says():
    log = "starting\nValueError: no room\nTraceback\nRuntimeError: engine died\ncleaning up\n"
    assert gpu.last_error(log) == "RuntimeError: engine died"
    assert gpu.last_error("a\nb\n") == "b"
    assert gpu.last_error("") == "it printed nothing"


def test_every_part_has_a_function_and_rows_and_the_first_ones_fit_into_the_budget():
    kinds = {part.split()[0] for part in (*gpu.PARTS, *gpu.TINY_PARTS)}
    assert (
        kinds == (ALONE | FUNCTIONS).keys()
        and {kind.split("-")[0] for kind in kinds} == gpu.ROWS.keys()
    )
    assert sum(list(gpu.PARTS.values())[:3]) < gpu.BUDGET_S, (
        "the trainer, its tests, and the engine's agreement"
    )
    assert {part.split()[0] for part in list(gpu.PARTS)[:2]} < ALONE.keys(), (
        "what needs no vLLM comes first"
    )


def test_predictions_are_of_parts_and_the_trainers_is_by_the_formula_of_its_flops(tmp_path):
    """At 40 % of an H100's 989 TFLOP/s."""
    assert gpu.PREDICTIONS.keys() <= gpu.PARTS.keys()
    qwen3_config("0.6b").save_pretrained(tmp_path)
    step_s, _ = gpu.PREDICTIONS["trainer 0.6b"]["step_s"]
    flops = training_flops(read_shape(tmp_path), [512] * 64, 64 * 384)
    assert flops / (0.4 * 989e12) == pytest.approx(step_s, rel=0.05)


def run_bench(monkeypatch, out, *options):
    """Records and exit status of the bench on the CPU."""
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--out", str(out), *options])
    with pytest.raises(SystemExit) as exited:
        gpu.main()
    return read(out / "gpu.jsonl"), exited.value.code


@pytest.mark.slow
def test_parts_that_fail_or_have_no_time_left_leave_the_others(tmp_path, monkeypatch, capsys):
    """Real processes: one ends with an error, one is ended, one has no time left."""
    monkeypatch.setattr(
        gpu,
        "TINY_PARTS",
        {"no-such-part tiny": 30, "trainer no-such-size": 0.2, "trainer tiny": 1000},
    )
    records, status = run_bench(monkeypatch, tmp_path, "--budget-s", "30")
    assert "exited with 1; KeyError: 'no-such-part'" in records[0]["failed"]
    assert "took more than 0 s" in records[1]["failed"]
    assert "not run" in records[2]["failed"] and "commit" in records[2]
    assert status == 1 and capsys.readouterr().out.count("not run") == 1


def test_what_was_measured_on_the_cpu_stays_out_of_the_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    _, status = run_bench(monkeypatch, tmp_path / "results" / "gpu")
    assert status == 2 and "keep it out of results/ with --out" in capsys.readouterr().err


@pytest.mark.slow
def test_the_trainer_part_runs_where_what_only_rollout_needs_is_not_installed(tmp_path):
    """Nor what vLLM brings."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('vllm', 'zmq', 'setproctitle'))); "
        "from scripts.bench import gpu; gpu.measure('trainer', 'tiny', 'cpu', *sys.argv[1:])"
    )
    subprocess.run(
        [sys.executable, "-c", code, tmp_path, tmp_path / "result"], cwd=gpu.ROOT, check=True
    )
    assert json.loads((tmp_path / "result").read_text())["tokens_per_s"] > 0


def test_the_trainer_part_really_runs_on_the_cpu(tmp_path):
    found = trainer(Setup("cpu", "tiny", tmp_path))
    assert 0 < found["mfu"] < 1 and found["tokens_per_s"] > 0
    assert "MFU of the trainer tiny" in gpu.table([record("trainer tiny", **found)])
