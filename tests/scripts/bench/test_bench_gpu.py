"""The GPU bench: its arithmetic, its table, and that a part that fails leaves the others."""

import json
import subprocess
import sys

import pytest

from asyncrl.config import Config
from extras.planning import memory
from extras.planning.shape import ModelShape, read_shape
from scripts.bench import gpu
from scripts.bench.gpu_parts import FUNCTIONS
from scripts.bench.trainer_alone import FUNCTIONS as ALONE
from scripts.bench.trainer_alone import Setup, trainer, training_flops
from scripts.lines import read
from scripts.qwen3_shapes import qwen3_config


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


def record(part, **numbers):
    kind, model = part.split()
    return {"case": part, "kind": kind, "model": model, "gpu": None, "numbers": numbers}


def test_the_table_has_a_row_for_every_number_and_every_failure():
    job = {"step_s": 3.0, "spread_s": 0.1, "steps": 4, "publish_s": 0.02, "tokens_per_s": 9e3, "peak_gib": 20.0,
           "gap_mean": 2e-3}  # fmt: skip
    rates = {"spread": 100.0, "steps": 3, "tokens": 65536}
    shown = gpu.table(
        [
            record("sync 0.6b", transport="ipc", gb=1.2, stage_s=0.01, load_s=0.46, spread_s=0.004, gb_per_s=20.0,
                   rounds=5, gap_mean=3e-3, gap_max=0.03, gap_tokens=1020, trainer_peak_gib=5.0, gpu_used_gib=50.0),
            record("rollout 0.6b", tokens_per_s=9000.0, **rates),
            record("bare 0.6b", tokens_per_s=10000.0, **rates),
            record("job-sync 0.6b", **job),
            record("job-async 0.6b", **job | {"step_s": 2.0}),
            record("tests-trainer -", summary="30 passed, 2 skipped"),
            {"case": "trainer 0.6b", "kind": "trainer", "failed": "exited with 1; oh (/tmp/x)"},
        ]
    )  # fmt: skip
    rows = {line.split("  ")[0].strip(): line for line in shown.splitlines()}
    assert len(rows) == 21
    for name, text in {
        "weight sync 0.6b, ipc": "1.20 GB in 0.010 + 0.460 s (trainer + engine), 20.0 GB/s",
        "rollout over bare vLLM": "0.90",
        "job-async over job-sync": "1.50× faster per step",
        "trainer 0.6b": "exited with 1; oh (/tmp/x)",
        "memory, job-sync 0.6b": "20.0 GiB peak of the trainer",
        "rollout 0.6b, tokens_per_s": "9e+03, predicted 7e+04, 0.13 ×: 10 to 15 µs",
        "tests-trainer": "30 passed",
    }.items():
        assert text in rows[name]
    changes = ["CHANGE" in rows[f"sync 0.6b, {number}"] for number in ("stage_s", "load_s")]
    assert changes == [True, False]


def test_every_part_has_a_function_and_rows_and_fits_into_the_budget():
    parts, tiny_parts, rows = (gpu.TABLES[name] for name in ("parts", "tiny_parts", "rows"))
    kinds = {part.split()[0] for part in (*parts, *tiny_parts)}
    assert kinds == (ALONE | FUNCTIONS).keys()
    assert {kind.split("-")[0] for kind in kinds} == rows.keys()
    assert {part.split()[0] for part in list(parts)[:5]} < ALONE.keys(), "first those without vLLM"
    assert max(parts.values()) <= gpu.BUDGET_S < 480 and sum(parts.values()) <= 3600


@pytest.mark.parametrize(
    ("part", "tokens", "mfu"),
    [("trainer 0.6b", 16384, 0.4), ("trainer-long 1.7b", 8192, 0.4), ("trainer-short 1.7b", 2048, 0.35)],
)  # fmt: skip
def test_predictions_are_of_parts_and_the_trainers_are_those_of_the_planner(
    tmp_path, part, tokens, mfu
):
    predictions = gpu.TABLES["predictions"]
    assert predictions.keys() <= gpu.TABLES["parts"].keys()
    qwen3_config(part.split()[1]).save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    flops = training_flops(shape, [512] * 64, 64 * 384)
    assert flops / (mfu * 989e12) == pytest.approx(predictions[part]["step_s"][0], rel=0.05)
    if "trainer_peak_gib" in predictions[part]:
        config = Config(max_prompt_tokens=256, max_tokens_per_microbatch=tokens)
        _, *resident = memory.resident_items(config, shape, 1, False)
        num_bytes = memory.total([*resident, *memory.step_items(config, shape, 1, 1)])
        assert num_bytes / 2**30 == pytest.approx(
            predictions[part]["trainer_peak_gib"][0], rel=0.01
        )


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
    command = [sys.executable, "-c", code, tmp_path, tmp_path / "result"]
    subprocess.run(command, cwd=gpu.ROOT, check=True)
    assert json.loads((tmp_path / "result").read_text())["tokens_per_s"] > 0


def test_the_trainer_part_really_runs_on_the_cpu(tmp_path):
    numbers = trainer(Setup("cpu", "tiny", tmp_path))
    assert 0 < numbers["mfu"] < 1 and numbers["tokens_per_s"] > 0
    assert "MFU of the trainer tiny" in gpu.table([record("trainer tiny", **numbers)])
