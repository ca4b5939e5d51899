"""The GPU bench: its arithmetic, its table, and that a part that fails leaves the others."""

import json

import pytest
from programs import run_python

from extras.planning.planner import LOAD_S
from extras.planning.shape import ModelShape
from scripts.bench import gpu
from scripts.bench.gpu_parts import FUNCTIONS
from scripts.bench.trainer_alone import FUNCTIONS as ALONE
from scripts.bench.trainer_alone import Setup, profile, trainer, training_flops
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


def test_every_part_has_a_function_and_rows_and_fits_into_the_budget():
    parts, tiny_parts, rows = (gpu.TABLES[name] for name in ("parts", "tiny_parts", "rows"))
    kinds = {part.split()[0] for part in (*parts, *tiny_parts)}
    assert kinds == (ALONE | FUNCTIONS).keys()
    assert {kind.split("-")[0] for kind in kinds} == rows.keys()
    assert {part.split()[0] for part in list(parts)[:5]} < ALONE.keys(), "first those without vLLM"
    assert max(parts.values()) <= gpu.BUDGET_S < 480 and sum(parts.values()) <= 3600


@pytest.mark.slow
def test_parts_that_fail_or_have_no_time_left_leave_the_others(tmp_path, monkeypatch):
    """Real processes: one ends with an error, one is ended, one has no time left."""
    parts = {"no-such-part tiny": 300, "trainer no-such-size": 0.2, "trainer tiny": 1000}
    monkeypatch.setitem(gpu.TABLES, "tiny_parts", parts)
    words = ("--device", "cpu", "--out", str(tmp_path), "--budget-s", "300")
    monkeypatch.setattr("sys.argv", ["gpu.py", *words])
    with pytest.raises(SystemExit, match="True"):
        gpu.main()
    reasons = ["exited with 1; KeyError: 'no-such-part'", "took more than 0 s", "not run"]
    for record, reason in zip(read(tmp_path / "gpu.jsonl"), reasons, strict=True):
        assert reason in record["failed"] and "commit" in record


@pytest.mark.slow
def test_the_trainer_part_runs_where_what_only_rollout_needs_is_not_installed(tmp_path):
    """Nor what vLLM brings."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('vllm', 'zmq', 'setproctitle'))); "
        "from scripts.bench import gpu; gpu.measure('trainer', 'tiny', 'cpu', *sys.argv[1:])"
    )
    run_python("-c", code, tmp_path, tmp_path / "result")
    assert json.loads((tmp_path / "result").read_text())["tokens_per_s"] > 0


def test_the_trainer_part_really_runs_on_the_cpu(tmp_path):
    numbers = trainer(Setup("cpu", "tiny", tmp_path))
    assert 0 < numbers["mfu"] < 1 and numbers["tokens_per_s"] > 0
    record = {"case": "trainer tiny", "kind": "trainer", "model": "tiny", "numbers": numbers}
    assert "MFU of the trainer tiny" in gpu.table([record])


def test_the_profile_of_a_step_has_every_part_and_adds_up(tmp_path):
    numbers = profile(Setup("cpu", "tiny", tmp_path))
    parts = {"layers", "head and loss", "optimizer", "embedding", "collectives"}
    assert numbers["parts"].keys() == parts and min(numbers["parts"].values()) > 0
    assert sum(numbers["parts"].values()) == pytest.approx(numbers["busy_s"], abs=1e-3)
    assert 0 < numbers["busy_s"] <= numbers["step_s"]
    assert numbers["waits"]["aten::_local_scalar_dense"] >= 3  # loss, norm and changed weights
    record = {"case": "profile tiny", "kind": "profile", "model": "tiny", "numbers": numbers}
    shown = gpu.table([record])
    assert "'head and loss': " in shown and "aten::_log_softmax" in shown and "aten::mm" in shown


def test_an_engine_is_predicted_to_load_weights_as_the_planner_says():
    """Qwen3-0.6B has 28 layers of 11 weights, and two beside them."""
    predicted, *_ = gpu.TABLES["predictions"]["sync 0.6b"]["load_s"]
    assert predicted == pytest.approx((28 * 11 + 2) * LOAD_S, rel=0.02)


def test_the_stored_records_give_the_rows_of_the_stored_table():
    """The records have numbers far from the prediction, and parts that failed."""
    stored = gpu.ROOT / "results/gpu"
    shown = gpu.table(read(stored / "gpu.jsonl"))
    assert f"```\n{shown}\n```" in (stored / "table.md").read_text()
