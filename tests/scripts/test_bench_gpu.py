"""The GPU bench: its arithmetic, its table, and that a part that fails leaves the others."""

import json

import pytest

from cluster.shape import ModelShape
from scripts import bench_gpu
from scripts.bench_gpu import Part, chosen, last_error, run_parts, table
from scripts.bench_gpu_parts import job_numbers
from scripts.bench_gpu_setup import Setup
from scripts.bench_gpu_trainer import throughput, trainer, training_flops


def brute_force_flops(layers, hidden, intermediate, heads, keys, head_dim, vocab, lengths, num_trained):
    """Two per multiply-add, weight by weight and query by key, three times for forward and backward."""
    forward = 0
    for length in lengths:
        for position in range(length):
            for _ in range(layers):
                forward += 2 * hidden * (heads + 2 * keys) * head_dim + 2 * heads * head_dim * hidden
                forward += 3 * 2 * hidden * intermediate
                forward += 2 * (position + 1) * heads * head_dim * 2
    return 3 * (forward + 2 * hidden * vocab * num_trained)


def test_flops_are_those_of_every_multiply_add():
    """Norms aside; and the formula takes half a square for the causal triangle, which is one diagonal more."""
    layers, hidden, intermediate, heads, keys, head_dim, vocab = 3, 64, 160, 4, 2, 16, 1000
    layer = hidden * (heads + 2 * keys) * head_dim + heads * head_dim * hidden + 3 * hidden * intermediate
    shape = ModelShape(0, layer, 0, 0, layers, hidden, intermediate, heads, keys, head_dim, vocab)
    lengths = [50, 200]
    expected = brute_force_flops(layers, hidden, intermediate, heads, keys, head_dim, vocab, lengths, 170)
    assert training_flops(shape, lengths, 170) == pytest.approx(expected, rel=0.005)


def test_throughput_is_of_the_median_step_and_mfu_is_its_share_of_the_matmul_rate():
    found = throughput(1000, 6e12, [2.0, 1.0, 9.0], 12e12)
    assert (found["tokens_per_s"], found["tflops"], found["mfu"]) == (500.0, 3.0, 0.25)
    assert found["spread_s"] == 8.0


def test_a_jobs_numbers_leave_the_warm_up_out_but_not_its_disagreement():
    lines = [
        {"time/step_s": s, "time/publish_s": 0.1, "rollout/tokens_per_s": 10 * s, "mismatch/abs_mean": gap}
        for s, gap in [(60.0, 0.003), (30.0, 0.001), (2.0, 0.001), (3.0, 0.001), (4.0, 0.002)]
    ]
    found = job_numbers([*lines[:-1], lines[-1] | {"memory/peak_gib": 7.5}])
    assert (found["step_s"], found["tokens_per_s"], found["spread_s"], found["steps"]) == (3.0, 30.0, 2.0, 3)
    assert (found["gap_mean"], found["peak_gib"]) == (0.003, 7.5)
    assert "peak_gib" not in job_numbers(lines), "on the CPU"


def record(part, **numbers):
    return {"part": part, "kind": part.split()[0], "size": part.split()[1], "numbers": numbers}


JOB = {"step_s": 3.0, "spread_s": 0.1, "steps": 4, "publish_s": 0.02, "tokens_per_s": 9e3, "peak_gib": 20.0,
       "gap_mean": 2e-3}  # fmt: skip


def test_the_table_has_a_row_for_every_number_and_every_failure():
    shown = table(
        [
            record("sync 0.6b", transport="ipc", gb=1.2, stage_s=0.01, load_s=0.05, spread_s=0.004, gb_per_s=20.0,
                   rounds=5, gap_mean=3e-3, gap_max=0.03, gap_tokens=1020, trainer_peak_gib=5.0, gpu_used_gib=50.0),
            record("rollout 0.6b", tokens_per_s=9000.0, spread=100.0, steps=3, tokens=65536),
            record("bare 0.6b", tokens_per_s=10000.0, spread=100.0, steps=3, tokens=65536),
            record("job-sync 0.6b", **JOB),
            record("job-async 0.6b", **JOB | {"step_s": 2.0}),
            record("tests -", summary="30 passed, 2 skipped"),
            {"part": "trainer 0.6b", "kind": "trainer", "size": "0.6b", "failed": "exited with 1; oh", "log": "/tmp/x"},
        ]
    )  # fmt: skip
    rows = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
    assert "1.20 GB in 0.010 + 0.050 s (trainer + engine), 20.0 GB/s" in rows["weight sync 0.6b, ipc"]
    assert "mean 3.00e-03" in rows["|engine − trainer| 0.6b, nats"]
    assert rows["rollout over bare vLLM"].endswith("0.90")
    assert rows["job async over job sync"].endswith("1.50× faster per step")
    assert rows["trainer 0.6b"].endswith("exited with 1; oh (/tmp/x)")
    assert "30 passed" in rows["tests/gpu"] and len(rows) == 11


def test_the_last_error_is_what_a_failed_part_says():
    log = "starting\nValueError: no room\nTraceback\nRuntimeError: engine died\ncleaning up\n"
    assert last_error(log) == "RuntimeError: engine died"
    assert last_error("a\nb\n") == "b"
    assert last_error("") == "it printed nothing"


def test_parts_are_chosen_by_kind_or_name_and_unknown_ones_refused():
    assert [part.name for part in chosen("cuda", None, ["sync"])] == ["sync 0.6b", "sync 1.7b", "sync 4b"]
    assert [part.name for part in chosen("cuda", None, ["sync 4b", "tests"])] == ["sync 4b", "tests -"]
    assert {part.size for part in chosen("cpu", None, None)} == {"tiny"}
    with pytest.raises(ValueError, match="--only 'sinc' is none of"):
        chosen("cuda", None, ["sinc"])
    assert sum(part.limit_s for part in bench_gpu.PARTS[:2]) < bench_gpu.BUDGET_S


def test_parts_that_fail_or_have_no_time_left_leave_the_others(tmp_path):
    """Real processes: one ends with an error, one is ended, one has no time left."""
    parts = [Part("no-such-part", "tiny", 30), Part("trainer", "no-such-size", 0.2), Part("trainer", "tiny", 1000)]
    records = run_parts(parts, "cpu", 30, {"commit": "x"}, tmp_path / "bench.jsonl")
    assert "exited with 1; KeyError: 'no-such-part'" in records[0]["failed"]
    assert "took more than 0 s" in records[1]["failed"]
    assert "not run" in records[2]["failed"]
    lines = [json.loads(line) for line in (tmp_path / "bench.jsonl").read_text().splitlines()]
    assert [line["commit"] for line in lines] == ["x"] * 3


def test_the_trainer_part_really_runs_on_the_cpu(tmp_path):
    found = trainer(Setup("cpu", "tiny", tmp_path, "keep"))
    assert 0 < found["mfu"] < 1 and found["tokens_per_s"] > 0
    assert "MFU of the trainer tiny" in table([record("trainer tiny", **found)])
