"""The GPU bench: its arithmetic, the profile of a step, and its table."""

import pytest

from extras.planning.shape import ModelShape
from scripts.bench import gpu
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


def test_the_stored_records_give_the_rows_of_the_stored_table():
    """The records have numbers far from the prediction, and parts that failed."""
    stored = gpu.ROOT / "results/gpu"
    shown = gpu.table(read(stored / "gpu.jsonl"))
    assert f"```\n{shown}\n```" in (stored / "table.md").read_text()
