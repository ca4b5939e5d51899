"""The GPU bench: its arithmetic, the profile of a step, what it runs again, and its table."""

import pytest

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
    record = {"case": "profile tiny", "kind": "profile", "model": "tiny", "numbers": numbers}
    assert numbers["kernels"] in gpu.table([record])


def run_bench(out, budget_s):
    with pytest.raises(SystemExit) as ended:
        gpu.main(out, ["trainer"], "cpu", budget_s)
    (record,) = read(out / "gpu.jsonl")
    return int(ended.value.code), record


def test_the_bench_runs_without_a_gpu_what_failed_and_nothing_twice(tmp_path):
    status, record = run_bench(tmp_path, budget_s=0)
    assert status == 1 and record["failed"] == "not run: 0 s are left"
    status, record = run_bench(tmp_path, budget_s=400)
    assert status == 0, record
    assert record["numbers"]["steps"] == 3 and record["numbers"]["mfu"] > 0
    assert "no GPU: the numbers mean nothing" in (tmp_path / "table.md").read_text()
    assert run_bench(tmp_path, budget_s=0) == (0, record)


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
    assert "rank-of-4 8b, trainer_peak_gib  90, predicted 60, 1.50 ×: " in shown
    assert "CHANGE saved_bytes_per_token" in shown


def test_the_stored_records_give_the_rows_of_the_stored_table():
    """The records have numbers far from the prediction, and parts that failed."""
    stored = gpu.ROOT / "results/gpu"
    shown = gpu.table(read(stored / "gpu.jsonl"))
    assert f"```\n{shown}\n```" in (stored / "table.md").read_text()
